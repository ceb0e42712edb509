"""Model definitions: configuration, checkpoint reading and the dense decoder."""
