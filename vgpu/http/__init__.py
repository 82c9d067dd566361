"""HTTP ends of the node: where they listen, how they serve, and the links that they keep."""
