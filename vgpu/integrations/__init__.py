"""For other programs, such as Jupyter. Each module imports what only that program needs."""
