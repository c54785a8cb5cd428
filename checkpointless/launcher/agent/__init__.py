"""One agent per node starts the ranks, watches them, reports every fault to every rank and regroups them.

It holds no training state, so it outlives every rank; ranks talk to it by :mod:`checkpointless.launcher.client`.
"""
