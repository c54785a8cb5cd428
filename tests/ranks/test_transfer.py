"""Test that state moves between processes over gloo: all dtypes, several holders, several ranks to fill, damage."""

import collections
import os
import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from checkpointless.faults.inject import _flip_a_bit
from checkpointless.state.serialization.digest import MemoryChecksumManager, digest_value
from checkpointless.transfer.exchange import all_gather_json, receive_bytes
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferError, receive_state, send_state
from tests import ahead_wire
from tests.ranks.nemo_zygote import Zygote

pytestmark = pytest.mark.ranks

BUDGET = 64 * 1024  # this makes buckets of 16 KiB


def state() -> dict[Key, torch.Tensor]:
    """Return tensors of many dtypes and shapes under keys of all kinds, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[Key, torch.Tensor] = {
        ("large",): torch.randn(100_003, generator=generator),
        ("strided",): torch.randn(64, 96, generator=generator).t(),
        ("empty",): torch.empty(0, 4),
        ("scalar",): torch.tensor(3, dtype=torch.int64),
        ("optimizer", 0, 1, "a.b"): torch.randn(7, 5, generator=generator).to(torch.float8_e4m3fn),
        ("optimizer", 0, "1", "a.b"): torch.randn(300, generator=generator).to(torch.bfloat16),
        ("flags",): torch.randn(33, generator=generator) > 0,
        ("complex",): torch.randn(21, generator=generator).to(torch.complex64),
    }
    for index in range(200):
        tensors["small", index] = torch.randn(index % 9 + 1, generator=generator)
    return tensors


def empty_like(entries: Sequence[TensorEntry], gaps: bool = False) -> dict[Key, torch.Tensor]:
    """Return room for ``entries``, with gaps where the original has some, and in more of them if ``gaps``."""
    room = {entry.key: torch.zeros(entry.shape, dtype=entry.dtype) for entry in entries}
    room["strided",] = torch.zeros(64, 96).t()
    for key in [("large",), *(("small", index) for index in range(0, 200, 2))] if gaps else []:
        room[key] = torch.zeros(*room[key].shape, 3)[..., 1]
    return room


def held_before(known: str, original: Mapping[Key, torch.Tensor]) -> Mapping[Key, torch.Tensor]:
    """Return what a destination has already: ``nothing``, ``large`` (right) or ``stale`` (nearly all is wrong)."""
    if known == "large":
        return {("large",): original["large",].clone()}
    if known != "stale":
        return {}
    have = {key: tensor.clone().view_as(tensor) for key, tensor in original.items()}
    for tensor in have.values():
        if tensor.numel() and tensor.is_contiguous():
            _flip_a_bit(tensor)
    return have


def fill(
    destinations: Sequence[int],
    damaged: Sequence[int] = (),  # the holders that damage the bucket in the middle of what they send
    known: str = "nothing",  # what a destination has already, as held_before() takes it
    ahead: bool = False,  # the wire is played to run ahead
    gaps: bool = False,  # some tensors have gaps in the memory of destinations
) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    if ahead:
        ahead_wire.install()
    rank, holders = dist.get_rank(), [each for each in range(dist.get_world_size()) if each not in destinations]
    original = state()
    objects = {"loops": {1: "one", "1": (2, None)}, "empty": {}}
    outcome: dict[str, Any] = {}
    if rank in destinations:
        have = held_before(known, original)
        room: dict[Key, torch.Tensor] = {}

        def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            room.update(empty_like(entries, gaps))
            return room

        try:
            arrived, report = receive_state(holders, allocate, known=have, memory_budget_bytes=BUDGET)
        except TransferError as error:
            outcome["error"] = str(error)
        else:
            outcome = _compared(arrived, objects, room, original, vars(report))
    else:
        seen: list[int] = []

        def on_bucket(position: int, count: int, payload: torch.Tensor) -> torch.Tensor:
            seen.append(position)
            if rank in damaged and position == count // 2:
                payload = payload.clone()
                _flip_a_bit(payload)
            return payload

        fills = [Fill(destination, holders.index(rank), len(holders)) for destination in destinations]
        send_state(original, objects, fills, on_bucket=on_bucket)
        outcome["sent"] = len(seen)
    outcome.setdefault("counts", dict(ahead_wire.counts))
    dist.barrier()
    return outcome


def _compared(
    arrived: object,
    objects: object,
    room: Mapping[Key, torch.Tensor],
    original: Mapping[Key, torch.Tensor],
    report: dict[str, Any],
) -> dict[str, Any]:
    counted = dict(ahead_wire.counts)
    checksums = MemoryChecksumManager()
    return {
        "equal": checksums.digest_all(room) == checksums.digest_all(original),
        "keys": list(map(repr, room)) == list(map(repr, original)),
        "objects": arrived == objects,
        "report": report,
        "counts": counted,
    }


def total_bytes() -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in state().values())


# --- tensors inside of the objects ------------------------------------------------------------------------------

TENSOR_MB = 8
MB = 1024 * 1024
_OBJECTS_BUDGET = 4 * MB


def averages(count: int) -> dict[str, Any]:
    """Return the state of a callback that averages weights: ``count`` large tensors, one of them twice, etc."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(TENSOR_MB * MB // 4, generator=generator) for _ in range(count)]
    weights[0] = weights[0].reshape(2, -1).t()
    return {
        "weights": {f"layer.{index}": weight for index, weight in enumerate(weights)},
        "best": weights[0],
        "history": np.arange(3 * MB // 8, dtype=">f8"),
        "small": torch.tensor(0.5, dtype=torch.bfloat16),
        "decay": np.float32(0.999),
        "milestones": collections.Counter({7: 1}),
        "seen": b"x" * (9 * MB),
    }


def fill_objects(count: int, killed: bool = False, meeting: str = "") -> dict[str, Any]:
    """Fill rank 0 with objects of ``count`` large tensors, from all others.

    With ``killed`` the first holder, which is the last rank then, is killed in the middle; then rank 0 is filled by
    rank 1 alone, and the two meet at the file ``meeting``.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    objects = averages(count)
    shard: dict[Key, torch.Tensor] = {("shard", index): torch.full((999,), float(index)) for index in range(40)}
    sent = 0

    def on_bucket(position: int, total: int, payload: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        sent += payload.numel()
        if killed and rank == world - 1 and position == total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return payload

    def attempt(holders: Sequence[int]) -> dict[str, Any]:
        before = _peak_kb(reset=True)
        if rank != 0:
            send_state(shard, objects, [Fill(0, holders.index(rank), len(holders))], on_bucket=on_bucket)
            return {"sent": sent, "grown_mb": (_peak_kb() - before) // 1024}
        arrived, report = receive_state(
            holders,
            lambda entries: {entry.key: torch.zeros(entry.shape) for entry in entries},
            memory_budget_bytes=_OBJECTS_BUDGET,
        )
        return _compared_objects(arrived, objects, vars(report), (_peak_kb() - before) // 1024)

    outcome: dict[str, Any] = {}
    try:
        outcome = attempt(range(1, world)[:: -1 if killed else 1])
    except RuntimeError as error:
        outcome["error"] = str(error)
    if killed:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
        )
        outcome["again"] = attempt([1])
    dist.barrier()
    return outcome


def _compared_objects(arrived: Any, objects: Any, report: dict[str, Any], grown_mb: int) -> dict[str, Any]:
    return {
        "equal": digest_value(arrived) == digest_value(objects),
        "types": [type(arrived[name]).__name__ for name in ("history", "decay", "milestones")],
        "shared": arrived["best"] is arrived["weights"]["layer.0"],
        "strides": arrived["best"].stride() == objects["best"].stride(),
        "report": report,
        "grown_mb": grown_mb,
    }


def gather(length: int) -> list[int]:
    """Gather messages of different lengths, the largest of ``length`` letters, and return the lengths that came."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    texts = all_gather_json("abc"[rank] * (length // (rank + 1)))
    assert all(set(text) == {"abc"[index]} for index, text in enumerate(texts))
    return [len(text) for text in texts]


def announce() -> str:
    """Let rank 0 announce more than it may send, and return what rank 1 says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    said = ""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([1 << 40]), 1)
    else:
        try:
            receive_bytes(0)
        except ValueError as error:
            said = str(error)
    dist.barrier()
    return said


def _peak_kb(reset: bool = False) -> int:
    """Return the peak resident size of this process in KiB; ``reset`` makes the peak begin at the present size."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


FILL = "tests.ranks.test_transfer:fill"
FILL_OBJECTS = "tests.ranks.test_transfer:fill_objects"

STRIDED = 64 * 96 * 4  # bytes of a tensor with gaps
# This covers several copies of the skeleton with its 9 MB of bytes, and what gloo and torch take for themselves.
SLACK_MB = 60


def whole(outcome: dict[str, Any]) -> bool:
    return bool(outcome["equal"] and outcome["keys"] and outcome["objects"])


@pytest.mark.parametrize(("world", "destinations"), [(2, [0]), (4, [0]), (4, [0, 1])])
def test_every_bit_key_and_object_arrives(nemo_zygote: Zygote, world: int, destinations: list[int]) -> None:
    outcomes = nemo_zygote.run(world, FILL, {"destinations": destinations})
    for destination in destinations:
        assert whole(outcomes[destination])
        report = outcomes[destination]["report"]
        assert report["bytes"] == total_bytes()
        assert report["kept"] == 0
        assert report["gb_per_s"] == pytest.approx(report["bytes"] / report["seconds"] / 1e9)
        assert report["sources"] == [rank for rank in range(world) if rank not in destinations]
    assert len({outcomes[destination]["report"]["digest"] for destination in destinations}) == 1


def test_what_belongs_where_there_are_gaps_arrives(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "gaps": True})
    assert whole(outcomes[0])


def test_a_bucket_that_two_ranks_want_is_made_once(nemo_zygote: Zygote) -> None:
    one = nemo_zygote.run(2, FILL, {"destinations": [0]})
    two = nemo_zygote.run(3, FILL, {"destinations": [0, 1]})
    assert two[2]["sent"] == one[1]["sent"] > 20


def test_a_damaged_bucket_is_found_when_all_have_arrived(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(3, FILL, {"destinations": [0], "damaged": [1]})
    assert outcomes[0]["error"].startswith("1 of ")
    assert outcomes[0]["error"].endswith("buckets arrived damaged from ranks [1, 2]")
    assert abs(outcomes[1]["sent"] - outcomes[2]["sent"]) <= 1, "each sends about half, and waits for nothing more"


@pytest.mark.parametrize(
    ("world", "more", "waits"),
    [
        (2, {"destinations": [0]}, 1),
        (4, {"destinations": [0, 1]}, 1),
        (2, {"destinations": [0], "known": "large"}, 2),  # and once for what is there already
    ],
)
def test_on_a_wire_that_runs_ahead_digests_are_waited_for_once(
    nemo_zygote: Zygote, world: int, more: dict[str, Any], waits: int
) -> None:
    outcomes = nemo_zygote.run(world, FILL, {**more, "ahead": True})
    for rank, outcome in enumerate(outcomes):
        if rank in more["destinations"]:
            assert whole(outcome)
            assert outcome["counts"]["digests"] == waits
        elif world < 3:
            assert outcome["counts"]["digests"] == waits
        assert outcome["counts"]["batches"] < outcome["counts"]["messages"]


def test_what_a_rank_has_already_is_not_sent(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "known": "large"})
    assert whole(outcomes[0])
    report = outcomes[0]["report"]
    assert report["kept"] == 4 * 100_003
    assert report["bytes"] == total_bytes() - report["kept"]


def test_what_a_rank_has_that_is_stale_is_sent(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "known": "stale"})
    assert whole(outcomes[0])
    kept = outcomes[0]["report"]["kept"]
    assert kept == STRIDED, "only the strided one, in which no bit was flipped"


def test_large_objects_arrive_in_buckets_within_the_budget(nemo_zygote: Zygote) -> None:
    filled, *holders = nemo_zygote.run(3, FILL_OBJECTS, {"count": 16})
    assert filled["equal"]
    assert filled["shared"]
    assert filled["strides"]
    assert filled["types"] == ["ndarray", "float32", "Counter"]
    destination_mb = 16 * TENSOR_MB + 3
    assert filled["report"]["bytes"] == destination_mb * MB + 40 * 999 * 4
    assert filled["grown_mb"] < destination_mb + SLACK_MB
    assert all(holder["grown_mb"] < SLACK_MB for holder in holders)
    first, other = (holder["sent"] for holder in holders)
    assert first > destination_mb * MB > MB > other, "the first holder sends its objects"


@pytest.mark.long  # test_state.py has one; this waits for half a minute
def test_a_holder_killed_in_the_middle_of_large_objects(nemo_zygote: Zygote, tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    arguments = {"count": 6, "killed": True, "meeting": meeting}
    filled, holder, killed = nemo_zygote.run(3, FILL_OBJECTS, arguments, expendable=(2,))
    assert killed is None
    assert filled["error"]
    assert filled["again"]["equal"]
    assert filled["again"]["report"]["sources"] == [1]
    assert "sent" in holder["again"]


def test_messages_of_several_chunks_reach_every_rank(nemo_zygote: Zygote) -> None:
    length = 3 * MB + 1
    expected = [length, length // 2, length // 3]
    assert nemo_zygote.run(3, "tests.ranks.test_transfer:gather", {"length": length}) == [expected] * 3


def test_an_announced_size_is_not_believed(nemo_zygote: Zygote) -> None:
    said = nemo_zygote.run(2, "tests.ranks.test_transfer:announce")
    assert said[1].startswith("rank 0 announced a message of 1099511627776 bytes")
