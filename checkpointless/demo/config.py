"""The configuration of a demo, and the checks that it can run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECIPE = "tiny_gpt_cpu"
MOST_RANKS = 32  # more ranks than that, on one machine's CPUs, spend their time waiting for each other

#: Sizes of the recipe's model and batches; a test compares them with the recipe.
LAYERS, HEADS = 4, 4
MICRO_BATCH, GLOBAL_BATCH = 2, 16
EXPERTS = 4

#: Parallel sizes that a layout may give: tensor, pipeline, expert, context.
LAYOUT_KEYS = ("tp", "pp", "ep", "cp")


_LAYOUT_OVERRIDES = {
    "tp": "strategy.tensor_model_parallel_size",
    "pp": "strategy.pipeline_model_parallel_size",
    "ep": "strategy.expert_model_parallel_size",
    "cp": "strategy.context_parallel_size",
}


class DemoError(ValueError):
    """Raised if the demo cannot run as asked; the message is one line that says what to do."""


@dataclass(frozen=True)
class DemoConfig:
    """Configuration of one demo.

    Attributes:
        nproc: number of ranks, on this machine's CPUs.
        steps: number of optimizer steps of each of the two runs.
        layout: parallel sizes by key of :data:`LAYOUT_KEYS`; a missing key means 1.
        dropout: dropout probability, in [0, 1).
        faults: fault specs of the second run.
        run_dir: directory in which both runs are kept; None: a new directory under ``runs/``.

    Raises:
        DemoError: the ranks cannot be laid out so that each shard is held twice, the model cannot be divided as
            asked, or a number is out of range.
    """

    nproc: int = 4
    steps: int = 10
    layout: Mapping[str, int] = field(default_factory=dict)
    dropout: float = 0.0
    faults: tuple[str, ...] = ()
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DemoError(f"--steps must be at least 1, not {self.steps}")
        if not 0.0 <= self.dropout < 1.0:
            raise DemoError(f"--dropout must be at least 0 and below 1, not {self.dropout:g}")
        if not 1 <= self.nproc <= MOST_RANKS:
            raise DemoError(f"--nproc must be from 2 to {MOST_RANKS}, not {self.nproc}")
        tensor, pipeline, expert, context = (self.layout.get(key, 1) for key in LAYOUT_KEYS)
        for key, what, number in (
            ("tp", "attention heads", HEADS),
            ("pp", "layers", LAYERS),
            ("ep", "experts", EXPERTS),
        ):
            if number % self.layout.get(key, 1):
                raise DemoError(
                    f"--layout {key}={self.layout[key]}: the model has {number} {what}, which {self.layout[key]} "
                    "cannot share: use 1, 2 or 4"
                )
        if context > 1:
            raise DemoError(
                f"--layout cp={context}: context parallelism needs TransformerEngine's attention, which CPU ranks "
                "do not have: leave it out"
            )
        if tensor > 1 and expert > 1:
            raise DemoError(
                f"--layout tp={tensor},ep={expert}: Megatron trains experts with tensor parallelism only with "
                "sequence parallelism, which its own layers do not have on CPU ranks: use one of the two"
            )
        model_ranks = math.prod((tensor, pipeline))
        replicas, rest = divmod(self.nproc, model_ranks)
        shape = ",".join(f"{key}={size}" for key, size in self.layout.items()) or "one rank per model"
        if rest:
            raise DemoError(
                f"--nproc {self.nproc} does not divide into models of {model_ranks} ranks ({shape}): "
                f"use a multiple of {2 * model_ranks * expert}"
            )
        if replicas % (2 * expert):
            raise DemoError(
                f"--nproc {self.nproc} makes {replicas} data-parallel ranks ({shape}), too few or too odd to hold "
                f"every shard twice: use a multiple of {2 * model_ranks * expert}"
            )

    @property
    def global_batch(self) -> int:
        """Samples per step: the recipe's number, rounded up to whole microbatches for every data-parallel rank."""
        ranks = self.nproc // (self.layout.get("tp", 1) * self.layout.get("pp", 1))
        return math.ceil(GLOBAL_BATCH / (MICRO_BATCH * ranks)) * MICRO_BATCH * ranks


def parse_layout(text: str) -> dict[str, int]:
    """Parse a layout such as ``tp=2,pp=1``.

    Args:
        text: ``key=size`` pairs with commas between them; empty for none.

    Raises:
        DemoError: a key is unknown or occurs twice, or a size is not a whole number of at least 1.
    """
    layout: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        key, _, size = (piece.strip() for piece in part.partition("="))
        if key not in LAYOUT_KEYS:
            raise DemoError(f"layout {text!r}: {part!r} is not one of {', '.join(f'{k}=N' for k in LAYOUT_KEYS)}")
        if key in layout:
            raise DemoError(f"layout {text!r}: {key} is there twice")
        if not size.isascii() or not size.isdecimal() or not 1 <= int(size) <= 10**6:
            raise DemoError(f"layout {text!r}: {key} must be a whole number of at least 1, not {size!r}")
        layout[key] = int(size)
    return layout


def overrides(
    steps: int, layout: Mapping[str, int], dropout: float, global_batch: int = GLOBAL_BATCH
) -> tuple[str, ...]:
    """Return the overrides of the recipe for a run.

    Args:
        steps: number of optimizer steps.
        layout: parallel sizes, as in :class:`DemoConfig`.
        dropout: dropout probability, in [0, 1).
        global_batch: samples per step.
    """
    changed = [
        f"trainer.max_steps={steps}",
        f"model.config.hidden_dropout={dropout}",
        f"model.config.attention_dropout={dropout}",
    ]
    changed += [f"{_LAYOUT_OVERRIDES[key]}={size}" for key, size in layout.items()]
    if global_batch != GLOBAL_BATCH:
        changed.append(f"data.global_batch_size={global_batch}")
    if layout.get("ep", 1) > 1:
        changed += [
            "model.config.num_moe_experts=4",
            "model.config.moe_router_topk=2",
            "model.config.moe_grouped_gemm=false",
            # Megatron-core 0.15 leaves the router's bias uninitialised, so the model has no biases.
            "model.config.add_bias_linear=false",
        ]
    return tuple(changed)
