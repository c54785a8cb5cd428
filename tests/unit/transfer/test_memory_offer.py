"""Memory is offered to a rank on the same node that asks, and to one at a time where the kernel wants it named."""

from __future__ import annotations

import os

import pytest

from checkpointless.environment import MEMORY_READS_ENV
from checkpointless.posix import process_memory
from checkpointless.transfer import memory_offer
from checkpointless.transfer.memory_offer import MemoryOffers, accepted, own_reader

NAMED: list[int | None] = []


@pytest.fixture(autouse=True)
def a_wire_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    NAMED.clear()
    monkeypatch.delenv(MEMORY_READS_ENV, raising=False)
    monkeypatch.setattr(memory_offer, "runs_ahead", lambda: False)
    monkeypatch.setattr(process_memory, "name_reader", NAMED.append)
    monkeypatch.setattr(process_memory, "names_its_readers", lambda: False)


def test_a_holder_on_this_node_is_read() -> None:
    with MemoryOffers() as offers:
        assert accepted(offers.to(own_reader())) == os.getpid()
        assert accepted(offers.to(own_reader())) == os.getpid()
    assert NAMED == [], "the kernel did not ask for it"


def test_a_holder_of_another_node_or_user_or_container_offers_nothing() -> None:
    reader = own_reader()
    assert isinstance(reader, dict)
    with MemoryOffers() as offers:
        assert offers.to({**reader, "space": "another"}) is None
        assert offers.to(None) is None
    assert accepted(None) is None


def test_either_end_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = own_reader()
    monkeypatch.setenv(MEMORY_READS_ENV, "0")
    assert own_reader() is None
    with MemoryOffers() as offers:
        assert offers.to(reader) is None


def test_nothing_is_read_on_a_wire_that_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_offer, "runs_ahead", lambda: True)
    assert own_reader() is None


def test_a_pid_that_means_another_process_here_is_not_read() -> None:
    with MemoryOffers() as offers:
        offer = offers.to(own_reader())
    assert isinstance(offer, dict)
    assert accepted({**offer, "pid": os.getppid()}) is None
    assert accepted({**offer, "secret": "00" * 32}) is None


def test_where_the_kernel_wants_a_reader_named_it_is_one_and_for_the_transfer_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "names_its_readers", lambda: True)
    reader = own_reader()
    assert isinstance(reader, dict)

    def transfer() -> None:
        with MemoryOffers() as offers:
            assert offers.to({**reader, "pid": 7}) is not None
            assert offers.to({**reader, "pid": 8}) is None
            assert NAMED == [7]
            raise KeyError("the transfer failed")

    with pytest.raises(KeyError):
        transfer()
    assert NAMED == [7, None]


def test_a_transfer_that_ends_leaves_the_reader_of_another_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is filled while copies of a checkpoint go to another one."""
    monkeypatch.setattr(process_memory, "names_its_readers", lambda: True)
    reader = own_reader()
    assert isinstance(reader, dict)
    with MemoryOffers() as first:
        assert first.to({**reader, "pid": 7}) is not None
        with MemoryOffers() as second, MemoryOffers() as third:
            assert second.to({**reader, "pid": 8}) is None, "it would take the first one's place"
            assert third.to({**reader, "pid": 7}) is not None
        assert NAMED == [7]
    assert NAMED == [7, None]
    with MemoryOffers() as fourth:
        assert fourth.to({**reader, "pid": 8}) is not None
    assert NAMED == [7, None, 8, None]
