"""Graphs: how they are made, captured, instantiated and launched."""
