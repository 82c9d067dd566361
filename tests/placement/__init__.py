"""Where requests go, as pure functions."""
