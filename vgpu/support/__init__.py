"""What a maintainer needs to know of a node, in one file, without private data."""
