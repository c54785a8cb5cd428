"""What a rank says to its agent."""

from checkpointless.launcher.client import HPAgentK8sAPIFactory, wait_rank

__all__ = ["HPAgentK8sAPIFactory", "wait_rank"]
