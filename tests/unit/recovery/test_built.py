"""Test that what ``keep`` gives back looks as it was built, and that changes which it cannot undo are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.training.built import Builder, BuiltParts


class Net(torch.nn.Module):
    """A model with a buffer, plain attributes and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.last = torch.nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.norm.eval()
        self.calls, self.notes = 0, {"a": [1]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


def build() -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = Net()
    rate = torch.tensor(0.1)
    return net, torch.optim.AdamW([{"params": list(net.parameters()), "lr": rate, "betas": [0.9, 0.99]}])


def parts_of(returned: object, how: Callable[[], object] = build) -> BuiltParts:
    streams = RngStates.capture()
    return BuiltParts(Builder(how), returned, (streams, streams))


def step(net: Any, optimizer: Any) -> None:
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def hook(*_: object) -> None:
    """Do nothing."""


def test_what_training_changes_is_put_back_and_what_is_trained_stays() -> None:
    net, optimizer = build()
    parts = parts_of((net, optimizer))
    drawn = torch.randn(3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    net.last.weight.requires_grad_(False)
    net.train()
    step(net, optimizer)
    scheduler.step()
    optimizer.param_groups[0]["betas"][0] = 0.5
    rate = optimizer.param_groups[0]["lr"]
    weight, moment = net.last.bias.clone(), optimizer.state[net.last.bias]["exp_avg"]
    assert parts.difference() == ""
    parts.restore()
    again: Any = parts.returned
    assert again[0] is net
    assert again[1] is optimizer
    assert torch.equal(net.last.bias, weight)
    assert optimizer.state[net.last.bias]["exp_avg"] is moment
    assert all(each.grad is None for each in net.parameters())
    assert net.last.weight.requires_grad
    assert not net.first.bias.requires_grad
    assert net.training
    assert not net.norm.training
    group = optimizer.param_groups[0]
    assert group["lr"] is rate, "a captured graph may refer to it"
    assert group["lr"] == torch.tensor(0.1)
    assert group["betas"] == [0.9, 0.99]
    assert "initial_lr" not in group
    assert "step" not in vars(optimizer), "a scheduler has put its function there"
    assert torch.equal(torch.randn(3), drawn)
    assert parts.written() == ""


CHANGES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "an attribute": (lambda net, _: setattr(net, "calls", 1), "(attributes: calls)"),
    "a list in a dict": (lambda net, _: net.notes["a"].append(2), "(attributes: notes)"),
    "a tensor": (lambda net, _: setattr(net, "last_output", torch.ones(1)), "Net 0 keeps in last_output a tensor"),
    "a hook": (lambda net, _: net.last.register_forward_hook(hook), "hooks: _forward_hooks"),
    "a backward hook": (lambda net, _: net.last.register_full_backward_hook(hook), "hooks: _backward_hooks"),
    "a parameter's hook": (lambda net, _: net.last.weight.register_hook(hook), "parameters: weight"),
    "a late hook": (lambda net, _: net.last.bias.register_post_accumulate_grad_hook(hook), "parameters: bias"),
    "a mark on a parameter": (lambda net, _: setattr(net.last.bias, "mark", 1), "parameters: bias"),
    "a parameter": (
        lambda net, _: setattr(net.last, "bias", torch.nn.Parameter(torch.ones(2))),
        "parameters: bias",
    ),
    "a buffer": (lambda net, _: setattr(net.norm, "running_mean", torch.ones(2)), "buffers: running_mean"),
    "a part": (lambda net, _: setattr(net, "last", torch.nn.Linear(2, 2)), "parts: last"),
    "a part more": (lambda net, _: net.add_module("more", torch.nn.ReLU()), "parts: more"),
    "a compiled part": (lambda net, _: net.last.compile(), "_compiled_call_impl"),
    "an optimizer's hook": (
        lambda _, opt: opt.register_step_post_hook(hook),
        "_optimizer_step_post_hooks of AdamW",
    ),
    "an optimizer's function": (lambda _, opt: setattr(opt, "zero_grad", hook), "zero_grad of AdamW"),
    "an optimizer's attribute": (lambda _, opt: setattr(opt, "count", 1), "count of AdamW"),
    "an optimizer's parameters": (lambda net, opt: opt.param_groups[0]["params"].pop(), "other parameters"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_put_back_is_named(change: str) -> None:
    net, optimizer = build()
    parts = parts_of((net, optimizer))
    assert parts.difference() == ""
    apply, reason = CHANGES[change]
    apply(net, optimizer)
    assert reason in parts.difference()


class Held(torch.nn.Module):
    """A model that refers to what it is given."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.what = what


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Held(torch.Generator()), "Held 0 keeps in what a Generator"),
        (lambda: Held([torch.ones(1)]), "Held 0 keeps in what a tensor"),
        (lambda: torch.nn.LazyLinear(2), "parameters without a shape or a place"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "parameters without a shape or a place"),
        (lambda: torch.compile(torch.nn.Linear(2, 2)), "OptimizedModule is compiled"),
    ],
    ids=["generator", "tensor", "lazy", "meta", "compiled"],
)
def test_what_can_never_be_kept_is_known_when_it_is_built(
    module: Callable[[], torch.nn.Module], reason: str
) -> None:
    parts = parts_of(module())
    assert reason in parts.obstacle
    assert parts.difference() == parts.obstacle


def test_writes_are_noticed_and_those_with_a_reason_are_not() -> None:
    net, optimizer = build()
    parts = parts_of({"net": net, "optimizers": [optimizer]})
    assert parts.written() == ""
    unwritten = parts.unwritten()
    torch.nn.init.ones_(net.last.bias)
    assert parts.written() == "last.bias"
    parts.note_those({net.last.bias.data_ptr()} & unwritten)
    assert parts.written() == ""
    net.norm.running_mean.zero_()
    assert parts.written() == "norm.running_mean"
    parts.note()
    net.last.weight.data = torch.ones(2, 2)
    assert parts.written() == "last.weight"
    parts.note()
    net.last.weight.data.fill_(3)  # which torch does not count
    assert parts.written() == "last.weight"
    assert net.last.weight.data_ptr() not in parts.unwritten()
    parts.note()
    step(net, optimizer)
    assert parts.written() == "the optimizer's state", "it has some now, as behind load_state_dict"
    assert parts.written({id(net.first.bias)}) == "", "it is frozen"


def test_an_update_is_made_again_with_what_the_interrupted_step_has_left() -> None:
    def run(is_interrupted: bool) -> list[torch.Tensor]:
        net, optimizer = build()
        parts = parts_of((net, optimizer))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step(net, optimizer)
        scheduler.step()
        optimizer.zero_grad()
        net.last.bias.requires_grad_(False)
        net(torch.ones(3, 2)).sum().backward()
        if is_interrupted:
            update = parts.interrupted()
            parts.restore()
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            update.put_back()
        optimizer.step()
        assert not net.last.bias.requires_grad
        if is_interrupted:
            update.clear()
            assert all(each.grad is None for each in net.parameters())
        return [each.detach().clone() for each in net.parameters()]

    assert all(map(torch.equal, run(False), run(True)))


def test_lists_and_dicts_are_the_scripts_own() -> None:
    net, optimizer = build()
    parts = parts_of({"net": [net], "optimizer": (optimizer,)})
    given: Any = parts.returned
    given["net"].clear()
    del given["optimizer"]
    assert parts.returned == {"net": [net], "optimizer": (optimizer,)}


def test_something_else_than_modules_and_optimizers_is_refused() -> None:
    net, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UnrecoverableError, match=r"has to return a module, .* not a StepLR"):
        parts_of((net, [optimizer, scheduler]))


def test_a_function_is_known_again_at_the_next_entry() -> None:
    def make() -> Callable[[], object]:
        return lambda: build()

    assert Builder(make()).difference(Builder(make())) == ""
    assert Builder(build).difference(Builder(make())) == "keep() was called with other functions before"
    assert Builder(Net).difference(Builder(Net)) == ""
    assert Builder(torch.nn.Identity).difference(Builder(Net)) == "keep() was called with other functions before"


class Recipe:
    """What builds, as an object."""

    def __init__(self, size: int, **more: Any) -> None:
        self.size = size
        vars(self).update(more)

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(self.size, self.size)

    __call__ = build


class Sealed:
    """What cannot be looked into, but can be pickled."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


def nested(value: object) -> Callable[[], object]:
    def inner() -> object:
        return value

    def build() -> object:
        return inner()

    return build


def defaults(value: object, keyword: object = 0) -> Callable[[], object]:
    def build(size: object = value, *, other: object = keyword) -> object:
        return size, other

    return build


def mapped(value: Any) -> Callable[[], object]:
    return partial(nested(value), *(), **{})


MAKERS: dict[str, tuple[Callable[[Any], Callable[[], Any]], str]] = {
    "argument": (lambda value: partial(torch.nn.Linear, value, 2), "argument 0"),
    "keyword": (lambda value: partial(torch.nn.Linear, in_features=value, out_features=2), "argument in_features"),
    "cell": (lambda value: lambda: torch.nn.Linear(value, 2), "variable value"),
    "cell of a cell": (nested, "variable inner"),
    "cell of a partial": (mapped, "variable inner"),
    "default": (defaults, "default of size"),
    "default of a keyword": (lambda value: defaults(0, value), "default of other"),
    "method": (lambda value: Recipe(value).build, "self"),
    "object": (lambda value: Recipe(value), "self"),
    "setting": (lambda value: partial(id, SimpleNamespace(sizes={"first": [value]})), "argument 0"),
    "tensor": (lambda value: partial(id, torch.tensor([value])), "argument 0"),
    "sealed": (lambda value: partial(id, Sealed(value)), "argument 0"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_function_that_refers_to_something_else_is_another_one(name: str) -> None:
    make, where = MAKERS[name]
    then = Builder(make(64))
    assert then.obstacle == ""
    assert Builder(make(64)).difference(then) == ""
    assert Builder(make(128)).difference(then) == f"{where} of build is not what it was before"


def test_an_object_that_is_the_same_may_have_changed() -> None:
    recipe = Recipe(64)
    then = Builder(recipe.build)
    assert Builder(recipe.build).difference(then) == ""
    recipe.size = 128
    assert Builder(recipe.build).difference(then) == "self of build is not what it was before"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.nn.Linear(1, 1), "build uses a Linear that keep() did not return"),
        ([torch.nn.Parameter(torch.ones(1))], "build uses a Parameter that keep() did not return"),
        (torch.ones(1, requires_grad=True), "variable value of build holds a tensor that is trained"),
        (threading.Lock(), "variable value of build holds a lock, of which it is not known what it keeps"),
    ],
)
def test_what_a_function_refers_to_and_cannot_be_compared_has_it_called_again(value: object, what: str) -> None:
    parts = parts_of(build(), lambda: value)
    assert parts.obstacle == parts.difference() == what
    parts_before = value if isinstance(value, list) else [value]
    first, second = (Builder(made, parts_before) for made in (nested(value), nested(value)))
    assert first.obstacle == second.difference(first) == "", "what an earlier call has returned"
    assert second.difference(Builder(nested(value))) == "", "what was built then has the obstacle"
