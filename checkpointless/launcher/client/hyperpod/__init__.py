"""The client of a rank that Amazon SageMaker HyperPod's own agent (``hyperpodrun``) started.

It talks to that agent through the vendor's package ``hyperpod-elastic-agent``, each call with its limit. The ranks
meet in a store of rank 0. :class:`HyperPodClient` leads a rank from one generation into the next.

Where the sources that ``client.py`` names say nothing, a wrong guess ends the process, which the vendor's agent
replaces, and never lets a rank go on training with a state that is not its own:

* Every wait for the agent has a limit; only a spare (``SPARE=True``) at the barrier, and a process that asks for
  its rank, start the wait again.
* A start ends the process if its ``JOB_RESTART_COUNT`` is not above the last one, or if it gives another rank or
  world size to a process that holds state.
* It is not documented whether ``MASTER_PORT`` is fresh at each start. Rank 0 hosts a store there, in which all
  ranks meet once more; process groups get a store on a separate port.
* A notice that comes between ``job_start`` and that meeting sends the rank back to the vendor's barrier.
* No message says that a rank is done, so the ranks wait for each other in that store, with a limit.
* A rank cannot end the job. It asks for ``PROCESS_LEVEL_RESTART`` if it cannot be recovered in place; the operator
  has to limit how often that may happen.
* A process that must be replaced reports its fault and exits, as a process that crashed would.

No message from the network is unpickled or evaluated here; the vendor's package reads JSON.
"""

from checkpointless.launcher.client.hyperpod.client import HyperPodClient

__all__ = ["HyperPodClient"]
