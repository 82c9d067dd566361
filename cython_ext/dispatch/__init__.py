"""The dispatcher of the GPU Server: it gives GO for leases within microseconds, beside Python."""
