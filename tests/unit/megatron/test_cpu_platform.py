"""Check that the CPU platform puts back what it replaces, and that its random streams are separate."""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType

import pytest
import torch

from checkpointless.integrations.megatron import cpu_platform
from checkpointless.integrations.megatron.cpu_platform import _DRAW_METHODS

pytestmark = pytest.mark.nemo


@pytest.fixture
def platform() -> Iterator[None]:
    cpu_platform.install()
    yield
    cpu_platform.uninstall()


@pytest.fixture(autouse=True)
def _nothing_left_installed() -> Iterator[None]:
    yield
    assert not cpu_platform.installed()


def test_uninstall_puts_back_the_very_objects() -> None:
    rows = cpu_platform._table()
    before = [getattr(row.target, row.attribute, None) for row in rows]
    own_before = [row.attribute in vars(row.target) for row in rows]
    cpu_platform.install()
    changed = [getattr(row.target, row.attribute) is not old for row, old in zip(rows, before) if old is not None]
    cpu_platform.uninstall()
    assert all(changed)
    assert [getattr(row.target, row.attribute, None) is old for row, old in zip(rows, before)] == [True] * len(rows)
    assert [row.attribute in vars(row.target) for row in rows] == own_before


def test_timers_that_are_none_are_gathered_from_nobody(platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo's progress printer asks rank 0 alone, which must not take part in a collective for it."""
    timers = pytest.importorskip("megatron.core.timers")
    gathered: list[torch.Tensor] = []
    monkeypatch.setattr(timers, "dist_all_gather_func", lambda out, own: gathered.append(out.copy_(own)))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mine = timers.Timers(0, "minmax")
        assert mine.get_all_timers_string(names=None, normalizer=1) is None
        assert gathered == []
        mine("forward", log_level=0).start()
        mine("forward", log_level=0).stop()
        assert "forward" in mine.get_all_timers_string(names=None, normalizer=1)
        assert len(gathered) == 1
    finally:
        torch.distributed.destroy_process_group()


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="leave out --cpu"):
        cpu_platform.install()


def test_the_current_cuda_device_is_the_cpu(platform: None) -> None:
    assert not torch.cuda.is_available()
    for tensor in (
        torch.zeros(2, device=torch.cuda.current_device()),
        torch.tensor(1.0, pin_memory=True).to("cuda", non_blocking=True),
        torch.ones(2, device="cuda:0").cuda(),
        torch.ones(2).new_zeros(3, device="cuda"),
        torch.nn.Linear(2, 2).to("cuda").weight,
    ):
        assert tensor.device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type("torch.cuda.LongTensor").dtype == torch.int64
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


def test_a_build_for_cuda_finds_no_device_and_may_fork(platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning has torch ask NVML, which is to say count devices, of which the platform has one."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: True, raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert torch.cuda.device_count() == 1
    assert not torch.cuda.is_available()
    assert not torch.cuda._is_in_bad_fork()
    stream = cpu_platform._stream_bytes()
    torch.manual_seed(7)  # torch leaves the device's generators alone in a process that may not use CUDA
    assert stream != cpu_platform._stream_bytes()


def test_the_meta_device_context_still_works(platform: None) -> None:
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
        assert torch.rand(2).is_meta


def test_replacements_that_outlive_uninstall_act_as_the_originals() -> None:
    cpu_platform.install()
    zeros, rand = torch.zeros, torch.rand
    cpu_platform.uninstall()
    assert zeros(2).tolist() == [0.0, 0.0]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(rand(4), expected)
    with pytest.raises((AssertionError, RuntimeError)):
        zeros(2, device="cuda")


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_draws_from_the_device_stream_only(platform: None, inplace: bool) -> None:
    torch.manual_seed(1)
    torch.cuda.manual_seed(7)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64), 0.5, True, inplace)
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.cuda.get_rng_state(), device)
    torch.cuda.set_rng_state(device)
    torch.rand(5)
    assert torch.equal(torch.nn.Dropout(0.5, inplace)(torch.ones(64)), first)


def test_dropout_is_torchs_own() -> None:
    value = torch.randn(33, 5)
    torch.manual_seed(11)
    expected = torch.nn.functional.dropout(value, 0.3)
    cpu_platform.install()
    try:
        torch.cuda.manual_seed(11)
        assert torch.equal(torch.nn.functional.dropout(value, 0.3), expected)
        assert torch.nn.functional.dropout(value, 0.3, training=False) is value
        assert torch.nn.functional.dropout(value, 1.0).abs().sum() == 0
    finally:
        cpu_platform.uninstall()


def test_manual_seed_seeds_both_streams_and_draws_stay_apart(platform: None) -> None:
    torch.manual_seed(5)
    on_device = torch.rand(8, device="cuda")
    assert torch.equal(torch.rand(8), on_device)
    assert torch.cuda.initial_seed() == 5


def _draw_everything() -> None:
    x = torch.full((4,), 0.5)
    torch.rand(2), torch.randn(2), torch.randint(9, (2,)), torch.randperm(4), torch.normal(x, x)
    torch.bernoulli(x), torch.multinomial(x, 2), torch.poisson(x), torch.rand_like(x), torch.randn_like(x)
    torch.randint_like(x, 5), x.bernoulli(), x.multinomial(2)
    for name in _DRAW_METHODS[:-2]:
        getattr(x.clone(), name)(*([0.5] if name == "geometric_" else []))
    torch.nn.init.xavier_normal_(torch.empty(2, 2))
    torch.distributions.Uniform(0.0, 1.0).rsample((2,))
    torch.nn.functional.dropout(x, 0.5)


def test_draws_in_a_trackers_fork_are_the_trackers(platform: None, caplog: pytest.LogCaptureFixture) -> None:
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("stream", 99)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tracker.get_states()["stream"]
    with tracker.fork("stream"):
        inside = torch.rand(3)
        _draw_everything()
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.cuda.get_rng_state(), device)
    assert not torch.equal(tracker.get_states()["stream"], tracked)
    assert "CPU RNG state changed" not in caplog.text
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(99)))
    # A state that was saved can be set again.
    tracker.set_states({"stream": tracked})
    with tracker.fork("stream"):
        assert torch.equal(torch.rand(3), inside)


def test_a_fork_left_by_force_is_forgotten_at_the_next_install(platform: None) -> None:
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    tracker.add("stream", 99)
    left = tracker.fork("stream")
    left.__enter__()
    cpu_platform.install()
    device = torch.cuda.get_rng_state()
    torch.rand(3)
    assert torch.equal(torch.cuda.get_rng_state(), device)


def test_recomputed_dropout_is_the_same_dropout(platform: None) -> None:
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    if version("megatron-core") >= "0.16":
        pytest.skip("since 0.16 Megatron's tracker gives other numbers in a fork in a fork of the same name")
    torch.manual_seed(1)
    torch.cuda.manual_seed(2)
    _ = random.get_cuda_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER.reset()
    random.get_cuda_rng_tracker().add("model-parallel-rng", 4)
    masks = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x, 0.5)
        masks.append((y != 0).clone())
        with random.get_cuda_rng_tracker().fork():
            z = torch.nn.functional.dropout(y + 1, 0.5)
        masks.append((z != 0).clone())
        return z

    x = torch.ones(256, requires_grad=True)
    states = random._get_all_rng_states
    with random.get_cuda_rng_tracker().fork():
        out = random.CheckpointFunction.apply(block, False, x)
    after = states()
    out.sum().backward()
    assert len(masks) == 4
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    assert torch.equal(after[0], states()[0])
    assert torch.equal(after[1], states()[1])
    random._CUDA_RNG_STATE_TRACKER.reset()


# --- Megatron-core, NeMo and Bridge -------------------------------------------------------------------------------


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

    monkeypatch.setattr(cpu_platform, "_is_there", lambda _: False)
    import_ = cpu_platform._answering(not_there)
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
    monkeypatch.setattr(cpu_platform, "_is_there", lambda _: True)
    with pytest.raises(ModuleNotFoundError):
        import_("nvidia_resiliency_ext.inprocess", pretrain, None, ("CallWrapper",))


def test_nemo_is_patched_once_and_only_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nemo"]:
        monkeypatch.delitem(sys.modules, name)
    assert cpu_platform._rows() == []
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
