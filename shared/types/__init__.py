"""Every record that crosses the wire or a step; owns shapes and units, never behaviour with side effects."""
