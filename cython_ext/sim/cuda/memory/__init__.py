"""Memory: allocations, arrays, copies, pools and virtual addresses."""
