"""One agent per node starts the ranks, watches them, tells every rank about every fault and regroups them.

The agent holds no training state, so it outlives every rank. A rank talks to its agent through an
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
