"""One agent per node starts the ranks, watches them, reports every fault to every rank and regroups them.

The agent holds no training state, so it outlives every rank. Its ranks talk to it through
:mod:`checkpointless.launcher.client`.
"""
