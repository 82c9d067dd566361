"""Decisions without I/O, of hook, broker and dispatcher. Tests run them alone."""
