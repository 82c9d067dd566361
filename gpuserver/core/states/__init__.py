"""vGPUs that are not on their GPU now: swapped out, suspended while idle, on the way to another GPU, parked."""
