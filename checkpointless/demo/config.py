"""What a demo is to run, and whether that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECIPE = "tiny_gpt_cpu"

#: Parallel sizes that a layout may give: tensor, pipeline, expert, context.
LAYOUT_KEYS = ("tp", "pp", "ep", "cp")


_LAYOUT_OVERRIDES = {
    "tp": "strategy.tensor_model_parallel_size",
    "pp": "strategy.pipeline_model_parallel_size",
    "ep": "strategy.expert_model_parallel_size",
    "cp": "strategy.context_parallel_size",
}


class DemoError(ValueError):
    """The demo cannot run as asked; the message is one line that says what to do."""


@dataclass(frozen=True)
class DemoConfig:
    """One demo.

    Attributes:
        nproc: number of ranks, on this machine's CPUs.
        steps: optimizer steps of each of the two runs.
        layout: parallel sizes by key of :data:`LAYOUT_KEYS`; a key that is not there is 1.
        dropout: probability in [0, 1).
        faults: fault specs of the second run.
        run_dir: where both runs are kept; None: a new directory under ``runs/``.

    Raises:
        DemoError: the ranks cannot be laid out so that each shard is held twice, or a number is out of range.
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
        tensor, pipeline, expert, context = (self.layout.get(key, 1) for key in LAYOUT_KEYS)
        if context > 1:
            raise DemoError(
                "the demo's layers have no context parallelism, which needs TransformerEngine: leave out cp"
            )
        model_ranks = tensor * pipeline
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


def parse_layout(text: str) -> dict[str, int]:
    """Read a layout such as ``tp=2,pp=1``.

    Args:
        text: ``key=size`` pairs with commas between them; empty for none.

    Raises:
        DemoError: a key is unknown or there twice, or a size is not a whole number of at least 1.
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


def overrides(steps: int, layout: Mapping[str, int], dropout: float) -> tuple[str, ...]:
    """The recipe's overrides for a run.

    Args:
        steps: optimizer steps.
        layout: as in :class:`DemoConfig`.
        dropout: likewise.
    """
    changed = [
        f"trainer.max_steps={steps}",
        f"model.config.hidden_dropout={dropout}",
        f"model.config.attention_dropout={dropout}",
    ]
    changed += [f"{_LAYOUT_OVERRIDES[key]}={size}" for key, size in layout.items()]
    if layout.get("ep", 1) > 1:
        changed += [
            "model.config.num_moe_experts=4",
            "model.config.moe_router_topk=2",
            "model.config.moe_grouped_gemm=false",
            # Megatron-core 0.15 leaves the router's bias uninitialised: without biases there is none
            "model.config.add_bias_linear=false",
        ]
    return tuple(changed)
