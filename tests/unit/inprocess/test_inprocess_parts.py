"""Test compositions, aborts, finalizers, health checks and the wrapper's settings, without processes."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional
from unittest.mock import Mock, call

import pytest
import torch
from torch.utils.data._utils import signal_handling as torch_workers

from checkpointless import inprocess
from checkpointless.inprocess import CheckpointlessAbortManager, CudaHealthCheck, HPDataLoaderAbort, HPWrapper
from checkpointless.inprocess.exceptions import is_victim
from checkpointless.inprocess.finalize import collect_garbage
from checkpointless.inprocess.health_check import wait_for_device
from checkpointless.inprocess.memory import peak_growth, reset_peak
from checkpointless.inprocess.wrap import _SignalHandlers, _with_caller
from tests.unit.inprocess.test_interruptions import leave_while

STATE = inprocess.HPState(rank=0, world_size=1, local_rank=0, generation=0)


def test_compose_runs_all_and_raises_the_first() -> None:
    calls = Mock()
    calls.failing.side_effect = KeyError("first")
    with pytest.raises(KeyError, match="first"):
        inprocess.Compose(calls.last, calls.failing)(STATE)
    assert calls.mock_calls == [call.failing(STATE), call.last(STATE)], "from the last to the first"


def test_compose_gives_each_what_it_takes() -> None:
    got: list[tuple[object, ...]] = []
    compose = inprocess.Compose(
        lambda state: got.append((state,)),
        lambda state, error=None: got.append((state, error)),
        lambda *args: got.append(args),
        inprocess.CheckpointlessFinalizeCleanup(),
    )
    compose("state", "error")
    assert got == [("state", "error"), ("state", "error"), ("state",)]


def test_override_replaces_one_kind() -> None:
    default = CheckpointlessAbortManager.get_default_checkpointless_abort()
    mine = inprocess.HPCheckpointingAbort()
    changed = CheckpointlessAbortManager.override_abort(default, inprocess.HPCheckpointingAbort, mine)
    assert mine in changed.instances
    assert mine not in default.instances
    with pytest.raises(ValueError, match="holds no"):
        CheckpointlessAbortManager.override_abort(inprocess.Compose(mine), HPDataLoaderAbort, HPDataLoaderAbort())
    with pytest.raises(ValueError, match="instances"):
        CheckpointlessAbortManager.override_abort(object(), HPDataLoaderAbort, mine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        CheckpointlessAbortManager.create_custom_abort()


def order_of(wrapper: HPWrapper) -> list[type]:
    ran: list[type] = []

    def note(kind: type) -> Callable[[inprocess.HPState], None]:
        return lambda state: ran.append(kind)

    composed: Any = wrapper.abort
    inprocess.Compose(*(note(type(each)) for each in composed.instances))(STATE)
    return ran


def test_aborts_run_from_the_data_loaders_to_the_framework_or_communicators_first() -> None:
    kinds = [
        HPDataLoaderAbort,
        inprocess.HPAbortTorchDistributed,
        inprocess.HPCheckpointingAbort,
        inprocess.AbortTransformerEngine,
    ]
    assert order_of(HPWrapper()) == kinds
    kinds[:2] = inprocess.HPAbortTorchDistributed, HPDataLoaderAbort
    assert order_of(HPWrapper(early_abort_communicator=True)) == kinds


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    made: Any = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("fp8_module", ["quantization", "fp8"])
def test_what_transformer_engine_keeps_is_dropped_once_the_block_is_left(
    monkeypatch: pytest.MonkeyPatch, fp8_module: str
) -> None:
    """Stand-ins have the globals of TransformerEngine 1.x and 2.x, which is not there without a GPU."""
    resets: list[str] = []

    def destroy_ub() -> None:
        base._ub_communicators = None
        resets.append("ub")

    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch.quantization", raising=False)
    manager = types.SimpleNamespace(reset=lambda: resets.append("fp8"))
    module(monkeypatch, f"transformer_engine.pytorch.{fp8_module}", FP8GlobalStateManager=manager)
    base = module(
        monkeypatch,
        "transformer_engine.pytorch.module.base",
        destroy_ub=destroy_ub,
        _ub_communicators={"qkv_fprop": object()},
        _cublas_workspace=bytes(3),
        _multi_stream_cublas_workspace=[bytes(1)],
        _dummy_wgrads={(1, 1): bytes(1)},
    )
    utils = "transformer_engine.pytorch.attention.dot_product_attention.utils"
    attention = module(monkeypatch, utils, _cu_seqlens_cache={1: bytes(4)})
    abort = CheckpointlessAbortManager.create_custom_abort(inprocess.AbortTransformerEngine())
    abort(STATE)
    assert resets == [], "the block may be inside of fp8_autocast"
    abort.after_block(STATE)
    assert resets == ["fp8", "ub"]
    assert base._ub_communicators is base._cublas_workspace is None
    assert not base._multi_stream_cublas_workspace + list(base._dummy_wgrads) + list(attention._cu_seqlens_cache)
    abort.after_block(STATE)
    assert resets == ["fp8", "ub", "fp8"]


def documented(cfg: str, caller: Optional[inprocess.HPCallWrapper] = None) -> tuple[Any, ...]:  # noqa: UP045 - as documented
    return cfg, caller


def named(cfg: str, caller: Any = None) -> tuple[Any, ...]:
    return cfg, caller


def bare(caller, /, cfg="c"):  # type: ignore[no-untyped-def]
    return cfg, caller


def only_named(cfg: str, caller: str = "who calls") -> tuple[Any, ...]:
    return cfg, caller


def annotated(cfg: str, *, wrapper: inprocess.HPCallWrapper | None = None) -> tuple[Any, ...]:
    return cfg, wrapper


THE_CALLER = object()
ANOTHER = object()


@pytest.mark.parametrize(
    ("block", "args", "kwargs", "given"),
    [
        (documented, ("c",), {}, THE_CALLER),
        (documented, ("c", None), {}, THE_CALLER),
        (documented, ("c",), {"caller": None}, THE_CALLER),
        (documented, (), {"cfg": "c"}, THE_CALLER),
        (documented, ("c", ANOTHER), {}, ANOTHER),
        (documented, ("c",), {"caller": ANOTHER}, ANOTHER),
        (named, ("c",), {}, THE_CALLER),
        (bare, (), {}, THE_CALLER),
        (bare, (None,), {}, THE_CALLER),
        (only_named, ("c",), {}, "who calls"),
        (only_named, ("c", "me"), {}, "me"),
        (only_named, ("c", None), {}, None),
        (annotated, ("c",), {}, THE_CALLER),
    ],
)
def test_the_caller_goes_where_it_is_wanted_and_nothing_else_was_given(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: object
) -> None:
    args, kwargs = _with_caller(block, args, kwargs, THE_CALLER)
    assert block(*args, **kwargs) == ("c", given)


@pytest.mark.parametrize("limit", [30, 30.0, timedelta(seconds=30)])
def test_a_time_limit_is_seconds_or_a_timedelta_everywhere(limit: float | timedelta) -> None:
    assert HPWrapper(abort_timeout=limit).abort_timeout == timedelta(seconds=30)
    assert CudaHealthCheck(timeout=limit).timeout == timedelta(seconds=30)
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        CudaHealthCheck(timeout=-1 * limit)


def test_victims_are_told_from_culprits() -> None:
    gloo = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    )
    caused = ValueError("outer")
    caused.__cause__ = gloo
    assert [is_victim(each) for each in (gloo, RuntimeError("index out of range"), caused)] == [True, False, True]


_SLOW_MODULE = """
import time
began = True
def register(depth):
    if depth:
        register(depth - 1)
    else:
        time.sleep(0.01)
for _ in range(100):
    register(20)
done = True
"""


def test_a_module_that_the_block_imports_is_imported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what it has registered stays, and the next import cannot register it again."""
    (tmp_path / "slow_to_import.py").write_text(_SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        leave_while(
            lambda: importlib.import_module("slow_to_import"),
            limit_s=120,
            since=lambda: hasattr(sys.modules.get("slow_to_import"), "began"),
        )
        assert hasattr(sys.modules.get("slow_to_import"), "done")
    finally:
        sys.modules.pop("slow_to_import", None)


def test_handlers_that_a_block_leaves_are_taken_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    handlers = _SignalHandlers()
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        handlers.restore()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_torch_hears_of_dead_workers_also_after_its_handler_was_taken_back() -> None:
    before = signal.getsignal(signal.SIGCHLD), torch_workers._SIGCHLD_handler_set
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        torch_workers._SIGCHLD_handler_set = False
        handlers = _SignalHandlers()
        torch_workers._set_SIGCHLD_handler()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Lightning does so when `fit` is over
        handlers.restore()
        torch_workers._set_SIGCHLD_handler()
        assert callable(signal.getsignal(signal.SIGCHLD))
    finally:
        signal.signal(signal.SIGCHLD, before[0])
        torch_workers._SIGCHLD_handler_set = before[1]


def test_the_peak_of_memory_counts_from_its_reset() -> None:
    block = b"x" * 200_000_000
    reset_peak()
    assert peak_growth()["peak_growth_bytes"] < 50_000_000
    more = b"y" * 100_000_000
    del more
    assert 90_000_000 < peak_growth()["peak_growth_bytes"] < 150_000_000
    del block


def test_the_wrapper_is_a_decorator_with_and_without_parentheses() -> None:
    def block(value: int) -> int:
        """Return the value."""
        return value

    bare: Any = HPWrapper  # a type checker knows the form with parentheses only
    for wrapped in (bare(block), bare()(block), bare(abort_timeout=30)(block)):
        assert wrapped is not block
        assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("block", "Return the value.", block)
    assert bare(block, enabled=False) is block
    with pytest.raises(ValueError, match="abort_timeout"):
        bare(block, abort_timeout=0)
    with pytest.raises(TypeError, match="wraps a function, not int"):
        bare(30)


# --- Nothing of a generation that is over stays in the process ----------------------------------------------------


def _fail_in_a_backward_pass() -> list[weakref.ref[torch.nn.Parameter]]:
    """Run a backward pass that raises in its middle, and return its parameters."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(20)]
    products = [parameter * 2 for parameter in parameters]
    products[10].register_hook(lambda _: 1 / 0)
    try:
        sum(products, torch.zeros(8)).sum().backward()
    except ZeroDivisionError:
        pass
    return [weakref.ref(parameter) for parameter in parameters]


def test_the_graph_of_a_backward_pass_that_raised_is_freed() -> None:
    left = _fail_in_a_backward_pass()
    assert any(each() is not None for each in left), "autograd keeps what it had yet to do"
    with torch.no_grad():
        collect_garbage()
    assert [each() for each in left] == [None] * len(left)


@pytest.mark.slow
def test_accelerate_forgets_that_it_is_initialized() -> None:
    """Else its next ``Accelerator`` would make no process group. In a process of its own, for it stays imported."""
    pytest.importorskip("accelerate")
    code = (
        "from accelerate import Accelerator\n"
        "from accelerate.state import PartialState\n"
        f"from {inprocess.CheckpointlessFinalizeCleanup.__module__} import CheckpointlessFinalizeCleanup\n"
        "Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
        "assert PartialState._shared_state\n"
        "CheckpointlessFinalizeCleanup()()\n"
        "assert not PartialState._shared_state\n"
        "assert Accelerator(cpu=True).gradient_accumulation_steps == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_trainer_of_a_clean_up_can_be_assigned_as_documented_and_is_not_kept() -> None:
    cleanup, trainer = inprocess.CheckpointlessFinalizeCleanup(), torch.nn.Identity()
    cleanup.trainer = trainer
    assert cleanup.trainer is trainer
    del trainer
    assert cleanup.trainer is None
    cleanup.trainer = None
    assert cleanup.trainer is None


# --- Which device is checked, and what is said of one that does not answer ----------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for CUDA with eight devices, of which the second is the current one."""
    made = Mock()
    made.is_initialized.return_value = True
    made.device_count.return_value, made.current_device.return_value = 8, 1
    for name in ("is_initialized", "device_count", "current_device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


@pytest.mark.parametrize(
    ("devices", "local_rank", "checked"),
    [(8, "5", "cuda:5"), (8, None, "cuda:1"), (1, "5", "cuda:0"), (8, "", "cuda:1")],
    ids=["its own of several", "no launcher", "the only one that it sees", "an empty variable"],
)
def test_the_device_of_this_rank_is_checked(
    devices: int, local_rank: str | None, checked: str, cuda: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.device_count.return_value, cuda.current_device.return_value = devices, min(1, devices - 1)
    monkeypatch.setenv("LOCAL_RANK", local_rank or "")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK")
    CudaHealthCheck()(STATE)
    cuda.synchronize.assert_called_once_with(torch.device(checked))


def test_a_device_that_does_not_answer_fails_the_check_in_time(cuda: Mock) -> None:
    never = threading.Event()
    cuda.synchronize.side_effect = lambda device: never.wait()
    try:
        with pytest.raises(TimeoutError, match="did not synchronize within 0 s"):
            CudaHealthCheck(0.05)(STATE)
    finally:
        never.set()


def test_an_error_that_sticks_to_the_device_is_told(cuda: Mock) -> None:
    cuda.synchronize.side_effect = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match=r"is not healthy: .*device-side assert"):
        CudaHealthCheck()(STATE)
    with pytest.raises(RuntimeError, match="device-side assert"):
        wait_for_device()


def test_a_process_that_has_not_used_cuda_is_not_checked(cuda: Mock) -> None:
    cuda.is_initialized.return_value = False
    CudaHealthCheck()(STATE)
    wait_for_device()
    assert not cuda.synchronize.called
