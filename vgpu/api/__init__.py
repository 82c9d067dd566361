"""The Python API: a small client of the node, which needs neither pydantic nor trio."""
