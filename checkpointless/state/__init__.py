"""State of a training at its step boundaries: tensors, snapshots, and what only one rank has."""
