"""Test when a built model may be used after a fault, and that nothing of a half-made step is left in it then."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs Megatron-core")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from packaging.version import Version

from checkpointless.integrations.megatron import cpu_platform, warm
from checkpointless.integrations.megatron.warm import KeptModel, fingerprints
from checkpointless.state.rng import RngStates

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core

LENGTH, VOCABULARY = 8, 32


@contextmanager
def generation(more: int = 0) -> Iterator[None]:
    """Have process groups while the context lasts, ``more`` than Megatron's own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        for _ in range(more):
            dist.new_group([0], group_desc="somebody else's")
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    cpu_platform.install()
    yield
    cpu_platform.uninstall()


class Training:
    def __init__(self, ties: bool = False) -> None:
        torch.manual_seed(1)
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
        )
        spec = get_gpt_layer_local_spec()
        model = GPTModel(self.config, spec, VOCABULARY, LENGTH, share_embeddings_and_output_weights=ties)
        asked = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=500
        )
        self.model = DistributedDataParallel(self.config, asked, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-2, weight_decay=0.0, use_distributed_optimizer=True, overlap_param_gather=True),
            [self.model],
        )
        streams = RngStates.capture(), RngStates.capture()
        self.plans = {"model": fingerprints({"layers": 2}), "optimizer": fingerprints({"lr": 1e-2, "clip": None})}
        self.kept = KeptModel([self.model], self.optimizer, self.plans, streams, [{}])

    @property
    def buckets(self) -> list[Any]:
        return list(self.model.bucket_groups)

    def compute(self, step: int) -> float:
        """Make the gradients of a step in two microbatches; return the loss."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.model.no_sync():
            self._pass(2 * step)
        loss = self._pass(2 * step + 1)
        self.model.finish_grad_sync()
        return loss

    def step(self, step: int) -> float:
        loss = self.compute(step)
        assert self.optimizer.step()[0]
        return loss

    def _pass(self, seed: int) -> float:
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        position = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        loss = self.model(tokens, position, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        return float(loss.detach())


class Fault(Exception):
    """A fault in the middle of a pass."""


def fail(*_: object) -> None:
    raise Fault


@pytest.mark.parametrize(
    ("plans", "says"),
    [
        ({"model": {"layers": 3}}, "layers of the model is another one"),
        ({"optimizer": {"lr": 1e-2, "clip": 1.0}}, "clip of the optimizer is another one"),
        ({"optimizer": {"lr": 1e-2}}, "clip of the optimizer is another one"),
        ({"model": {"layers": 2, "width": 4}}, "width of the model is another one"),
    ],
)
def test_another_configuration_is_a_mismatch(plans: dict[str, dict[str, object]], says: str) -> None:
    with generation():
        training = Training()
        given = {what: fingerprints(each) for what, each in plans.items()}
        assert training.kept.mismatch({**training.plans, **given}) == says


def test_groups_that_are_laid_out_otherwise_are_a_mismatch() -> None:
    with generation():
        training = Training()
    with generation(more=1):
        assert training.kept.mismatch(training.plans) == "the process groups are laid out otherwise"


OPTIMIZER_HOOKS: dict[str, Callable[[Any], object]] = {
    "a hook before steps": lambda optimizer: optimizer.optimizer.register_step_pre_hook(fail),
    "a hook after steps": lambda optimizer: optimizer.optimizer.register_step_post_hook(fail),
    "a function of its own": lambda optimizer: setattr(optimizer, "reload_model_params", fail),
    "a function of torch's own": lambda optimizer: setattr(optimizer.optimizer, "add_param_group", fail),
}


@pytest.mark.parametrize("hook", OPTIMIZER_HOOKS)
def test_an_optimizer_that_somebody_has_changed_is_not_kept(hook: str) -> None:
    with generation():
        training = Training()
        (part,) = training.optimizer.chained_optimizers
        OPTIMIZER_HOOKS[hook](part)
        assert training.kept.unfit() == "the optimizer has other hooks or functions than when it was built"


@pytest.mark.parametrize("ties", [True, False])
def test_a_kept_stage_exchanges_tied_embeddings_and_stays(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.Tensor, object]] = []
    with generation():
        training = Training(ties=ties)
        weight = training.model.module.shared_embedding_or_output_weight()
        before = weight.detach().clone()
        training.config.pipeline_model_parallel_size = 2
        kept = KeptModel([training.model], training.optimizer, training.plans, training.kept.streams, [{}])
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append((tensor, group)))
        kept.take_part(0, torch.bfloat16)
        assert len(sent) == ties
        for tensor, group in sent:
            assert (tensor.shape, tensor.dtype, bool(tensor.any())) == (weight.shape, torch.bfloat16, False)
            assert group is parallel_state.get_embedding_group()
        assert torch.equal(weight, before)


def losses_after(fault: Callable[[Training], None]) -> tuple[list[float], list[float]]:
    """Return the losses of a run without a fault, and of one with a fault after a step and a new generation."""
    with generation():
        calm = Training()
        undisturbed = [calm.step(each) for each in range(4)]
    with generation():
        training = Training()
        before = [training.step(0)]
        fault(training)
    with generation():
        assert training.kept.mismatch(training.plans) is None
        assert training.kept.unfit() is None
        assert training.kept.bind() > 0
        now = [id(group) for group, *_ in warm._groups_now()]
        assert all(id(each.intra_distributed_optimizer_instance_group) in now for each in training.buckets)
        training.model.start_param_sync(force_sync=True)  # as a restore does
        return undisturbed, before + [training.step(each) for each in range(1, 4)]


def fail_in_backward(training: Training, microbatch: int) -> None:
    """Fail behind the upper layer in the backward pass of a microbatch of step 1, 0 or 1."""
    passes: list[int] = []

    def fail_behind(module: object, args: object, output: tuple[torch.Tensor, object]) -> None:
        if len(passes) == microbatch:
            output[0].register_hook(fail)
        passes.append(1)

    hook = training.model.module.decoder.layers[0].register_forward_hook(fail_behind)
    with pytest.raises(Fault):
        training.compute(1)
    hook.remove()


def in_backward(training: Training) -> None:
    """Fail in the first microbatch's backward pass, in which gradients are accumulated."""
    fail_in_backward(training, 0)
    assert any(each.grad_data.any() for group in training.buckets for each in group.buckets)


def in_last_backward(training: Training) -> None:
    """Fail in the last microbatch's, while some buckets are being reduced and others are not full."""
    fail_in_backward(training, 1)
    pending = [each.grad_reduce_handle is not None for each in training.buckets]
    assert any(pending)
    assert not all(pending)
    assert any(0 < ready(each) < len(each.params) for each in training.buckets)


def ready(group: Any) -> int:
    """Return how many parameters of a group have their gradients; Megatron-core 0.16 counts how often."""
    found: Any = getattr(group, "params_with_grad", None) or getattr(group, "per_param_grad_ready_counts", ())
    return len(found)


def in_forward(training: Training) -> None:
    """Fail between two layers, while parameters of the next one are being gathered and those after it are not."""
    hook = training.model.module.decoder.layers[0].register_forward_hook(fail)
    with pytest.raises(Fault):
        training.compute(1)
    hook.remove()
    assert any(each.param_gather_handle is not None for each in training.buckets)
    assert not all(each.param_gather_dispatched for each in training.buckets)


def between_gradient_and_buffer(training: Training) -> None:
    """Leave gradients as a fault between two instructions would, and flags of gradients that were added."""
    training.compute(1)
    for each in training.model.parameters():
        each.grad = torch.full_like(each, 100.0)
        each.grad_added_to_main_grad = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", [in_backward, in_last_backward, in_forward, between_gradient_and_buffer])
def test_the_next_step_is_as_without_a_fault(fault: Callable[[Training], None]) -> None:
    undisturbed, disturbed = losses_after(fault)
    assert disturbed == undisturbed


# --- References to old process groups are found wherever a model keeps them ---------------------------------------

Pair = namedtuple("Pair", ["group", "other"])


class Group:
    """Stands for a process group: an object that is told by its identity."""


class Slotted:
    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group = group


@dataclass
class Config:
    group: Any
    others: dict[str, Any]


def test_every_place_is_found() -> None:
    old, new, kept = Group(), Group(), Group()

    def closure() -> Group:
        return old_in_cell

    old_in_cell = old

    def default(group: Group = old, *, named: Group = old) -> tuple[Group, Group]:
        return group, named

    vars(default)["attribute"] = old
    owner = SimpleNamespace(group=old, kept=kept)
    parameter = torch.nn.Parameter(torch.zeros(1))
    vars(parameter)["group"] = old
    partial = functools.partial(print, old, file=old)
    roots: dict[str, Any] = {
        "list": [old, (kept, old)],
        "dict": {"a": {"b": old}},
        "pair": Pair(old, kept),
        "config": Config(old, {"x": [old]}),
        "slots": Slotted(old),
        "closure": closure,
        "default": default,
        "method": owner.__repr__,
        "partial": partial,
        "parameter": parameter,
        "owner": owner,
    }
    assert warm._Walk([roots], {id(old): new}).replaced == 15
    assert (roots["list"], roots["dict"]) == ([new, (kept, new)], {"a": {"b": new}})
    assert (roots["pair"], roots["config"]) == (Pair(new, kept), Config(new, {"x": [new]}))
    assert (roots["slots"].group, closure(), vars(default)["attribute"], vars(parameter)["group"]) == (new,) * 4
    assert (default(), owner.group, owner.kept) == ((new, new), new, kept)
    assert (partial.args, partial.keywords) == ((new,), {"file": new})


class Tracker:
    def fork(self) -> Tracker:
        return self


def test_methods_are_bound_to_the_successor() -> None:
    old, new = Tracker(), Tracker()
    owner = SimpleNamespace(context=old.fork, partial=functools.partial(old.fork), tracker=old)
    assert warm._Walk([owner], {id(old): new}).replaced == 3
    assert owner.context() is owner.partial() is owner.tracker is new


# --- A change of a built model is noticed -------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(2))


def hook(*_: object, key: int = 0) -> None:
    """Do nothing."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda net: net[0].register_forward_hook(hook),
    "a hook of a parameter": lambda net: net[0].weight.register_hook(hook),
    "a hook after accumulation": lambda net: net[0].weight.register_post_accumulate_grad_hook(hook),
    "an attribute": lambda net: setattr(net[1], "p", 0.5),
    "a new attribute": lambda net: setattr(net[1], "calls", []),
    "a frozen parameter": lambda net: net[0].weight.requires_grad_(False),
    "another parameter": lambda net: setattr(net[0], "weight", torch.nn.Parameter(torch.zeros(2, 2))),
    "a part more": lambda net: net.append(torch.nn.ReLU()),
    "a part less": lambda net: net.pop(2),
    "another part": lambda net: net.__setitem__(1, torch.nn.ReLU()),
    "a larger buffer": lambda net: net[2].register_buffer("running_mean", torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_model_is_noticed(change: str) -> None:
    net = model()
    built = warm._Blueprint([net])
    assert built.difference([net]) is None
    CHANGES[change](net)
    assert built.difference([net])


def test_only_classes_whose_state_is_known_are_kept() -> None:
    class Own(torch.nn.Module):
        """A layer of the user's."""

    assert warm._unknown_class([model()]) is None
    assert "Own" in str(warm._unknown_class([torch.nn.Sequential(Own())]))


def named(full_name: str, base: type = torch.nn.Module) -> Any:
    package, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": package})


BASE = named("transformer_engine.pytorch.module.base.TransformerEngineBaseModule")
LINEAR = named("transformer_engine.pytorch.module.linear.Linear", BASE)
ROW = named("megatron.core.extensions.transformer_engine.TERowParallelLinear", LINEAR)
OPERATION = named("transformer_engine.pytorch.ops.op.BasicOperation")
NORM = named("transformer_engine.pytorch.ops.basic.rmsnorm.RMSNorm", OPERATION)


def test_a_note_of_a_forward_pass_is_no_change_and_a_hook_is() -> None:
    layer = ROW()
    layer.activation_dtype = None
    built = warm._Blueprint([layer])
    layer.activation_dtype, layer.forwarded_at_least_once = torch.bfloat16, True
    assert built.difference([layer]) is None
    layer.register_forward_hook(hook)
    assert built.difference([layer])


@pytest.mark.parametrize("release", ["2.5.0", "2.6.0", "2.12.1", "3.0"])
def test_only_versions_of_the_engine_that_were_read(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(warm, "get_te_version", lambda: Version(release))
    assert (warm._unknown_class([ROW(), NORM()]) is None) == (release in ("2.6.0", "2.12.1"))
    assert warm._unknown_class([torch.nn.ReLU()]) is None, "no matter what is installed"


@pytest.mark.parametrize(
    "name",
    [
        "transformer_engine.pytorch.transformer.TransformerLayer",
        "transformer_engine.pytorch.ops.sequential.Sequential",
        "megatron.core.extensions.kitchen.KitchenLinear",
    ],
)
def test_only_classes_of_the_engine_that_were_read(name: str) -> None:
    assert warm._unknown_class([torch.nn.Sequential(named(name, BASE)())]) == name


# --- Fingerprints are equal where values mean the same, and only there --------------------------------------------


@dataclass
class Settings:
    size: int
    start: Any


class Opaque:
    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


class Pickled:
    def __init__(self, number: int) -> None:
        self.number, self.noise = number, object()

    def __getstate__(self) -> dict[str, int]:
        return {"number": self.number}


def _counting(counts: dict[str, int]) -> Callable[[], int]:
    return lambda: counts["n"]


CLOSURE, LARGE, EMPTY = _counting({"n": 1}), bytes(65 << 20), list[int]()
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.nn.init.normal_, std=sigma)


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (normal(0.1), normal(0.1), True),
        (normal(0.1), normal(0.2), False),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=2), True),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=3), False),
        (functools.partial(hook, 1), functools.partial(print, 1), False),
        ([1, {"a": (2, None)}], [1, {"a": (2, None)}], True),
        ([1, {"a": (2, None)}], [1, {"a": (3, None)}], False),
        (Settings(1, torch.float32), Settings(1, torch.float32), True),
        (Settings(1, torch.float32), Settings(1, torch.bfloat16), False),
        (torch.ones(2), torch.zeros(2), False),
        (lambda: 1, lambda: 1, False),
        (torch, torch, True),
        (torch.nn.Identity, torch.nn.Identity, True),
        (Opaque(), Opaque(), False),
        (Pickled(1), Pickled(1), True),
        (Pickled(1), Pickled(2), False),
        (None, 0, False),
        ([EMPTY, EMPTY], [[], []], True),
        (CHANGES["a hook"], CHANGES["a hook"], True),  # a function without a name is known by its identity
        # What cannot be digested and may have changed equals nothing.
        pytest.param(LARGE, LARGE, False, id="large"),
        (CIRCLE, CIRCLE, False),
        (CLOSURE, CLOSURE, False),
    ],
)
def test_what_is_alike(then: Any, now: Any, same: bool) -> None:
    assert (warm._fingerprint(then) == warm._fingerprint(now)) is same
    before, after = fingerprints({"a": 1, "b": then}), fingerprints({"a": 1, "b": now})
    assert warm._differing(before, after) == (None if same else "b")


def test_a_picture_stays_as_it_was() -> None:
    value: dict[str, Any] = {"a": [1], "c": Settings(1, [2])}
    before = warm._fingerprint(value)
    value["a"].append(2)
    assert warm._fingerprint(value) != before
    value["a"].pop()
    assert warm._fingerprint(value) == before
    value["c"].start.append(3)
    assert warm._fingerprint(value) != before
