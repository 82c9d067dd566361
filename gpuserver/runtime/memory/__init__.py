"""Where memory is: what the driver shows of processes, which vGPUs are on the card, and the store in the host."""
