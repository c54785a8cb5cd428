"""One agent per node: starts ranks, watches them, tells every rank about every fault, regroups them.

Training state never lives in the agent, so it outlives every rank. A rank talks to it through
:class:`AgentClient`; a rank that another launcher started talks to a :class:`StandaloneClient` instead.
"""

from checkpointless.agent.client import AgentClient, AgentLostError, RankClient
from checkpointless.agent.factory import HPAgentK8sAPIFactory, wait_rank
from checkpointless.agent.protocol import FaultNotice
from checkpointless.agent.standalone import StandaloneClient

__all__ = [
    "AgentClient",
    "AgentLostError",
    "FaultNotice",
    "HPAgentK8sAPIFactory",
    "RankClient",
    "StandaloneClient",
    "wait_rank",
]
