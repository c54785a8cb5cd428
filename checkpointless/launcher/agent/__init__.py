"""One agent per node starts the ranks, watches them, tells every rank about every fault and regroups them.

The agent holds no training state, so it outlives every rank. Its ranks talk to it through
:mod:`checkpointless.launcher.client`.
"""
