"""The models that come with the project: data folders, and the builder of the demo model."""
