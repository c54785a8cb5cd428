"""Test that a rehearsal of the examples with Bridge and with Megatron-LM's ``pretrain`` calls them exact."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks.example_diffs import EXAMPLES
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_rehearse import rehearse

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "module"),
    [("bridge", "checkpointless.bridge"), ("megatron_lm", "checkpointless.megatron.pretrain")],
    ids=["bridge", "megatron_lm"],
)
def test_an_example(tmp_path: Path, name: str, module: str) -> None:
    if name == "megatron_lm" and find_spec("megatron.training") is None:
        pytest.skip("needs Megatron-core 0.19's wheel")
    words = ("--steps", "7", "--faults", "2", "--seed", "2", EXAMPLES / f"train_{name}.py")
    with closing(Zygote((module, "tests.ranks.docs_commands"))) as zygote:
        code, said = rehearse(zygote, tmp_path, *words)
    assert code == 0, said
    assert said.rstrip().endswith("exact: 7 steps on 2 ranks, bit by bit, in 2 runs with a fault each"), said
    assert list(tmp_path.iterdir()) == []
