"""Each module measures one mechanism. ``python -m benchmarks`` runs those that need no GPU."""
