"""Commands about where vGPUs go."""
