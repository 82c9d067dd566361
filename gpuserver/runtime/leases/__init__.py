"""How leases reach vGPUs: the token loop, and gangs across GPUs. These modules know no service."""
