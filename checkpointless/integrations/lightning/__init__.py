"""The engine of the Lightning strategies."""
