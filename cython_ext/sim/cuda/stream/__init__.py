"""Streams and events: the order of work, and its times."""
