"""Test that models of TransformerEngine's modules stay built over a fault, with a stand-in for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.observability.report.verify import Steps
from tests.ranks.jobs import Disturb, known_steps, run_job
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_warm import BF16, DROPOUT, EP2, OVERLAP, TP2, told
from tests.ranks.test_warm import SMALL as FEW_MICROBATCHES

# Per commit unit/megatron/warm has classes of TransformerEngine, and test_warm.py models that stay and that do not.
pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.long, pytest.mark.timeout(400)]

STAND_IN = Path(__file__).parent / "te_stand_in"
TE = (
    "model.config.transformer_layer_spec={_target_: hydra.utils.get_method, "
    "path: nemo.collections.llm.gpt.model.base.transformer_engine_layer_spec}",
)
GROUPED = (*(each for each in EP2 if "grouped_gemm" not in each), "model.config.moe_grouped_gemm=true")
# The stand-in's layers are slow: half of a batch will do.
SMALL = (*FEW_MICROBATCHES, "data.global_batch_size=8")
PARTS_OF_SEQUENCES = ("strategy.context_parallel_size=2", "strategy.sequence_parallel=true")
FAULTS = (
    "exception@backward:rank=2,step=3",
    "sigkill@optimizer:rank=1,step=6",
    "exception@forward:rank=1,step=9",
)


@pytest.fixture(scope="module")
def nemo_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Yield a process that has imported NeMo beside the stand-in, which NeMo looks for among installed packages."""
    pytest.importorskip("nemo.lightning", reason="needs NeMo")
    installed = tmp_path_factory.mktemp("installed")
    (installed / "transformer_engine-2.9.0.dist-info").mkdir()
    (installed / "transformer_engine-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n"
    )
    zygote = Zygote(path=(STAND_IN, installed))
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def undisturbed(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Steps]:
    """Return a function for the steps of a run without faults, beside the stand-in."""
    return known_steps(nemo_zygote, tmp_path_factory)


@pytest.mark.parametrize(
    "args",
    [
        DROPOUT,  # lora, below, has dropout and two tensor-parallel ranks
        (*TP2, *DROPOUT),
        (*GROUPED, *SMALL, "data.global_batch_size=16"),
        (*TP2, *PARTS_OF_SEQUENCES, *SMALL),
        (*BF16, *DROPOUT),
        OVERLAP,
    ],
    ids=["dp4", "tp2", "grouped", "sequence-and-context-parallel", "bf16", "overlap"],
)
def test_survivors_keep_their_model(disturb: Disturb, tmp_path: Path, args: tuple[str, ...]) -> None:
    checker = f"callbacks.checker={{_target_: tests.ranks.warm_checks.OldGroups, folder: '{tmp_path / 'groups'}'}}"
    once = "callbacks.once={_target_: tests.ranks.warm_checks.NoSecondModel}"
    classes = "callbacks.classes={_target_: tests.ranks.warm_checks.ClassesOfTE}"
    job = disturb(4, 12, *FAULTS, args=(*TE, *args, checker, once, classes))
    ranks = told(job)
    assert [each["kept"] for each in ranks] == [True] * 11, ranks  # 4 ranks, then 3, then 4
    for rank in range(4):
        lines = (tmp_path / "groups" / f"rank-{rank}.jsonl").read_text().splitlines()
        assert all(json.loads(line)["old"] == [] for line in lines), f"rank {rank}: {lines}"


def test_survivors_keep_adapters_of_lora(nemo_zygote: Zygote, tmp_path: Path) -> None:
    args = ("tiny_lora_cpu", "trainer.max_steps=12", *TE, *TP2, *SMALL, *DROPOUT, "peft.dropout=0.1")
    added = "callbacks.added={_target_: tests.ranks.warm_checks.AdaptersOnce}"
    calm = run_job(nemo_zygote, tmp_path / "calm", 4, script_args=[*args, added])
    assert calm.code == 0, calm.story()
    job = run_job(nemo_zygote, tmp_path / "run", 4, script_args=[*args, added], faults=FAULTS)
    assert job.code == 0, job.story()
    job.assert_same(calm.steps)
    assert [each["kept"] for each in told(job)] == [True] * 11, told(job)


def test_an_attribute_that_a_callback_has_set_is_noticed(disturb: Disturb) -> None:
    margin = "callbacks.margin={_target_: tests.ranks.warm_checks.ChangedTE}"
    job = disturb(2, 4, "exception@backward:rank=1,step=3", args=(*TE, *DROPOUT, margin))
    assert len(told(job)) == 2
    assert all("linear_proj is not as it was built" in each["reason"] for each in told(job)), told(job)
