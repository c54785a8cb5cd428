"""Test the grammar of fault specs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.faults.spec import SETUP_PHASES, FaultKind, FaultSpec, FaultSpecError, parse, parse_all


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    kind = draw(st.sampled_from(sorted(FaultKind, key=str)))
    phase = draw(st.sampled_from(sorted(kind.phases, key=str)))
    prob = draw(st.none() | st.floats(0, 1, exclude_min=True))
    rank = st.integers(0, 10**6)
    step = st.integers(0 if phase in SETUP_PHASES else 1, 10**6)
    return FaultSpec(
        kind=kind,
        phase=phase,
        rank=draw(rank if prob is None else st.none() | rank),
        step=draw(step if prob is None else st.none() | step),
        times=draw(st.integers(1, 100)),
        prob=prob,
        seed=0 if prob is None else draw(st.integers(0, 2**32)),
        how=draw(st.sampled_from((None, *kind.variants))),
        seconds=draw(st.none() | st.floats(0, 1e6, exclude_min=True)) if kind is FaultKind.SLOW else None,
    )


@given(specs())
def test_what_is_written_is_read_back(spec: FaultSpec) -> None:
    assert parse(str(spec)) == spec


@given(st.text() | st.builds("{}@{}:{}".format, st.sampled_from(["exit", "hang", "x"]), st.text(), st.text()))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        said = str(parse(text))
    except FaultSpecError as error:
        said = str(error)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no kind"),
        ("sigkil@forward:rank=0,step=1", "did you mean 'sigkill'"),
        ("sigkill@forwards:rank=0,step=1", "did you mean 'forward'"),
        ("exception@forward", "say rank and step"),
        ("exception@forward:rank=0", "say step"),
        ("exception@forward:rank=0,step=0", "at least 1"),
        ("exception@forward:rank=-1,step=1", "at least 0"),
        ("exception@forward:rank=0,step=1,step=2", "twice"),
        ("exception@forward:rank=0,step=1,tims=2", "did you mean 'times'"),
        ("exception@forward:rank=0,step=1,times=0", "at least 1"),
        ("exception@forward:prob=0", "above 0"),
        ("exception@forward:prob=nan", "above 0"),
        ("exception@forward:rank=0,step=1,seed=2", "seed= needs prob="),
        ("exception@forward:rank=0,step=1,how=loud", "no variants"),
        ("exception@forward:rank", "not key=value"),
        ("dataloader@forward:rank=0,step=1", "'dataloader' cannot come in phase 'forward'; use data"),
        ("cuda@init:rank=0,step=1", "'cuda' cannot come in phase 'init'"),
        ("dataloader@data:rank=0,step=1,how=kil", "did you mean 'kill'"),
        ("oom@forward:rank=0,step=1,seconds=2", "seconds= applies to slow, partition, not to oom"),
        ("slow@forward:rank=0,step=1,seconds=0", "above 0"),
        ("slow@forward:rank=0,step=1,seconds=nan", "above 0"),
        ("slow@forward:rank=0,step=1,seconds=inf", "above 0"),
        ("slow@forward:rank=0,step=1,seconds=soon", "above 0"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_to_do(text: str, says: str) -> None:
    with pytest.raises(FaultSpecError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit@data:rank=4,step=1", "rank 4 is not one of the 4 ranks"),
        ("exit@data:rank=0,step=11", "never comes"),
        ("exit@between:rank=0,step=10", "no next step follows"),
        (f"exit@data:rank=0,step={'9' * 5000}", "whole number"),
    ],
)
def test_a_fault_out_of_range_is_refused(text: str, says: str) -> None:
    with pytest.raises(FaultSpecError, match=says):
        parse_all([text], world_size=4, max_steps=10)


def test_a_fault_of_the_gpu_is_refused_where_there_is_none() -> None:
    cuda, oom = "cuda@backward:rank=0,step=1", "oom@backward:rank=0,step=1"
    with pytest.raises(FaultSpecError, match="CUDA is not available here"):
        parse_all([cuda], world_size=4, max_steps=10, cuda=False)
    for text, there in ((cuda, True), (cuda, None), (oom, False)):
        assert text.startswith(parse_all([text], world_size=4, max_steps=10, cuda=there)[0].kind.value)
