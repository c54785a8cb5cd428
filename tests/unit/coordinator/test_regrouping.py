"""Test what the coordinator makes of faults, until the next generation or the job itself begins again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpointless.launcher.coordinator.incident_policy import SAME_FAILURE_LIMIT
from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.coordinator.regrouping import SAME_FAILURE_S
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import CauseKind, exception_cause
from checkpointless.launcher.protocol.messages import Alive, Answer, Done, End, FaultNotice, Go, HandOver, OneEnded
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.observability.telemetry.events import Event, read_events
from tests.unit.messaged_job import Job, at_barrier, go_env


def noted(run_dir: Path, name: EventName) -> list[Event]:
    return [event for event in read_events(run_dir) if event.stage == name]


def test_an_exception_interrupts_all_and_the_next_generation_begins_with_all(job: Job) -> None:
    job.raises(2)
    interrupt = FaultNotice(0, "1", "rank 2 raised ValueError at step 4: no", 2)
    assert (job.take(FaultNotice), job.stores) == ([(0, interrupt), (1, interrupt)], [(0, 0), (1, 0)])
    job.ready(0, 1, 3, committed=4, making=5)
    assert job.begun() == []
    job.ready(2, committed=3, making=4)
    begin = Go(1, "1", go_env(1), high_water=4, target=5)
    assert (job.take(Go), job.started()) == ([(0, begin), (1, begin)], [])
    assert job.said == ["incident 1: rank 2 raised ValueError at step 4: no; recovering"]


def test_the_first_of_the_strongest_causes_is_told_and_a_victim_only_in_want_of_another(job: Job) -> None:
    job.raises(0, CauseKind.VICTIM)
    assert ([interrupt.rank for _, interrupt in job.take(FaultNotice)], job.said) == ([None, None], [])
    job.raises(1, what="raised KeyError")
    job.raises(2, what="raised OSError")
    job.ends(3)
    job.raises(0, CauseKind.VICTIM)
    assert len(job.take(FaultNotice)) == 2
    job.ready(*job.ranks)
    assert job.said == [
        "incident 1: rank 1 raised KeyError at step 4: no; recovering",
        "incident 1: rank 3 killed by SIGKILL at step 4; recovering",
    ]
    job.raises(0, CauseKind.VICTIM, generation=1)
    job.ready(*job.ranks)
    assert job.said[2:] == [
        "incident 1: escalated: incident 2 came before a step was made",
        "incident 2: rank 0 raised ValueError at step 4: no; recovering",
    ]


def test_every_step_up_says_why(job: Job, tmp_path: Path) -> None:
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    _, two = job.coordinator.nodes
    job.ends(1)
    job.lose(two, "it closed the connection")
    job.join(1)
    job.ready(*job.ranks, committed=3, making=4)
    job.progress(0)
    assert [(up.incident, up.fields["rung"], up.fields["why"]) for up in noted(tmp_path, EventName.RUNG)] == [
        ("2", "process", "rank 1 killed by SIGKILL at step 4"),
        ("2", "node", "node 1 was lost at step 4: it closed the connection"),
        ("2", "job", "storage or copies brought step 0 back; step 3 had been committed"),
    ]
    assert job.said[-1] == "incident 2: storage or copies brought step 0 back; step 3 had been committed"


def test_what_is_stale_is_ignored(job: Job) -> None:
    job.ends(2)
    job.ready(*job.ranks)
    job.sent.clear()
    job.said.clear()
    job.raises(0, generation=0)
    job.tell(0, Done(0, rank=0))
    job.ends(2, incarnation=0)
    job.tell(2, at_barrier(2, 0, -1, -1))
    job.tell(0, Answer(1, False, "of an inquiry that nobody made", rank=0))
    job.tell(0, Alive())
    assert ({rank.state for rank in job.coordinator.ranks}, job.sent, job.said) == (
        {messages.RankState.RUNNING},
        [],
        [],
    )


def test_a_fault_during_the_recovery_belongs_to_the_incident(job: Job) -> None:
    job.raises(2)
    job.ready(0, 1, 2)
    job.ends(0)
    job.ready(3)
    assert job.begun() == []
    job.ready(0)
    assert [(begin.generation, begin.incident) for _, begin in job.take(Go)] == [(1, "1")] * 2


def test_a_rank_that_has_returned_within_a_step_is_named_before_the_others_count_as_stalled(job: Job) -> None:
    """It has caught an exception; the others wait for it in a collective."""
    job.tell(1, Done(0, committed=3, making=4, rank=1))
    job.tick()
    assert job.said == []
    job.tick(after_s=1.5)
    job.tick(after_s=3.0)
    (line,) = job.said
    assert line.startswith("rank 1 returned from its block in unfinished step 4, and other ranks did not")


@pytest.mark.parametrize("making", [3, 4])
def test_ranks_that_return_together_or_behind_their_last_step_are_not_named(job: Job, making: int) -> None:
    job.tell(1, Done(0, committed=3, making=making, rank=1))
    for rank in job.ranks if making == 4 else ():
        job.tell(rank, Done(0, committed=3, making=making, rank=rank))
    job.tick(after_s=1.5)
    assert job.said == []


UNFIT = "rank 1 could not enter its block again"


def hand_over(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.ends(rank, 75, forgiven=True, handed_over=True)


def test_all_processes_hand_over_once_all_are_at_the_barrier(job: Job, tmp_path: Path) -> None:
    job.raises(1)
    job.ready(1, entered=True, unfit=UNFIT)
    job.ready(0, 2, committed=4, entered=True)
    assert job.take(HandOver) == []
    job.ready(3, committed=3, entered=True)
    assert job.take(HandOver) == [(0, HandOver(0, 4, [0, 1])), (1, HandOver(0, 4, [2, 3]))]
    assert any(UNFIT in line for line in job.said)
    hand_over(job, *job.ranks)
    assert (job.started(), job.begun()) == ([(rank, 1) for rank in job.ranks], [])
    job.ready(*job.ranks, committed=4)
    assert job.begun() == [1, 1]
    assert [event.fields["rung"] for event in noted(tmp_path, EventName.RUNG)] == [Rung.OWN_STATE.label]


def test_where_it_was_needed_once_it_is_done_at_every_fault_to_processes_that_were_in_their_block(job: Job) -> None:
    job.raises(1)
    job.ready(*job.ranks, entered=True, unfit=UNFIT)
    hand_over(job, *job.ranks)
    job.ready(*job.ranks, committed=4)
    job.sent.clear()
    job.ends(2)
    job.ready(2, committed=4)
    job.ready(0, 1, 3, committed=4, entered=True)
    assert [command.ranks for _, command in job.take(HandOver)] == [[0, 1], [3]]
    assert len([line for line in job.said if UNFIT in line]) == 1


def recovers(job: Job, run_dir: Path, *inexact: int) -> Event:
    """Have rank 0 fail, and all make step 4 again, not exactly on some ranks; return the event of that."""
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    differ(job, *inexact)
    job.progress(4)
    (recovered,) = noted(run_dir, EventName.RECOVERED)
    return recovered


def differ(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.tell(rank, messages.Inexact(1, "step 4 takes another batch", rank=rank))


def test_a_fault_counts_from_when_it_happened(job: Job, tmp_path: Path) -> None:
    job.coordinator.membership.lose(job.coordinator.nodes[1], "no word from it for 7 s", job.now_s() - 7)
    job.join(1)
    recovered = recovers(job, tmp_path)
    (detect,) = noted(tmp_path, EventName.DETECT)
    assert 7 <= detect.fields["undetected_s"] < 67
    assert 7 <= recovered.fields["seconds"] < 67
    assert (recovered.fields["step"], recovered.fields["made"]) == (4, True)
    assert job.said[-1] == f"incident 1: recovered in {recovered.fields['seconds']:.2f} s (node); nothing was lost"


def test_what_is_not_exact_is_in_the_last_line(job: Job, tmp_path: Path) -> None:
    recovered = recovers(job, tmp_path, 1, 0, 1)
    why = "rank 0: step 4 takes another batch (1 other rank too)"
    assert re.fullmatch(rf"incident 1: resumed, not exact, in \S+ s \(in-process\); {re.escape(why)}", job.said[-1])
    assert (recovered.fields["inexact"], job.coordinator.job.incidents.inexact) == (why, 1)


def test_a_second_line_corrects_the_last_one_once(job: Job, tmp_path: Path) -> None:
    recovers(job, tmp_path)
    before = len(job.said)
    differ(job, 1, 0)
    assert job.said[before:] == ["incident 1: resumed, not exact: rank 1: step 4 takes another batch"]
    assert job.coordinator.job.incidents.inexact == 1


LOST = "no living rank holds the shard of rank 2"


def lose_state(job: Job) -> None:
    """Have every node say that no rank holds the state of this generation."""
    generation = job.coordinator.job.generation
    for node in job.coordinator.nodes:
        job.hear(node, messages.GiveUp(generation, LOST, is_lost=True))


def begin_after_a_death(max_restarts: int, events: Path | None = None) -> Job:
    """Return a job that has begun again because rank 2 died in step 8."""
    job = Job(max_restarts=max_restarts, events=events).begin()
    job.ends(2)
    job.ready(*job.ranks, committed=7, making=8)
    job.sent.clear()
    return job


def test_a_job_whose_state_is_lost_begins_again_with_new_processes(tmp_path: Path) -> None:
    job = begin_after_a_death(1, tmp_path / "events.jsonl")
    lose_state(job)
    assert job.coordinator.job.outcome is None
    assert job.started() == [(0, 1), (1, 1), (2, 2), (3, 1)]
    assert {(spawn.afresh, spawn.generation, spawn.incident) for _, spawn in job.take(messages.Spawn)} == {
        (True, 2, "1")
    }
    assert job.said[-1].startswith(f"incident 1: restart 1 of 1: {LOST}; every rank begins again")
    for rank in job.ranks:  # the processes from before end: that is no news
        job.ends(rank, 1, incarnation=job.coordinator.ranks[rank].incarnation - 1)
    assert len(job.started()) == 4
    job.ready(*job.ranks, committed=7, making=8)
    begins = [(begin.generation, begin.origin, begin.high_water, begin.target) for _, begin in job.take(Go)]
    assert begins == [(2, 2, 7, 8)] * 2
    job.progress(5, 9, began_after=5, generation=2)
    assert job.said[-1] == "incident 1: the script itself brought step 5 back; step 7 had been committed"
    assert job.coordinator.job.high_water == 9
    job.progress(9, began_after=5, generation=2)
    assert job.said[-1].endswith("(job); 2 steps are made once more")
    assert f"restart 1 of 1: {LOST}" in [event.fields["why"] for event in noted(tmp_path, EventName.RUNG)]


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_job_without_a_restart_left_ends_with_the_reason(max_restarts: int) -> None:
    job = begin_after_a_death(max_restarts)
    for _ in range(max_restarts):
        lose_state(job)
        job.ready(*job.ranks)
    assert job.coordinator.job.outcome is None
    lose_state(job)
    end = "the job was restarted 2 times" if max_restarts else "--max-restarts N"
    assert re.fullmatch(f"{LOST}.*{end}", job.last_word)


def test_an_exception_that_comes_again_and_again_is_worth_a_restart() -> None:
    job = Job(max_restarts=1).begin()
    for generation in range(2 * SAME_FAILURE_LIMIT):
        assert job.coordinator.job.outcome is None
        job.raises(0, generation=job.coordinator.job.generation)
        job.ready(*job.ranks)
        if generation == SAME_FAILURE_LIMIT - 1:
            assert len(job.started()) == 4
            job.ready(*job.ranks)
    assert job.outcome is not None
    assert "3 times in a row" in job.outcome.last_words[0]


def test_every_node_knows_of_the_first_rank_that_ends_well() -> None:
    job = Job(max_restarts=1).join_all()
    job.ends(3, 0)
    job.ends(2, 0)
    assert job.take(OneEnded) == [(0, OneEnded(3)), (1, OneEnded(3))]
    job.ends(0, 1)  # all begin again
    assert len(job.started()) == 8
    job.sent.clear()
    job.ends(1, 0)
    assert job.take(OneEnded) == [(0, OneEnded(1)), (1, OneEnded(1))]


def fail_before_the_first_step(job: Job, rank: int, error: str = "ValueError", step: int = -1) -> None:
    cause = exception_cause(rank, error, "devices=4", "Traceback", step, victim=error == "a victim's")
    job.tell(rank, messages.FaultReport(job.coordinator.job.generation, cause, rank=rank))


def test_what_all_ranks_raise_before_the_first_step_ends_the_job_at_once() -> None:
    job = Job(max_restarts=3).begin()
    for rank in job.ranks:
        assert job.coordinator.job.outcome is None
        fail_before_the_first_step(job, rank)
    assert job.take(FaultNotice) == []
    reason = "all 4 ranks raised ValueError before the first step: devices=4"
    assert job.outcome == End(1, [reason, "Traceback"])


@pytest.mark.parametrize("other", ["nothing", "KeyError", "a victim's", "a step", "a death"])
def test_what_not_all_ranks_raise_before_the_first_step_is_tried_again(job: Job, other: str) -> None:
    fail_before_the_first_step(job, 0)
    fail_before_the_first_step(job, 1)
    assert job.take(FaultNotice) == []  # the others may be about to raise it, too
    if other == "nothing":
        job.tick(SAME_FAILURE_S + 1)
    elif other == "a death":
        job.ends(2)
    else:
        is_late = other == "a step"
        fail_before_the_first_step(job, 2, "ValueError" if is_late else other, 1 if is_late else -1)
    assert len(job.take(FaultNotice)) == 2
    job.ready(*job.ranks)
    assert (job.coordinator.job.generation, job.outcome) == (1, None)
    job.tick(SAME_FAILURE_S + 1)
    assert len(job.take(FaultNotice)) == 2
    fail_before_the_first_step(job, 0)  # in a later generation nobody waits
    assert len(job.take(FaultNotice)) == 4


def test_a_script_without_a_block_is_restarted_as_torchrun_does() -> None:
    job = Job(max_restarts=1).join_all()
    job.ends(1, 3, incarnation=0)
    assert (job.outcome, job.started()[4:]) == (None, [(rank, 1) for rank in job.ranks])
    job.tick(10_000)  # nobody has entered a block, so nobody is waited for there
    assert job.coordinator.job.phase is Phase.GATHERING
    for rank in job.ranks:
        job.tell(rank, messages.RankEnded(0, False, "log", [], rank=rank, incarnation=1))
    assert job.outcome == End(0, [])
    again = Job(max_restarts=0).join_all()
    again.ends(1, 3, incarnation=0)
    assert again.last_word.startswith("rank 1 exited with code 3")
