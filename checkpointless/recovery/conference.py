"""All ranks tell each other what they hold, and conclude alike: how the job resumes, and what is lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.wrap import span
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.recovery.decide import Decision, RankReport, decide, reports_of
from checkpointless.replication.tiers.snapshot import Saves
from checkpointless.state.held_state import HeldState
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import DATA, SnapshotPoint, TrainingState, groups_of
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.transfer.exchange import all_gather_json

logger = logging.getLogger(__name__)


def decide_together(
    state: TrainingState,
    held: HeldState | None,
    own: RankLocalState,
    *,
    compare_digests: bool,
    fit: int,
    begun: int,
    saves: Saves,
) -> Decision:
    """Decide with all other ranks how the job resumes. Collective.

    Args:
        held: the state that this rank holds; None: it holds none.
        compare_digests: report the digest of the held state, so that replicas are compared.
        saves: the background saves whose end this rank has not gone through, as
            :attr:`~checkpointless.recovery.decide.RankReport.saves` has them.

    Raises:
        ValueError: the reports contradict each other about the replica groups.
    """
    call = active_call_wrapper()
    high_water = call.high_water if call is not None else -1
    if call is not None:
        call.steps.recovers = True
    with span(EventName.DECIDE) as fields:
        mine = _report(state, held, own, compare_digests, begun, saves).to_json()
        answers = all_gather_json({"report": mine, "keeps": own.kept_streams()})
        decision = decide(reports_of(answers, own.replicas.jump), high_water, fit)
        fields.update(
            verdict=decision.verdict.value,
            target=decision.target,
            redo=list(decision.redo),
            refills={str(rank): list(sources) for rank, sources in decision.refills.items()},
            reason=decision.reason,
        )
        if any(len(parts) > 1 for parts in decision.parts.values()):
            fields.update(
                parts={
                    str(rank): [{"holders": len(group), "sources": list(sources)} for group, sources in parts]
                    for rank, parts in decision.parts.items()
                }
            )
    return decision


def _report(
    state: TrainingState,
    held: HeldState | None,
    own: RankLocalState,
    compare_digests: bool,
    begun: int,
    saves: Saves,
) -> RankReport:
    named = groups_of(state)
    groups = tuple(named)
    report = RankReport(
        dist.get_rank(),
        None,
        False,
        False,
        groups,
        streams=own.streams.known(),
        begun=begun,
        examples=tuple(named.values()) if len(named) > 1 else (),
        reduced=state.are_reduced,
    )
    if held is None or held.commit.committed < 0 or not (held.moments or held.commit.torn):
        return report
    digests = held.digests if compare_digests else None
    return replace(
        report,
        committed=held.commit.committed,
        ready=held.commit.ready,
        torn=held.commit.torn,
        digests=tuple(digests.get(group, "") for group in groups) if digests is not None else (),
        stages=tuple(int(stage) for stage in sorted(held.moments)),
        fit=held.fit,
        offset=held.offset,
        saves=tuple(saves),
        given_up=held.given_up,
    )


def find_loss(
    journal: StepJournal, held: HeldState | None, own: RankLocalState, decision: Decision, target: int
) -> str:
    """Give every rank its random streams, and find out whether something is lost that it alone had. Collective.

    Args:
        held: the state that this rank holds; None: it holds none.

    Returns:
        Why the state cannot be had from memory; "" if it can.
    """
    moment = target, SnapshotPoint(decision.stage)
    lost = own.find_streams(*moment)
    if lost:
        return (
            f"the random streams of rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} after step "
            f"{target} are lost: neither a process, nor a board, nor another node has them"
        )
    lost_parts = _find_lost_parts(held, journal, decision)
    if lost_parts:
        return (
            f"{', '.join(lost_parts)} differed from rank to rank, and that of rank "
            f"{', '.join(map(str, sorted(decision.refills)))} was lost with its process"
        )
    buffers = held.buffers.get(moment) if held is not None else None
    known = held.moments.get(moment[1]) if held is not None else None
    objects = known.objects if known is not None else {}
    lost_buffers = own.find_lost_buffers(moment, buffers, decision.peers(), objects)
    if lost_buffers:
        rank, reason = min(lost_buffers.items())
        return f"the process of rank {rank} was lost, and {reason}"
    return ""


def _find_lost_parts(held: HeldState | None, journal: StepJournal, decision: Decision) -> list[str]:
    """Compare the parts of the state that ranks keep for themselves, if a rank has lost its parts. Collective.

    A peer's part can replace a lost one only if the parts of all ranks are equal. Parts that do not belong to the
    training data are taken from a peer nevertheless, and a warning is emitted: a callback may keep times of day.

    Args:
        held: the state that this rank holds; None: it holds none.

    Returns:
        The names of the lost parts of the training data.
    """
    if not decision.refills:
        return []
    rank = dist.get_rank()
    mine: dict[str, str] | None = None
    if held is not None and rank not in decision.refills:
        target = decision.target if rank in decision.redo else None
        mine = held.own_parts(journal, target, SnapshotPoint(decision.stage))
    differ = _differing_names([each for each in all_gather_json(mine) if each is not None])
    lost = [name for name in differ if name.startswith(DATA)]
    for name in sorted(set(differ) - set(lost)):
        logger.warning("%s differs from rank to rank: rank %s gets a peer's", name, sorted(decision.refills))
    return lost


def _differing_names(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return, sorted, the names whose digests are not the same in all of ``digests``."""
    names = sorted({name for each in digests for name in each})
    return [name for name in names if len({each.get(name) for each in digests}) > 1]
