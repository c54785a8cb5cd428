"""Checkpoints on storage: loading them only after memory was asked, and saves that a fault comes in between."""
