"""CPU as a real platform: Megatron-core and NeMo train on CPU over gloo, unchanged.

Megatron-core calls `torch.cuda` directly. `install()` replaces what it calls there, and the factories and methods
that place a tensor, so that "the current CUDA device" is the CPU. Each replacement is one row of the table that the
modules of `checkpointless/integrations/megatron/cpu/` make up, and `uninstall()` restores the very object that was
there before. `torch.cuda.is_available()` stays False: every caller gets the truth, and Lightning picks its CPU
accelerator and gloo.

Random numbers. A GPU has a separate generator next to the CPU's, and Megatron relies on that: its tracker swaps the
state of the *CUDA* generator, so that dropout and initialisation inside `tracker.fork()` draw from the tracked
stream, and it expects the CPU generator to be left alone. Here every tensor is a CPU tensor, so torch alone would
draw everything from the CPU's default generator, and two streams that are separate on a GPU would be entangled: a
data loader that draws a seed would change the dropout masks, and tensor-parallel ranks would get equal weights.

The platform therefore has a device stream: one `torch.Generator`, on which `torch.cuda.manual_seed`,
`get_rng_state`, `set_rng_state`, `default_generators` and, through them, Megatron's tracker act. A draw uses it

* always for `dropout`, and for factories that are asked for a CUDA device (`torch.rand(..., device="cuda")`);
* inside `CudaRNGStatesTracker.fork()`, for every random function in `DRAWS` of `draws.py` and every method in its
  `DRAW_METHODS`;

and the CPU's default generator otherwise. The platform directs a draw by passing the generator to it; no state is
swapped into the default generator. A swap would let `torch.get_rng_state()` inside a fork read the wrong stream
(activation recomputation under sequence parallelism does just that), would let another thread draw from it, and
could be left half done by an exception that arrives asynchronously. One case is not distinguished: an in-place draw
outside a fork on what would have been a CUDA tensor. It uses the CPU's generator, which is as deterministic and as
much part of the state to be recovered, but is not the stream that a GPU would have used.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.utils._device

from checkpointless.integrations.megatron.cpu.megatron_replacements import bridge_rows, core_rows
from checkpointless.integrations.megatron.cpu.torch_replacements import (
    cuda_rows,
    draw_rows,
    inside_fork,
    itself,
    placement_rows,
    replacements,
    set_stream_bytes,
    stream,
    stream_bytes,
)
from checkpointless.state.rng import RngSource, register_rng_source
from checkpointless.system.environment import CPU_ENV
from checkpointless.system.patches import Patch

_CHECKPOINT_IO = "nemo.lightning.io.pl"
_LORA = "nemo.collections.llm.peft.lora"
_PEFT_UTILS = "nemo.collections.llm.peft.utils"


def requested() -> bool:
    """Return whether the environment asks for the platform (`CHECKPOINTLESS_CPU=1`)."""
    return os.environ.get(CPU_ENV, "") == "1"


def installed() -> bool:
    """Return whether the platform is installed."""
    return replacements.are_made


def install() -> None:
    """Install the platform, or, if it is installed already, forget a fork that was interrupted.

    Imports parts of Megatron-core if it is installed (a few seconds, once per process or per zygote), because the
    tracker is part of the platform. NeMo and Megatron-Bridge are not imported; a call after one of them has been
    imported adds what it needs: NeMo to load a checkpoint and for LoRA, Bridge to train at all.

    Raises:
        RuntimeError: CUDA is available or in use in this process.
    """
    inside_fork.set(False)
    if installed():
        replacements.make([row for row in _rows_of_what_is_imported() if not replacements.touch(row.target)])
        return
    if torch.cuda.is_available() or torch.cuda.is_initialized():
        raise RuntimeError(
            "the CPU platform stands in for CUDA and this process has CUDA: leave out --cpu "
            f"(unset {CPU_ENV}), or hide the devices with CUDA_VISIBLE_DEVICES=''"
        )
    # `with torch.device(...)` keeps a cached set of the real factories: fill it before they are replaced.
    torch.utils._device._device_constructors()
    patches = [*_table(), *_rows_of_what_is_imported()]
    stream.manual_seed(torch.initial_seed() % 2**63)
    replacements.make(patches)
    register_rng_source("cpu_platform", RngSource(stream_bytes, set_stream_bytes))


def uninstall() -> None:
    """Restore exactly what `install()` replaced; do nothing if the platform is not installed."""
    replacements.undo()


def _table() -> list[Patch]:
    """Return every replacement that `install()` makes, but for those in what may be imported later."""
    return [*cuda_rows(), *placement_rows(), *draw_rows(), *core_rows()]


def _rows_of_what_is_imported() -> list[Patch]:
    """Return the replacements in NeMo and Megatron-Bridge, as far as they have been imported."""
    return [*rows(), *bridge_rows()]


# --- Replacements in NeMo -----------------------------------------------------------------------------------------


def rows() -> list[Patch]:
    """Return the replacements in those modules of NeMo that have been imported.

    The other modules are skipped, because importing NeMo takes ten seconds.
    """
    table: list[Patch] = []
    checkpoint_io = sys.modules.get(_CHECKPOINT_IO)
    if checkpoint_io is not None:
        why = "it wants CUDA to be initialized, to move what was loaded to the current device"
        table.append(Patch(checkpoint_io, "_fix_tensors_device", lambda _: itself, why))
    lora = sys.modules.get(_LORA)
    if lora is not None and not getattr(lora, "HAVE_TE", True):
        why = "it asks of every layer whether it is TransformerEngine's, which raises where that is not installed"
        table.append(Patch(lora, "te", lambda _: _NoTransformerEngine, why))
        why = "it takes Megatron's names of TransformerEngine's layers for the layers, where they are None"
        table.append(Patch(sys.modules[_PEFT_UTILS], "HAVE_TE", lambda _: False, why))
    return table


class _NoTransformerEngine:
    """Stand-in for `transformer_engine.pytorch`, of whose layers no instance exists."""

    Linear = type("Linear", (), {})
