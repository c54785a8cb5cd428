"""Test what the rows of the CPU platform's table patch."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from checkpointless.integrations.megatron import cpu_platform
from checkpointless.integrations.megatron import cpu_platform as nemo
from checkpointless.integrations.megatron.cpu import megatron_replacements
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


def test_bridge_is_answered_for_what_training_does_not_need_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_there(name: str, *_: object) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(megatron_replacements, "_is_there", lambda _: False)
    import_ = megatron_replacements._answering(not_there)
    pretrain = {"__name__": "megatron.bridge.training.pretrain"}
    found = import_("nvidia_resiliency_ext.inprocess", pretrain, None, ("CallWrapper",))
    assert isinstance(found.CallWrapper, type)
    assert not hasattr(found, "__path__")
    for name, asks in (
        ("nvidia_resiliency_ext.inprocess", "megatron.bridge.training.setup"),
        ("nvidia_resiliency_extra", "megatron.bridge.training.pretrain"),
        ("megatron.energon", "megatron.core.datasets"),
    ):
        with pytest.raises(ModuleNotFoundError):
            import_(name, {"__name__": asks}, None, ("x",))
    assert import_("megatron.energon", {"__name__": "megatron.bridge.data.energon"}, None, ("x",)).x
    monkeypatch.setattr(megatron_replacements, "_is_there", lambda _: True)
    with pytest.raises(ModuleNotFoundError):
        import_("nvidia_resiliency_ext.inprocess", pretrain, None, ("CallWrapper",))


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
