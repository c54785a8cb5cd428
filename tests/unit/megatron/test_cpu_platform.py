"""Check that the CPU platform puts back what it replaces, and that its random streams are separate."""

from collections.abc import Iterator
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


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="leave out --cpu"):
        cpu_platform.install()


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


# --- Megatron-core, NeMo and Bridge -------------------------------------------------------------------------------


def test_bridge_alone_is_answered_for_what_training_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str, *_: object) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cpu_platform, "_is_there", lambda _: False)
    import_ = cpu_platform._answering(not_there)
    pretrain = {"__name__": "megatron.bridge.training.pretrain"}
    found = import_("nvidia_resiliency_ext.inprocess", pretrain, None, ("CallWrapper",))
    assert (isinstance(found.CallWrapper, type), hasattr(found, "__path__")) == (True, False)
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
