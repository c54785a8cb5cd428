"""A rank's side: how its process talks to whatever regroups it, under every launcher.

A rank talks to our agent through an :class:`AgentClient`. A rank that another launcher started talks to a store or
to SageMaker HyperPod's agent, or is alone (:class:`StandaloneClient`).
"""

from checkpointless.launcher.client.agent_client import (
    AgentClient,
    AgentLostError,
    RankClient,
    StandaloneClient,
    SuccessorWantedError,
)
from checkpointless.launcher.client.factory import HPAgentK8sAPIFactory, wait_rank
from checkpointless.launcher.protocol.messages import FaultNotice

__all__ = [
    "AgentClient",
    "AgentLostError",
    "FaultNotice",
    "HPAgentK8sAPIFactory",
    "RankClient",
    "StandaloneClient",
    "SuccessorWantedError",
    "wait_rank",
]
