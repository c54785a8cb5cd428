"""What the kernel keeps for processes: their trees, shared memory, temporary folders, forks and clocks."""
