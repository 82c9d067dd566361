"""What work takes of the GPU: learned durations, the meter of GPU time used, and demand."""
