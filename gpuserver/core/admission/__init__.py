"""Which vGPUs a GPU has room for: shares, SMs and memory are promised once (docs/scheduling.md, "Admission")."""
