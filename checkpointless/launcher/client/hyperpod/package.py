"""The vendor's package ``hyperpod-elastic-agent``: what is used of it, and where that is known from.

Only these public names are used:

* ``hyperpod_elastic_agent.ipc``: ``InProcessRestartSocketClient()``, ``HyperPodIPCException``, ``RestartMode`` with
  ``IN_PROCESS_RESTART`` and ``PROCESS_LEVEL_RESTART``; the client's methods ``hyperpod_wait_rank_info``,
  ``hyperpod_barrier``, ``hyperpod_past_rcb_barrier``, ``hyperpod_wait_fault`` and ``hyperpod_send_fault``. AWS's
  published training library (aws/sagemaker-hyperpod-checkpointless-training, ``inprocess/train_utils.py`` and
  ``inprocess/elastic/hp_agent_api.py``) calls all of them. The developer guide's API reference names
  ``hyperpod_wait_rank_info`` and says what ``HPAgentK8sAPIFactory`` and ``wait_rank`` are for.
* The replies ``("job_rank_info" | "job_start", {"worker_envs": {...}})`` and ``("job_fault", {...})``, and
  ``JOB_RESTART_COUNT`` in ``worker_envs``. They are known from the same library.
* ``restart_count`` in a ``job_fault``, the variable ``SPARE``, the argument ``timeout``, the arguments ``reason``
  and ``message`` of ``hyperpod_send_fault`` and the variable ``HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH``. They are
  known from signatures and docstrings of the package itself (1.1.0 to 1.1.3).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MODULE = "hyperpod_elastic_agent.ipc"
_METHODS = (
    "hyperpod_wait_rank_info",
    "hyperpod_barrier",
    "hyperpod_past_rcb_barrier",
    "hyperpod_wait_fault",
    "hyperpod_send_fault",
)
_RESTART_MODES = ("IN_PROCESS_RESTART", "PROCESS_LEVEL_RESTART")
_INSTALL = "pip install -e '.[hyperpod]' in a clone"


@dataclass(frozen=True)
class VendorPackage:
    """The parts of ``hyperpod_elastic_agent.ipc`` that are used.

    Attributes:
        client: the client's class, which makes a connected client.
        error: the exception that the client's methods raise, also when a time limit has passed.
        in_place: the restart mode in which processes stay alive.
        new_processes: the restart mode in which every process of the job is replaced.
    """

    client: Callable[[], Any]
    error: type[Exception]
    in_place: object
    new_processes: object

    @classmethod
    def load(cls) -> VendorPackage:
        """Import the package and check that it has every name that is used.

        Raises:
            RuntimeError: the package is not installed, cannot be imported, or lacks a name; its one line says what
                to do.
        """
        try:
            module = importlib.import_module(_MODULE)
        except ModuleNotFoundError as error:
            if error.name not in (_MODULE, _MODULE.partition(".")[0]):
                raise RuntimeError(f"{_MODULE} cannot be imported ({error}): {_INSTALL}") from error
            raise RuntimeError(
                "SageMaker HyperPod's agent started this process, but hyperpod_elastic_agent.ipc is not installed "
                f"for this Python: {_INSTALL}"
            ) from error
        except ImportError as error:
            raise RuntimeError(f"{_MODULE} cannot be imported ({error}): {_INSTALL}") from error
        client = getattr(module, "InProcessRestartSocketClient", None)
        modes = getattr(module, "RestartMode", None)
        missing = [f"RestartMode.{name}" for name in _RESTART_MODES if not hasattr(modes, name)]
        missing += [
            f"InProcessRestartSocketClient.{name}" for name in _METHODS if not callable(getattr(client, name, None))
        ]
        error_type = getattr(module, "HyperPodIPCException", None)
        if error_type is None:
            missing.append("HyperPodIPCException")
        if client is None or modes is None or error_type is None or missing:
            raise RuntimeError(
                f"{_MODULE} has no {', '.join(missing)}: install a version that has (1.1.0 to 1.1.3 do): {_INSTALL}"
            )
        return cls(client, error_type, modes.IN_PROCESS_RESTART, modes.PROCESS_LEVEL_RESTART)
