"""Test when a built model may be used after a fault, and that nothing of a half-made step is left in it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless.integrations.megatron import cpu_platform
from checkpointless.integrations.megatron.warm import KeptModel, _groups_now, fingerprints
from checkpointless.state.rng import RngStates

pytestmark = pytest.mark.nemo

LENGTH, VOCABULARY = 8, 32


@contextmanager
def generation(tensor_parallel: int = 1, more: int = 0) -> Iterator[None]:
    """Have process groups while the context lasts, ``more`` than Megatron's own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(tensor_parallel)
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
    """A small model that overlaps its communication, with an optimizer, and what is kept of them."""

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


# --- whether it may be used ---------------------------------------------------------------------------------------


def test_the_same_configurations_and_groups_are_no_mismatch() -> None:
    with generation():
        training = Training()
    with generation():
        same = {what: dict(each) for what, each in training.plans.items()}
        assert training.kept.mismatch(same) is None
        assert training.kept.unfit() is None


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


HOOKS: dict[str, Callable[[Any], object]] = {
    "a hook before steps": lambda optimizer: optimizer.optimizer.register_step_pre_hook(fail),
    "a hook after steps": lambda optimizer: optimizer.optimizer.register_step_post_hook(fail),
    "a function of its own": lambda optimizer: setattr(optimizer, "reload_model_params", fail),
    "a function of torch's own": lambda optimizer: setattr(optimizer.optimizer, "add_param_group", fail),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_that_somebody_has_changed_is_not_kept(hook: str) -> None:
    with generation():
        training = Training()
        (part,) = training.optimizer.chained_optimizers
        HOOKS[hook](part)
        assert training.kept.unfit() == "the optimizer has other hooks or functions than when it was built"


# --- what ranks exchange that build, and what a half-made step has left ------------------------------------------


@pytest.mark.parametrize("ties", [True, False])
def test_a_kept_stage_takes_part_in_the_exchange_of_tied_embeddings_and_stays_as_it_is(
    ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        now = [id(group) for group, *_ in _groups_now()]
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
