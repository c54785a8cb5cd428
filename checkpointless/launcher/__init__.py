"""Starts, watches and regroups the ranks of a job; imports no torch."""
