"""Who is alive: owns workers' announcements, incarnations and epochs."""
