"""Test that models of TransformerEngine's modules stay built over a fault, with a stand-in for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.jobs import RUNNER, Disturb, Trainings
from tests.ranks.layouts import DROPOUT, EP2
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_warm import BF16, OVERLAP, TP2, require_kept, told, watched
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
FAULTS = ("exception@backward:rank=2,step=3", "sigkill@optimizer:rank=1,step=6", "exception@forward:rank=1,step=9")


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
def of_recipe(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Return trainings beside the stand-in."""
    return Trainings(nemo_zygote, tmp_path_factory, RUNNER)


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
    classes = "callbacks.classes={_target_: tests.ranks.warm_checks.ClassesOfTE}"
    job = disturb(4, 12, *FAULTS, args=(*TE, *args, *watched(tmp_path), classes))
    require_kept(job, tmp_path)


def test_survivors_keep_adapters_of_lora(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> None:
    args = ("trainer.max_steps=12", *TE, *TP2, *SMALL, *DROPOUT, "peft.dropout=0.1")
    added = "callbacks.added={_target_: tests.ranks.warm_checks.AdaptersOnce}"
    trainings = Trainings(nemo_zygote, tmp_path_factory, RUNNER, recipe="tiny_lora_cpu")
    job = trainings.rough(4, (*args, added), *FAULTS)
    assert [each["kept"] for each in told(job)] == [True] * 11, told(job)


def test_an_attribute_that_a_callback_has_set_is_noticed(disturb: Disturb) -> None:
    margin = "callbacks.margin={_target_: tests.ranks.warm_checks.ChangedTE}"
    job = disturb(2, 4, "exception@backward:rank=1,step=3", args=(*TE, *DROPOUT, margin))
    assert ["linear_proj is not as it was built" in each["reason"] for each in told(job)] == [True] * 2, told(job)
