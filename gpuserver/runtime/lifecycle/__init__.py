"""The life of a vGPU: creation, its broker, suspension, migration, removal."""
