"""Test what the rows of the CPU platform's table patch."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from checkpointless.integrations.megatron import cpu_platform
from checkpointless.integrations.megatron import cpu_platform as nemo
from checkpointless.integrations.megatron.cpu.megatron_replacements import core_rows
from checkpointless.integrations.megatron.cpu.torch_replacements import cuda_rows, draw_rows, placement_rows
from checkpointless.system.patches import Patch


@pytest.mark.parametrize(
    ("rows", "targets"),
    [
        (cuda_rows, [torch.cuda, torch.cuda.random]),
        (placement_rows, [torch, torch.Tensor, torch.nn.Module]),
        (draw_rows, [torch, torch.Tensor, torch.nn.functional]),
    ],
)
def test_the_rows_of_torch_patch_what_their_module_names_and_say_why(
    rows: Callable[[], list[Patch]], targets: list[object]
) -> None:
    table = rows()
    assert {id(row.target) for row in table} == {id(target) for target in targets}
    assert all(row.why for row in table)


@pytest.mark.nemo
def test_the_rows_of_megatron_core_patch_nothing_else() -> None:
    pytest.importorskip("megatron.core")
    table = core_rows()
    homes = {getattr(row.target, "__module__", None) or vars(row.target)["__name__"] for row in table}
    assert homes
    assert all(home.startswith("megatron.core.") for home in homes)


@pytest.mark.nemo
def test_the_router_finds_that_there_is_no_kernel_of_transformer_engine() -> None:
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    if hasattr(moe, "te_general_gemm"):
        pytest.skip("TransformerEngine is installed")
    cpu_platform.install()
    try:
        assert moe.te_general_gemm is None
    finally:
        cpu_platform.uninstall()
    assert not hasattr(moe, "te_general_gemm")


@pytest.mark.nemo
def test_nemo_is_patched_once_and_only_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nemo"]:
        monkeypatch.delitem(sys.modules, name)
    assert nemo.rows() == []
    checkpoint_io = ModuleType("nemo.lightning.io.pl")
    cpu_platform.install()
    try:
        monkeypatch.setitem(sys.modules, checkpoint_io.__name__, checkpoint_io)
        cpu_platform.install()
        fixed = vars(checkpoint_io)["_fix_tensors_device"]
        cpu_platform.install()
        assert vars(checkpoint_io)["_fix_tensors_device"] is fixed
        checkpoint = {"weight": torch.zeros(2)}
        assert fixed(checkpoint) is checkpoint
    finally:
        cpu_platform.uninstall()
    assert "_fix_tensors_device" not in vars(checkpoint_io)
