"""The environment variables that an agent gives its ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.system.environment import (
    AGENT_PID_ENV,
    CPU_ENV,
    EXIT_GRACE_ENV,
    FAULTS_ENV,
    HANDOVER_ENV,
    OMP_NUM_THREADS_ENV,
    PYTHONUNBUFFERED_ENV,
    PYTORCH_NVML_BASED_CUDA_CHECK_ENV,
    RECORD_STEPS_ENV,
    RUN_DIR_ENV,
    STRICT_ENV,
    TORCH_DISABLE_ADDR2LINE_ENV,
    TORCH_FR_BUFFER_SIZE_ENV,
    TORCH_NCCL_TRACE_BUFFER_SIZE_ENV,
    TORCH_SHOW_CPP_STACKTRACES_ENV,
    YES,
)


def rank_environment(config: LaunchConfig, handover: Path | None = None) -> dict[str, str]:
    """Return the environment variables that are the same for every rank of the node and for its zygote.

    Args:
        config: what to run on the node; its ``extra_env`` wins over what is set here.
        handover: folder in shared memory for the state that a process hands to its successor.
    """
    env = {RUN_DIR_ENV: str(config.run_dir.resolve()), PYTHONUNBUFFERED_ENV: YES}
    env[EXIT_GRACE_ENV] = f"{config.exit_grace_s:g}"
    if handover is not None:
        env[HANDOVER_ENV] = str(handover)
    env |= import_environment(config.nproc_per_node, config.cpu)
    asked = {**os.environ, **config.extra_env}
    is_sized = TORCH_FR_BUFFER_SIZE_ENV in asked or TORCH_NCCL_TRACE_BUFFER_SIZE_ENV in asked
    if config.cpu and not is_sized:
        # Records of gloo's collectives lie between the tensors of a step, in the same heap: what is freed stays in
        # pieces, and a model of 56 million parameters took 2.1 GB on a rank in the place of 1.3.
        env[TORCH_FR_BUFFER_SIZE_ENV] = "0"
    if asked.get(TORCH_SHOW_CPP_STACKTRACES_ENV) and TORCH_DISABLE_ADDR2LINE_ENV not in asked:
        # Processes that are forked share the pipes of the zygote's addr2line: one reads the answer that another
        # one waits for, forever and with Python's lock held.
        env[TORCH_DISABLE_ADDR2LINE_ENV] = YES
    if config.faults:
        env[FAULTS_ENV] = json.dumps(list(config.faults))
    if not config.is_alone:
        env[AGENT_PID_ENV] = str(os.getpid())
    if config.strict:
        env[STRICT_ENV] = YES
    if config.record_steps:
        env[RECORD_STEPS_ENV] = YES
    return {**env, **config.extra_env}


def import_environment(nproc_per_node: int, cpu: bool) -> dict[str, str]:
    """Return the environment variables of every rank that decide what imports do.

    Args:
        nproc_per_node: number of ranks on the node.
        cpu: whether the job trains on CPUs.
    """
    env = {}
    if nproc_per_node > 1 and OMP_NUM_THREADS_ENV not in os.environ:
        env[OMP_NUM_THREADS_ENV] = "1"
    if cpu:
        env[CPU_ENV] = YES
    elif PYTORCH_NVML_BASED_CUDA_CHECK_ENV not in os.environ:
        # Imports ask whether there is a GPU; the answer must not initialise CUDA, or the zygote could not fork.
        env[PYTORCH_NVML_BASED_CUDA_CHECK_ENV] = YES
    return env
