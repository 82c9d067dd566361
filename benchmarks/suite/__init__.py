"""The benchmarks of a real GPU; benchmarks/README.md lists the folders."""
