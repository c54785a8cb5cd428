"""Faults caused on purpose, to prove what the recovery does about them.

Nothing here acts unless a fault was asked for by name, and each fault that happens is written down first.
"""
