"""The device's stream of random numbers: one generator, on which the functions of `torch.cuda` act."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

#: The stream.
stream = torch.Generator()
#: Whether the caller is in `CudaRNGStatesTracker.fork()`, where all draws are the tracker's.
inside_fork: ContextVar[bool] = ContextVar("checkpointless_cpu_platform_inside_fork", default=False)


class Generators:
    """Stand-in for `torch.cuda.default_generators`, which has the one device's stream at every index."""

    def __getitem__(self, device: object) -> torch.Generator:
        return stream

    def __len__(self) -> int:
        return 1


def _manual_seed(seed: int) -> None:
    stream.manual_seed(int(seed))


def _seed() -> None:
    stream.seed()


def _initial_seed() -> int:
    return stream.initial_seed()


def _get_stream_state(device: object = "cuda") -> torch.Tensor:
    return stream.get_state()


def _get_stream_states() -> list[torch.Tensor]:
    return [stream.get_state()]


def set_stream_state(new_state: torch.Tensor, device: object = "cuda", graph_safe: bool = False) -> None:
    """Set the stream's state, as `torch.cuda.set_rng_state` and Megatron's tracker do."""
    stream.set_state(new_state)


def stream_bytes() -> bytes:
    """Return the stream's state as bytes, which are cheaper to store than a tensor."""
    return stream.get_state().numpy().tobytes()


def set_stream_bytes(state: bytes) -> None:
    """Set the stream's state to what `stream_bytes()` returned."""
    stream.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _set_stream_states(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        stream.set_state(state)


#: Functions of `torch.cuda` and `torch.cuda.random`, by name.
STREAM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": _initial_seed,
    "get_rng_state": _get_stream_state,
    "get_rng_state_all": _get_stream_states,
    "set_rng_state": set_stream_state,
    "set_rng_state_all": _set_stream_states,
}
