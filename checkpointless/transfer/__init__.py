"""Moves tensors and plain messages from rank to rank, checked on the way."""
