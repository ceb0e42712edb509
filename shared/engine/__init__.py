"""Runs a worker: commands in, steps through scheduler and runner, events out."""
