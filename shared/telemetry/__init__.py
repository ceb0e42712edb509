"""Metrics, traces and logs: owns every metric's definition, the tracing seam and the log format."""
