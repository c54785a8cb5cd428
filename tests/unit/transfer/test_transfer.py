"""Buckets cover every byte once and are never too large, and groups of messages never wait in a circle."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization.digest import PendingDigests, digest_each
from checkpointless.transfer import exchange, transfer
from checkpointless.transfer.exchange import Message
from checkpointless.transfer.transfer import IN_FLIGHT
from tests.drawn import examples


@given(st.integers(1, 2**40))
def test_buckets_in_flight_stay_within_the_budget(budget: int) -> None:
    assert 0 < transfer._bucket_bytes_of(budget) <= max(1, budget / IN_FLIGHT)


@pytest.mark.parametrize("budget", [1, 2**20, transfer.MEMORY_BUDGET_BYTES])
def test_buffers_of_packed_buckets_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(transfer, "wire_device", lambda: torch.device("cpu"))
    plan = transfer._Plan.of([torch.empty(3, dtype=torch.uint8)] * 2, [], transfer._bucket_bytes_of(budget), 1)
    buffer = transfer._Staging([plan]).take(transfer._size_of(plan.buckets[0]))
    assert buffer.numel() * IN_FLIGHT <= max(IN_FLIGHT, budget)


def test_the_sizes_of_the_default_budget() -> None:
    bucket_bytes = transfer._bucket_bytes_of(transfer.MEMORY_BUDGET_BYTES)
    assert bucket_bytes == 16 * 2**20
    small, large = transfer.PACKED_BYTES // 2 - 1, 40 * 2**20
    sizes = [
        transfer._size_of(bucket) for bucket in transfer._plan_buckets([small, small, small, large], bucket_bytes)
    ]
    assert sorted(sizes) == [small, 2 * small, 8 * 2**20, 16 * 2**20, 16 * 2**20]


@given(st.lists(st.integers(0, 50), max_size=9), st.lists(st.integers(0, 50), max_size=9), st.integers(1, 40))
def test_every_byte_comes_once_in_order(shard: list[int], inside: list[int], bucket_bytes: int) -> None:
    """Those of objects come from the first holder."""
    places = 5
    tensors = [torch.empty(size, dtype=torch.uint8) for size in [*shard, *inside]]
    plan = transfer._Plan.of(tensors[: len(shard)], tensors[len(shard) :], bucket_bytes, places)
    assert all(map(operator.is_, plan.tensors, tensors))
    seen = [
        (part.index, byte) for bucket in plan.buckets for part in bucket for byte in range(part.start, part.stop)
    ]
    assert sorted(seen) == [(index, byte) for index, size in enumerate(shard + inside) for byte in range(size)]
    sender = {index: place for place, indices in enumerate(plan.by_place) for index in indices}
    assert sorted(sender) == list(range(len(plan.buckets)))
    for index, bucket in enumerate(plan.buckets):
        of_objects = bucket[0].index >= len(shard)
        assert all((part.index >= len(shard)) is of_objects for part in bucket)
        assert sender[index] == (0 if of_objects else index % places)
        assert 0 < transfer._size_of(bucket) <= bucket_bytes
        lying = [(part.index, part.start) for part in bucket]
        assert lying == sorted(lying)


@pytest.fixture(autouse=True)
def the_wire_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "wire_device", lambda: torch.device("cpu"))


def test_one_element_among_others_is_a_piece_of_memory() -> None:
    one, room = torch.arange(3.0).reshape(1, 3)[:, 1], torch.zeros(1, 3)[:, 1]
    assert (one.is_contiguous(), one.stride()) == (True, (3,))
    bucket = (transfer._Slice(0, 0, 4),)
    piece = transfer._in_place([one], bucket)
    assert piece is not None
    assert piece.view(torch.float32).tolist() == [1.0]
    digests = PendingDigests()
    transfer._unpack([room], bucket, piece, digests)
    assert room.tolist() == [1.0]
    assert digests.fetch() == [*digest_each({0: piece}).values()]


# --- How much is under way, and that groups of messages never wait for each other in a circle ---------------------

Planned = tuple[int, tuple[int, ...]]  # the bucket, and the ranks at the other end


class Work:
    def wait(self) -> None:
        """Wait for nothing."""


@dataclass
class Rank:
    """Records the groups that one rank launches."""

    groups: list[list[tuple[int, int]]] = field(default_factory=list)
    under_way: list[transfer._Parcel] = field(default_factory=list)
    most: int = 0
    finished: list[int] = field(default_factory=list)

    def launch(self, messages: Sequence[Message]) -> list[Work]:
        self.groups.append([(int(tensor[0]), peer) for _, tensor, peer in messages])
        return [Work()]

    def finish(self, parcel: transfer._Parcel) -> None:
        self.under_way.remove(parcel)
        self.finished.append(parcel.index)

    def run(self, planned: Sequence[Planned], ahead: bool = True) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "runs_ahead", lambda: ahead)
            patch.setattr(transfer, "launch", self.launch)
            window = transfer._Window(self.finish)
            for index, peers in planned:
                window.make_room()
                payload = torch.full((1,), index)
                messages: list[Message] = [(dist.isend, payload, peer) for peer in peers]
                parcel = transfer._Parcel(index, payload, messages, None)
                self.under_way.append(parcel)
                self.most = max(self.most, len(self.under_way))
                window.add(parcel)
            window.close()


def complete(ranks: dict[int, list[list[tuple[int, int]]]]) -> bool:
    """Return whether all groups can be done: a rank's next one begins when all messages of its last one are done.

    Messages between two ranks match in the order in which each has launched them.
    """
    numbered: dict[int, list[set[tuple[int, int, int]]]] = {}
    for rank, groups in ranks.items():
        launched: dict[int, int] = {}
        numbered[rank] = []
        for group in groups:
            named = set()
            for _, peer in group:
                launched[peer] = launched.get(peer, 0) + 1
                named.add((min(rank, peer), max(rank, peer), launched[peer]))
            numbered[rank].append(named)
    while any(numbered.values()):
        present = Counter(name for groups in numbered.values() if groups for name in groups[0])
        done = {name for name, ends in present.items() if ends == 2}
        if not done:
            return False
        for waiting in numbered.values():
            if waiting:
                waiting[0] -= done
                if not waiting[0]:
                    waiting.pop(0)
    return True


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 60))
@examples(100)
def test_groups_never_wait_for_each_other_in_a_circle(
    data: st.DataObject, holders: int, filled: int, buckets: int
) -> None:
    """Each rank to fill wants each bucket from some holder; each end cuts groups by what it sends or receives."""
    sends: dict[int, list[Planned]] = {holder: [] for holder in range(holders)}
    receives: dict[int, list[Planned]] = {100 + number: [] for number in range(filled)}
    for index in range(buckets):
        takers: dict[int, list[int]] = {}
        for rank, planned in receives.items():
            holder = data.draw(st.integers(0, holders - 1))
            planned.append((index, (holder,)))
            takers.setdefault(holder, []).append(rank)
        for holder, wanting in takers.items():
            cut = data.draw(st.integers(0, len(wanting)))  # two plans, in any order
            for part in data.draw(st.permutations([wanting[:cut], wanting[cut:]])):
                if part:
                    sends[holder].append((index, tuple(part)))
    ranks: dict[int, list[list[tuple[int, int]]]] = {}
    for rank, planned in {**sends, **receives}.items():
        recorded = Rank()
        recorded.run(planned)
        assert recorded.finished == [index for index, _ in planned]
        ranks[rank] = recorded.groups
    assert complete(ranks)


def test_the_simulation_finds_a_circle() -> None:
    """Two ranks to fill that go through the buckets of two holders in different orders wait forever."""
    assert complete(
        {0: [[(0, 2)], [(1, 3)]], 1: [[(0, 2)], [(1, 3)]], 2: [[(0, 0), (0, 1)]], 3: [[(1, 0), (1, 1)]]}
    )
    assert not complete(
        {0: [[(0, 2)], [(1, 3)]], 1: [[(1, 3)], [(0, 2)]], 2: [[(0, 1)], [(0, 0)]], 3: [[(1, 0)], [(1, 1)]]}
    )


@pytest.mark.parametrize(("ahead", "per_group"), [(False, 1), (True, IN_FLIGHT // 2)])
def test_eight_are_under_way_each_alone_or_in_two_groups(ahead: bool, per_group: int) -> None:
    rank = Rank()
    rank.run([(index, (1, 2)) for index in range(30)], ahead)
    assert [each for group in rank.groups for each in group] == [(at, to) for at in range(30) for to in (1, 2)]
    assert {len(group) for group in rank.groups[:-1]} == {2 * per_group}
    assert rank.most == IN_FLIGHT
    assert not rank.under_way


@pytest.mark.parametrize("length", [0, -1, exchange.MAX_MESSAGE_BYTES + 1, 1 << 40])
def test_no_announced_length_is_believed(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(exchange, "wire_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(exchange, "exchange", lambda messages: messages[0][1].fill_(length))
    with pytest.raises(ValueError, match=f"announced a message of {length} bytes"):
        exchange.receive_bytes(0)
