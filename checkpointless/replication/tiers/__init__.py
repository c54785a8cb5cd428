"""Copies of the training state besides the ranks that train with it, and how a recovery is made of them.

A :class:`~checkpointless.replication.tiers.tier.Tier` is a place in which copies are kept: the memory of neighbors,
a directory of the node, a directory that all nodes share. If the living ranks alone cannot give the state back,
each rank is filled from the cheapest copy of the newest step that exists for all ranks.
"""
