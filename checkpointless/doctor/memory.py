"""Whether the state of a job fits into the memory of a device, also while a rank enters its block again.

For P parameters per rank in bf16, gradients in fp32 and Adam, with each copy of the optimizer in d shards:

* steady: 2P for the parameters, 4P for the gradients, and 12P/d for the rank's shard of the fp32 parameters and the
  two moments: 6P + 12P/d bytes (Megatron-core's own figure, as in ``recipes/memory.py``);
* re-entry, when the model is built: the parameters exist twice, in the new modules and in the buffer that these are
  moved into; gradients are new, and the optimizer is held: 2*2P + 4P + 12P/d = 8P + 12P/d bytes;
* re-entry, when the optimizer is built: the new fp32 parameters come on top of the held optimizer, whose moments
  are taken over: 2P + 4P + 12P/d + 4P/d = 6P + 16P/d bytes.

The peak is the larger of the last two. Parameters in fp32, which are their own main parameters, are held as well.
Activations are not in it, because a rank that enters again has none; and neither is what CUDA and NCCL take. With
``enable_offload`` what is held is in host memory meanwhile, so the device holds no more than max(8P, 6P + 12P/d)
bytes. ``benchmarks/peak_memory`` measures the same on a device that the tests play; no GPU was measured.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.telemetry.wording import plural, size

_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 10.0
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class State:
    """The state of one rank, in bytes.

    Attributes:
        parameters: the parameters, as the model computes with them.
        gradients: the buffer in which gradients are summed.
        optimizer: the rank's shard of the optimizer.
        mains: the part of it that is a copy of the parameters in fp32, made anew at a re-entry.
    """

    parameters: int
    gradients: int
    optimizer: int
    mains: int

    @classmethod
    def of(cls, parameters: float, shards: int) -> State:
        """Return the state for a number of parameters in bf16 with gradients in fp32.

        Args:
            parameters: number of parameters of the rank.
            shards: number of shards of each copy of the optimizer.
        """
        count = int(parameters)
        return cls(2 * count, 4 * count, 12 * count // shards, 4 * count // shards)

    @property
    def steady(self) -> int:
        """What it takes between two steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most that it takes at a re-entry."""
        building_model = 2 * self.parameters + self.gradients + self.held
        building_optimizer = self.parameters + self.gradients + self.held + self.mains
        return max(building_model, building_optimizer)

    @property
    def peak_offloaded(self) -> int:
        """The most that it takes on the device at a re-entry with ``enable_offload``."""
        return max(2 * self.parameters + self.gradients, self.steady)

    @property
    def held(self) -> int:
        """What is held meanwhile, in host memory with ``enable_offload``."""
        return self.optimizer if self.mains else self.parameters + self.optimizer


def judge(
    state: State, *, device_bytes: int | None, host_bytes: int | None, ranks: int, offload: bool, source: str
) -> list[Finding]:
    """Return whether a re-entry fits.

    Args:
        state: the state of one rank; of the fullest one, if they differ.
        device_bytes: memory of the smallest device; None: not known.
        host_bytes: memory of the host that is free for use; None: not known.
        ranks: number of ranks on the node.
        offload: whether the job has ``enable_offload``.
        source: where the number of parameters comes from.
    """
    peak = state.peak_offloaded if offload else state.peak
    words = f"the state takes {size(state.steady)} per rank, and {size(peak)} at the peak of a re-entry"
    findings, on_host = [], offload
    if device_bytes is None:
        findings.append(_finding(Severity.OK, f"{words}; no device's memory is known", source))
    elif state.steady > device_bytes:
        seen = f"{words}; a device has {size(device_bytes)}, so not even training fits"
        findings.append(_finding(Severity.ERROR, seen, source, "use more ranks, or larger parallel sizes"))
    elif peak > device_bytes:
        seen = f"{words}; a device has {size(device_bytes)}, so ranks run out of memory in a recovery"
        todo = "use more shards, or larger parallel sizes"
        if not offload and state.peak_offloaded <= device_bytes:
            on_host = True
            todo = f"set enable_offload, which keeps {size(state.held)} per rank in host memory meanwhile"
        findings.append(_finding(Severity.WARNING, seen, source, todo))
    else:
        findings.append(_finding(Severity.OK, f"{words}; a device has {size(device_bytes)}", source))
    if on_host:
        findings += _of_host(state, host_bytes, ranks, offload)
    return findings


def device_memory() -> int | None:
    """Return the memory of the smallest device, in bytes, as ``nvidia-smi`` says; None: not known."""
    try:
        ended = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in ended.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if ended.returncode == 0 and sizes else None


def host_memory() -> int | None:
    """Return how many bytes the kernel could give to new processes; None: not known."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _of_host(state: State, host_bytes: int | None, ranks: int, offload: bool) -> list[Finding]:
    """Judge the host's memory for ``enable_offload``."""
    needed = ranks * state.held
    if host_bytes is None:
        return []
    seen = f"enable_offload takes {size(needed)} of the host for {plural(ranks, 'rank')}"
    seen += f"; {size(host_bytes)} are free"
    if needed <= host_bytes:
        return [_finding(Severity.OK, seen, str(_MEMINFO))]
    severity = Severity.WARNING if offload else Severity.ADVICE
    return [_finding(severity, seen, str(_MEMINFO), "add memory to the host, or use more shards")]


def _finding(severity: Severity, seen: str, source: str, todo: str = "") -> Finding:
    return Finding(Family.MEMORY, severity, seen, source, todo)
