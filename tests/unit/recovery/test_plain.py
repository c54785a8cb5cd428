"""What the first update of a loop shows of its optimizer, and what counts as a change of its weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.torch import torch_tensors
from checkpointless.integrations.torch.plain import PlainTraining, _without_scheduler
from checkpointless.integrations.torch.torch_tensors import TorchTensors, _settle_buckets
from checkpointless.recovery.manager import CheckpointManager
from checkpointless.state.journal import Captured, _Taken
from checkpointless.state.port import SnapshotPoint

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def something_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(100))
    monkeypatch.setattr(torch_tensors.process_groups, "launched", lambda: {"group": next(counts)})


def train(generation: int, **more: Any) -> PlainTraining:
    """Return a training in a generation, with the gradients of a step."""
    module = torch.nn.Linear(3, 2)
    call: Any = SimpleNamespace(
        generation=generation,
        is_first=generation == 0,
        high_water=generation,
        checkpoint_manager=CheckpointManager(),
        faults=None,
        steps=SimpleNamespace(loops=0),
        blocks=SimpleNamespace(begin_training=lambda _: None),
    )
    module(torch.ones(1, 3)).sum().backward()
    return PlainTraining(call, [module], [torch.optim.SGD(module.parameters(), lr=0.1)], **more)


@pytest.fixture
def training() -> PlainTraining:
    return train(1)


def test_an_optimizer_that_communicates_is_refused_in_the_jobs_first_step() -> None:
    with pytest.raises(UnrecoverableError, match="an optimizer communicates in its step"):
        train(0)._tensors.finish_update()


def test_a_change_of_weights_counts_until_the_state_is_taken_again(training: PlainTraining) -> None:
    journal = training._journal
    assert journal.changed() == "", "nothing has been captured yet"
    make_update(training, 1)
    assert journal.changed() == ""
    with torch.no_grad():
        next(training.state.modules[0].parameters()).clamp_(-0.1, 0.1)
    assert "parameters were changed beside the update since step 1" in journal.changed()
    training._updated = 0  # in a step it is a change of what the loop begins with
    begin_next(training)
    assert journal.changed() == ""


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_that_overflow_are_left_out_with_a_scaler_as_its_own_step_does(
    monkeypatch: pytest.MonkeyPatch, overflows: bool
) -> None:
    training = train(1, scaler=torch.amp.GradScaler("cpu"))
    for name in ("_compute", "_record"):
        monkeypatch.setattr(training, name, lambda loss: None)
    monkeypatch.setattr(training, "_guard", lambda update: update())
    training._call.steps.making = 1
    parameter, *_ = training.state.modules[0].parameters()
    assert parameter.grad is not None
    before = parameter.detach().clone()
    parameter.grad[0, 0] = float("inf") if overflows else 1.0
    training.update()
    assert parameter.isfinite().all()
    assert (parameter.equal(before), parameter.grad) == (overflows, None)


def make_update(training: PlainTraining, step: int) -> None:
    training._journal._pending = step, Captured(), _Taken(dict, {})
    training.state.finish_update()
    training._journal.applied()
    training.step = step


def begin_next(training: PlainTraining) -> None:
    training._journal.reached(training.step, SnapshotPoint.COMMITTED, keeps_streams=False)


def _taken_behind_the_first_update(training: PlainTraining) -> torch.nn.Parameter:
    """Return a parameter of a training whose first update is applied, and whose state was taken within it."""
    make_update(training, 1)
    return next(iter(training.state.modules[0].parameters()))


def test_other_weights_that_are_put_back_behind_the_update_are_no_change(training: PlainTraining) -> None:
    weight = _taken_behind_the_first_update(training)
    raw = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(0.5)
        weight.copy_(raw)
    begin_next(training)


def test_rates_that_are_changed_after_the_update_are_refused(training: PlainTraining) -> None:
    """A scheduler that is given steps with the update; a loop that steps it as well steps it twice."""
    make_update(training, 1)
    begin_next(training)
    training._tensors.optimizers[0].param_groups[0]["lr"] *= 0.5
    with pytest.raises(UnrecoverableError, match=r"learning rates were changed between update\(\) of step 1"):
        begin_next(training)
    make_update(training, 2)  # in a step they may be changed
    begin_next(training)


@pytest.mark.parametrize("is_counted", [True, False])
def test_weights_that_are_changed_beside_an_update_are_refused(training: PlainTraining, is_counted: bool) -> None:
    """A parameter of which one element is changed, as where the norms of rows are bounded."""
    weight = _taken_behind_the_first_update(training)
    with torch.no_grad():
        (weight if is_counted else weight.data)[1, 1] = 7.0
    with pytest.raises(UnrecoverableError, match=r"parameter weight is changed between update\(\)"):
        begin_next(training)
    training._updated = 0  # the step has begun with these
    begin_next(training)
    training._refuse_early("in a step before its update()")
    with torch.no_grad():
        (weight if is_counted else weight.data)[1, 1] = 8.0
    with pytest.raises(UnrecoverableError, match=r"parameter weight is changed in a step before"):
        training._refuse_early("in a step before its update()")


def test_a_scheduler_that_is_not_given_is_noticed() -> None:
    first, second, plain = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(3))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (first, second)]
    assert _without_scheduler([plain, first, second], schedulers) is None
    assert _without_scheduler([plain, first, second], schedulers[:1]) == "SGD"
    assert _without_scheduler([first], []) == "SGD"
    chain = torch.optim.lr_scheduler.SequentialLR(first, [schedulers[0]], [])
    accelerates: Any = SimpleNamespace(optimizer=first), SimpleNamespace(scheduler=schedulers[0])
    unknown = SimpleNamespace()
    for optimizer, scheduler in ((first, chain), accelerates, (first, unknown)):
        assert _without_scheduler([optimizer], [scheduler]) is None


def test_an_optimizer_with_a_scaler_of_its_own_is_refused() -> None:
    """Accelerate wraps the optimizer, and the loss scale moves in the wrapper's step."""
    module = torch.nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.scaler = torch.amp.GradScaler("cpu")
    call: Any = SimpleNamespace(high_water=0)
    with pytest.raises(UnrecoverableError, match="has a GradScaler of its own"):
        PlainTraining(call, [module], [optimizer])


def test_other_weights_say_nothing_of_what_was_written_before_them(training: PlainTraining) -> None:
    weight = _taken_behind_the_first_update(training)
    with torch.no_grad(), training.other_weights():
        weight.mul_(2)
        weight.div_(2)
    assert not training._journal.changed()
    with torch.no_grad():
        weight.clamp_(max=0.0)
        with training.other_weights():
            weight.mul_(2)
            weight.div_(2)
    assert "parameters were changed" in training._journal.changed()


def test_other_weights_are_put_back_to_the_bit_and_a_fault_is_told_first(training: PlainTraining) -> None:
    weight = _taken_behind_the_first_update(training)
    with torch.no_grad():
        with pytest.raises(IndexError), training.other_weights():
            weight.add_(0)[9]
        assert not training._journal.changed()
        with pytest.raises(UnrecoverableError, match="ended with other parameters"), training.other_weights():
            weight[0, 1] = -0.0
        with pytest.raises(IndexError), training.other_weights():
            weight.mul_(3)[9]
    assert training._journal.changed()


# --- DDP's lasting buckets are made without anything that a user's model would notice -----------------------------


def test_sparse_embeddings_hooks_and_frozen_parameters_are_left_alone() -> None:
    embedding, middle, last = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    inner = torch.nn.Sequential(embedding, middle, last)
    last.bias.requires_grad_(False)
    model = DistributedDataParallel(inner)
    seen: list[torch.Tensor] = []
    middle.weight.register_hook(seen.append)
    middle.weight.register_post_accumulate_grad_hook(seen.append)
    _settle_buckets([model])
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    assert len(seen) == 2
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert model._get_ddp_logging_data()["has_rebuilt_buckets"]


def test_ddp_gives_all_ranks_the_same_buffers_at_the_same_forward_passes_after_a_fault() -> None:
    """It does not in the pass after one without gradients: a validation of Lightning's goes through it."""

    def make() -> tuple[Any, TorchTensors]:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, TorchTensors([model], [optimizer], is_known=True)

    (model, tensors), (again, restored) = make(), make()
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            model(torch.randn(3, 2))
        assert model.will_sync_module_buffers() is is_training
        restored.restore(tensors.capture()())
        assert again.will_sync_module_buffers() is is_training
