"""Configuration: frozen dataclasses for each component, and their loading; owns names and defaults."""
