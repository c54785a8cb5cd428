"""Faults that are caused on purpose, to prove how the recovery handles them.

Nothing here acts unless a fault was requested by name, and each fault is recorded before it happens.
"""
