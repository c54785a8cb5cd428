"""The environment variables that this project reads, or sets for its processes."""

from __future__ import annotations

import os
from pathlib import Path

# Set by the user, before a job starts.
TOKEN_ENV = "CHECKPOINTLESS_TOKEN"  # secret that the agents of a job share, at least 16 characters; not for ranks
CPU_ENV = "CHECKPOINTLESS_CPU"  # "1": Megatron-core and NeMo train on CPUs; else they do not
DEVICE_CHECK_ENV = "CHECKPOINTLESS_DEVICE_CHECK"  # command that is run before a rank is started again
DEVICE_CHECK_TIMEOUT_ENV = "CHECKPOINTLESS_DEVICE_CHECK_TIMEOUT"  # seconds that it may take; default: 30
LAUNCH_AHEAD_ENV = "CHECKPOINTLESS_LAUNCH_AHEAD"  # how many layers launches may run ahead of the GPU; default: 8
RANK_STATE_BYTES_ENV = "CHECKPOINTLESS_RANK_STATE_BYTES"  # limit of declared state and attributes; default: 1 MiB
LOG_LEVEL_ENV = "CHECKPOINTLESS_LOG_LEVEL"  # "debug", "info", "warning" or "error"; default: messages go nowhere
STRICT_ENV = "CHECKPOINTLESS_STRICT"  # "1": a step that is not exact when it is made again ends the job (--strict)
SPINNING_KERNELS_ENV = "CHECKPOINTLESS_SPINNING_KERNELS"  # "1": kernels that no abort ends are accepted

# Set by the agent for each rank; under another launcher, the user may set the first three.
RUN_DIR_ENV = "CHECKPOINTLESS_RUN_DIR"  # path of the run directory; default: nothing is recorded
FAULTS_ENV = "CHECKPOINTLESS_FAULTS"  # JSON list of the specs of faults to inject; default: none
RECORD_STEPS_ENV = "CHECKPOINTLESS_RECORD_STEPS"  # "1": losses and digests of every step are recorded
REHEARSAL_ENV = "CHECKPOINTLESS_REHEARSAL"  # "1": the job is part of `checkpointless rehearse`
INCARNATION_ENV = "CHECKPOINTLESS_INCARNATION"  # 0 for the rank's first process, 1 more for each successor
AGENT_FD_ENV = "CHECKPOINTLESS_AGENT_FD"  # descriptor of the rank's connection to its agent
BOARD_FD_ENV = "CHECKPOINTLESS_BOARD_FD"  # descriptor of the rank's board
AGENT_PID_ENV = "CHECKPOINTLESS_AGENT_PID"  # process ID of the agent, in a job of several nodes
SOURCE_ENV = "CHECKPOINTLESS_SOURCE"  # for a rank that has moved: where its state is to be had, with the secret
HANDOVER_ENV = "CHECKPOINTLESS_HANDOVER"  # folder in shared memory for the state that a process hands over

# Set by our agent as by torchrun and other launchers.
RANK_ENV = "RANK"  # rank in the job
WORLD_SIZE_ENV = "WORLD_SIZE"  # number of ranks in the job
LOCAL_RANK_ENV = "LOCAL_RANK"  # rank within the node
LOCAL_WORLD_SIZE_ENV = "LOCAL_WORLD_SIZE"  # number of ranks on the node
NODE_RANK_ENV = "NODE_RANK"  # number of the node
GROUP_RANK_ENV = "GROUP_RANK"  # number of the node, in torchrun's words
GROUP_WORLD_SIZE_ENV = "GROUP_WORLD_SIZE"  # number of nodes
ROLE_RANK_ENV = "ROLE_RANK"  # rank among those with the same role; the same as RANK
ROLE_WORLD_SIZE_ENV = "ROLE_WORLD_SIZE"  # number of ranks with the same role; the same as WORLD_SIZE
ROLE_NAME_ENV = "ROLE_NAME"  # name of the role
MASTER_ADDR_ENV = "MASTER_ADDR"  # address of the store that process groups meet at
MASTER_PORT_ENV = "MASTER_PORT"  # port of that store
TORCHELASTIC_RUN_ID_ENV = "TORCHELASTIC_RUN_ID"  # name of the job
TORCHELASTIC_RESTART_COUNT_ENV = "TORCHELASTIC_RESTART_COUNT"  # the generation; torch prefixes keys with it
TORCHELASTIC_MAX_RESTARTS_ENV = "TORCHELASTIC_MAX_RESTARTS"  # how often the launcher restarts all ranks
TORCHELASTIC_USE_AGENT_STORE_ENV = "TORCHELASTIC_USE_AGENT_STORE"  # "True": the launcher hosts the store
SLURM_PROCID_ENV = "SLURM_PROCID"  # set by srun: number of the task; a process that has it has a launcher
JOB_RESTART_COUNT_ENV = "JOB_RESTART_COUNT"  # the generation; default: 0
OMP_NUM_THREADS_ENV = "OMP_NUM_THREADS"  # threads of each rank for tensors on CPUs
PYTHONUNBUFFERED_ENV = "PYTHONUNBUFFERED"  # "1": what a rank prints is in its log at once

# Read by torch, most of them when it makes a group of NCCL's, and by NCCL.
TORCH_NCCL_ASYNC_ERROR_HANDLING_ENV = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # what torch's watchdog does at an error
TORCH_NCCL_RETHROW_CUDA_ERRORS_ENV = "TORCH_NCCL_RETHROW_CUDA_ERRORS"  # "1": the watchdog raises errors of CUDA
TORCH_NCCL_ENABLE_MONITORING_ENV = "TORCH_NCCL_ENABLE_MONITORING"  # "1": a slow watchdog ends the process
TORCH_DIST_USE_NCCL2_ENV = "TORCH_DIST_USE_NCCL2"  # "0": nccl means what it meant before torch 2.15
TORCH_NCCL_DUMP_ON_TIMEOUT_ENV = "TORCH_NCCL_DUMP_ON_TIMEOUT"  # "1": ranks tell each other to dump at a timeout
PYTORCH_NVML_BASED_CUDA_CHECK_ENV = "PYTORCH_NVML_BASED_CUDA_CHECK"  # "1": torch asks NVML whether there is a GPU
TORCH_NCCL_USE_COMM_NONBLOCKING_ENV = (
    "TORCH_NCCL_USE_COMM_NONBLOCKING"  # "1": aborts know of one that is being made
)
NCCL_RAS_ENABLE_ENV = "NCCL_RAS_ENABLE"  # "0": no thread that answers `ncclras`
NCCL_NVLS_ENABLE_ENV = "NCCL_NVLS_ENABLE"  # "0": no multicast over NVLink
TORCH_NCCL_BLOCKING_WAIT_ENV = "TORCH_NCCL_BLOCKING_WAIT"  # "1": the host waits for every collective
TORCH_YES = ("1", "y", "yes", "t", "true")  # what torch takes for yes, in any case
TORCH_FR_BUFFER_SIZE_ENV = "TORCH_FR_BUFFER_SIZE"  # how many collectives torch keeps records of
TORCH_NCCL_TRACE_BUFFER_SIZE_ENV = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # the older name of that
TORCH_GLOO_LAZY_INIT_ENV = "TORCH_GLOO_LAZY_INIT"  # "1": gloo connects two ranks at the first message
TORCH_SHOW_CPP_STACKTRACES_ENV = "TORCH_SHOW_CPP_STACKTRACES"  # "1": errors of C++ say where they were raised
TORCH_DISABLE_ADDR2LINE_ENV = "TORCH_DISABLE_ADDR2LINE"  # "1": without the lines, which helper processes find
TORCH_DISTRIBUTED_DEBUG_ENV = "TORCH_DISTRIBUTED_DEBUG"  # "DETAIL": every group is wrapped in another

# Read by Python: where temporary files are.
TMPDIR_ENV = "TMPDIR"  # path of a folder; default: /tmp

# Set by SageMaker HyperPod's agent for its ranks.
HYPERPOD_SOCKET_ENV = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"  # path of the agent's socket

YES = "1"  # value of a variable that switches something on


def own_run_dir() -> Path | None:
    """Return the run directory of this process, or None if it has none."""
    value = os.environ.get(RUN_DIR_ENV)
    return Path(value) if value else None


def own_rank() -> int:
    """Return the rank of this process; a process outside of a job is rank 0."""
    return int(os.environ.get(RANK_ENV, "0"))


def own_world_size() -> int:
    """Return the number of ranks in this process's job; a process outside of a job is alone."""
    return int(os.environ.get(WORLD_SIZE_ENV, "1"))


def own_generation() -> int:
    """Return the generation that this process was started in, or entered last; the first is 0."""
    return int(os.environ.get(JOB_RESTART_COUNT_ENV, "0"))
