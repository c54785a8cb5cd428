"""Reads what a run has written: its incidents, where its time went, and whether two runs are equal."""
