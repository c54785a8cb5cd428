"""Plain data travels as what it is; copies equal it, and bytes of any origin give such data or a ValueError."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import math
import pathlib
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value
from checkpointless.state.serialization.state_tree import StateTreeError, copies_of

both_inline = pytest.mark.parametrize("inline", [0, 1 << 20])
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # it draws lone surrogates, too
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30)
    | st.floats(allow_nan=False)
    | any_text
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
    | st.timedeltas()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
    | st.sampled_from([torch.float8_e5m2, torch.device("cpu"), torch.Size([2, 3]), pathlib.Path("a/b")])
    | st.sampled_from([pathlib.PurePosixPath("/c"), slice(1, None), np.float32(0.1), np.int8(-3), np.bool_(True)])
    | st.sampled_from([np.datetime64("2020-01-02"), np.str_("é"), np.bytes_(b"a"), np.complex64(1j)])
)
hashable = st.integers() | any_text | st.tuples(st.integers(), any_text) | st.frozensets(st.integers(), max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(lambda items: collections.deque(items, len(items) + 1))
        | st.dictionaries(hashable, inner)
        | st.dictionaries(hashable, inner).map(collections.OrderedDict)
        | st.dictionaries(hashable, inner).map(lambda items: collections.defaultdict(list, items))
        | st.sets(hashable)
        | st.frozensets(hashable)
        | st.dictionaries(hashable, st.integers()).map(collections.Counter)
        | st.binary().map(bytearray)
    ),
    max_leaves=20,
)


def back(tree: Any) -> Any:
    return state_tree.loads(state_tree.dumps(tree))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        names = getattr(one, "default_factory", 0), getattr(other, "default_factory", 0)
        pairs = zip(one.items(), other.items())
        return len(one) == len(other) and names[0] is names[1] and all(same(*pair) for pair in pairs)
    if isinstance(one, collections.deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Word(str):
    pass


class Loud:
    def __repr__(self) -> str:
        return "two\nlines"


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(back(tree), tree)
    state_tree.check(tree)
    skeleton, tensors = state_tree.split(tree, inline_bytes=0)
    assert (tensors, same(state_tree.join(skeleton, tensors), tree)) == ([], True)


def test_not_a_number_and_infinities() -> None:
    assert repr(back([math.nan, math.inf, -math.inf, 0.1, -0.0])) == "[nan, inf, -inf, 0.1, -0.0]"


@both_inline
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...], inline: int) -> None:
    tensor = torch.ones(shape).to(dtype)
    arrived = state_tree.join(*state_tree.split(tensor, inline))
    assert (type(arrived), arrived.dtype, arrived.shape) == (torch.Tensor, dtype, shape)
    assert torch.equal(arrived.to(torch.complex64), tensor.to(torch.complex64))


@both_inline
def test_how_a_tensor_lies_in_memory_and_what_it_is(inline: int) -> None:
    turned = torch.randn(2, 3, 4).permute(2, 0, 1)
    gaps = torch.randn(8, 8)[::2, 1:3]
    wide = torch.randn(3, 1).expand(3, 5)
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    trained = torch.nn.Parameter(torch.randn(3))
    tree = [turned, gaps, wide, conjugate, frozen, trained, torch.zeros(2, requires_grad=True), trained * 2]
    skeleton, tensors = state_tree.split(tree, inline)
    arrived = state_tree.join(skeleton, tensors)
    assert arrived[0].stride() == turned.stride()
    assert all(torch.equal(one, other) for one, other in zip(arrived, tree))
    assert [type(each) for each in arrived] == [type(each) for each in tree]
    assert [each.requires_grad for each in arrived[:7]] == [each.requires_grad for each in tree[:7]]
    if inline == 0:
        assert tensors[0].data_ptr() == turned.data_ptr(), "copied, although it has no gaps"


@both_inline
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "|b1", "<c16", "<U3", "|S2", "<M8[ns]", "|V4", "<f2"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_arrays(dtype: str, shape: tuple[int, ...], inline: int) -> None:
    array = np.arange(max(1, math.prod(shape))).astype("<i8").astype(dtype if dtype != "|V4" else "<i4").view(dtype)
    array = array[: math.prod(shape)].reshape(shape)
    for each in (array, np.asfortranarray(array), array[..., ::-1] if shape else array):
        arrived = state_tree.join(*state_tree.split(each, inline))
        assert (type(arrived), arrived.dtype.str, arrived.shape) == (np.ndarray, dtype, each.shape)
        assert (arrived.tobytes(), arrived.flags.writeable) == (each.tobytes(), True)
    assert not shape or state_tree.join(*state_tree.split(np.asfortranarray(array), inline)).flags.f_contiguous


def test_a_modules_state_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    arrived = back(state)
    assert type(arrived) is collections.OrderedDict
    assert arrived._metadata == state._metadata  # type: ignore[attr-defined]
    torch.nn.BatchNorm1d(2).load_state_dict(arrived)


def test_what_is_shared_stays_shared() -> None:
    tensor, array, items = torch.randn(2000), np.zeros(2000), [1]
    tree: dict[str, Any] = {"a": tensor, "b": [tensor, array], "c": (array, items), "d": items}
    skeleton, tensors = state_tree.split(tree)
    assert len(tensors) == 2
    for each in (state_tree.join(skeleton, tensors), back(tree), state_tree.copy(tree)):
        assert each["a"] is each["b"][0]
        assert each["b"][1] is each["c"][0]
        assert each["d"] is each["c"][1]


def test_what_is_shared_over_and_over_takes_no_more_room() -> None:
    tree: Any = [0]
    for _ in range(60):
        tree = [tree, tree]
    assert len(state_tree.dumps(tree)) < 10_000
    assert len(state_tree.copy(tree)) == 2


# --- A copy of a state is equal to it, and nothing that changes reaches it ----------------------------------------


@given(trees)
@example({"\ud800"})
def test_a_copy_is_equal_and_has_the_digest(tree: Any) -> None:
    copied = state_tree.copy(tree)
    assert same(copied, tree)
    assert digest_value(copied) == digest_value(tree) == digest_value(back(tree))


def test_nothing_that_changes_reaches_a_copy() -> None:
    tree: Any = torch.zeros(3), [np.zeros(2)], collections.deque([1]), torch.nn.Parameter(torch.ones(1))
    copied = state_tree.copy(tree)
    before = repr(copied)
    tree[0].add_(1)
    tree[1][0] += 1
    tree[1].append(1)
    tree[2].append(2)
    assert before == repr(copied) != repr(tree)
    assert (type(copied[3]), copied[3].requires_grad) == (torch.nn.Parameter, True)


NAN = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)[0]


def bits_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.tensor(1.5)],
        [torch.tensor(0.1), torch.tensor(-0.0), torch.tensor(float("inf")), torch.tensor(1e-45)],
        [torch.tensor(0.1, dtype=torch.float64), torch.tensor(2**60 + 1), torch.tensor(True)],
        [NAN, torch.tensor(2.0), NAN.clone()],
        [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3.0, dtype=torch.bfloat16)],
        [torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([]), torch.tensor(1 + 2j)],
    ],
)
def test_copies_have_the_bits_that_the_tensors_had(tensors: list[torch.Tensor]) -> None:
    before = [bits_of(each) for each in tensors]
    copies = copies_of(tensors)
    for each in tensors:
        each.zero_()
    assert [bits_of(each) for each in copies()] == before


@state_tree.register_plain_type
class Mode(enum.Enum):
    FAST = "fast"


@state_tree.register_plain_type
class Options(enum.Flag):
    A = 1
    B = 2


@state_tree.register_plain_type
@dataclasses.dataclass(frozen=True)
class Window:
    size: int
    inner: Any


@state_tree.register_plain_type
class Span(typing.NamedTuple):
    start: int
    stop: torch.Tensor


def test_registered_classes_come_back_as_what_they_were() -> None:
    tree = [Mode.FAST, Options.A | Options.B, Window(3, Mode.FAST), {Mode.FAST: 1}, Span(1, torch.ones(2))]
    arrived = back(tree)
    assert arrived[:4] == tree[:4]
    assert (type(arrived[4]), repr(arrived[4])) == (Span, repr(tree[4]))


@pytest.mark.parametrize("kind", [dict, Loud, Word, 3])
def test_only_classes_of_plain_parts_can_be_registered(kind: Any) -> None:
    with pytest.raises(TypeError, match="cannot be registered"):
        state_tree.register_plain_type(kind)


# --- What cannot travel is refused with its path ------------------------------------------------------------------


def test_a_cycle_is_refused_with_its_path() -> None:
    tree: dict[str, Any] = {"callbacks": {"EMA": []}}
    tree["callbacks"]["EMA"].append(tree)
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\['EMA'\]\[0\] is the dict that it is in"):
        state_tree.check(tree)
    copied = state_tree.copy(tree)
    assert copied["callbacks"]["EMA"][0] is copied is not tree


def test_what_is_nested_too_deep_is_refused_and_can_be_copied() -> None:
    tree: Any = 0
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(StateTreeError, match=r"state\[0\]\[0\].* is nested more than 100 deep"):
        state_tree.check(tree)
    assert type(state_tree.copy(tree)) is list
    with pytest.raises(ValueError):
        state_tree.loads(b"\x91" * 100_000)


class Colour(enum.IntEnum):
    RED = 1


class Settings(dict[str, Any]):
    pass


class Numbers(typing.NamedTuple):
    left: int


class Shape(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "intruder",
    [
        *(object(), lambda: None, Loud(), Colour.RED, Word("a"), Settings(), Numbers(1), torch.nn.Linear(1, 1)),
        torch.zeros(2).as_subclass(Shape),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).max(0),
        torch.Generator(),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "<f4")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.random.default_rng(),
        collections.defaultdict(lambda: 1),
        slice("a", "b"),
        {torch.zeros(2): 1},
        {Loud(): 1},
        ...,
        int,
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "here")),
    ],
    ids=lambda intruder: type(intruder).__name__,
)
def test_what_cannot_travel_is_refused_with_its_path(intruder: Any) -> None:
    for refuse in (state_tree.check, state_tree.dumps, state_tree.split):
        with pytest.raises(StateTreeError, match=r"^state\['callbacks'\]\['EMA'\]\[1\].* (is|has) .*") as caught:
            refuse({"callbacks": {"EMA": [0, intruder]}})
        assert "\n" not in str(caught.value)
    state_tree.copy([intruder])


def test_a_check_reads_no_tensor() -> None:
    state_tree.check([np.broadcast_to(np.zeros(1), (1 << 40,)), np.broadcast_to(np.zeros(1), (1 << 20, 1 << 20)).T])
    state_tree.check(torch.zeros(1).expand(1 << 40))


# --- Nothing is imported or unpickled -----------------------------------------------------------------------------


@given(st.binary())
def test_any_bytes_give_plain_data_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(data)


@given(st.binary(min_size=1), st.integers(1, 30))
def test_what_is_cut_off_is_a_value_error(blob: bytes, missing: int) -> None:
    data = state_tree.dumps([blob, {"a": (1, 2)}])
    with pytest.raises(ValueError, match=r"a state tree cannot be read: .* truncated"):
        state_tree.loads(data[: max(0, len(data) - missing)])
    with pytest.raises(ValueError, match=r"a state tree cannot be read: .* trailing"):
        state_tree.loads(data + b"x")


FORGED = (
    *("tensor", "array", "registered", "same", "scalar", "bytearray", "bytes_", "str_", "int", "str", "Fraction"),
    *("OrderedDict", "Counter", "defaultdict", "deque", "Size", "dict", "set", "frozenset", "tuple", "range"),
    *("slice", "complex", "datetime", "timedelta", "Decimal", "Path", "dtype", "device"),
)
pieces = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.binary(max_size=9)
    | st.sampled_from(["float32", "<f4", "|O8", "builtins.print", "cpu", "cuda", "list", "0xf", "1e999999999", "x"])
)
forged_tensors = st.tuples(
    st.sampled_from(["float32", "<f4", "|O8"]),
    st.sampled_from(["cpu", "cuda", "meta"]) | st.lists(st.integers(-1, 3)),
    st.lists(st.integers(-1, 3)) | st.booleans(),
    st.none() | st.lists(st.integers(-1, 3)) | st.binary(max_size=9),
    st.booleans(),
    st.booleans(),
    st.binary(max_size=9) | st.integers(-2, 2),
)
forged_nodes = st.recursive(
    pieces | st.dictionaries(st.sampled_from(["tensor", "array"]), forged_tensors, min_size=1, max_size=1),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FORGED), st.lists(inner, max_size=3) | pieces, min_size=1, max_size=1)
        | st.dictionaries(pieces, inner, max_size=2)
    ),
    max_leaves=12,
)


@given(forged_nodes)
def test_a_forged_tree_gives_plain_data_or_a_value_error(node: Any) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(msgspec.msgpack.encode(node))


@pytest.mark.parametrize(
    "node",
    [
        {"bytearray": [1 << 50]},
        {"bytes_": [1 << 50]},
        {"Fraction": ["1e1000000000"]},
        {"Fraction": ["1e1000000000", 1]},
        {"Size": ["x"]},
        {"tensor": ["float32", "cpu", [1 << 40], None, False, False, b""]},
        {"tensor": ["float32", "cpu", [1 << 40, 0], [0, 0], False, False, b""]},
        {"array": ["|O8", [1], False, b"12345678"]},
        {"scalar": ["|O8", b"12345678"]},
        *({"dict": [1]}, {"dict": [1, 2], "set": []}, {}, msgspec.msgpack.Ext(5, b"x"), {"same": 0}),
    ],
)
def test_a_forged_value_is_refused_and_takes_no_memory(node: Any) -> None:
    with pytest.raises(ValueError):
        state_tree.loads(msgspec.msgpack.encode(node))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"registered": ["collections.Counter", ["a"]]}, r"collections\.Counter is not registered on this rank"),
        ({"decimal.Decimal": ["1"]}, "unknown type 'decimal.Decimal'"),
        ({"builtins.eval": ["1"]}, "unknown type 'builtins.eval'"),
    ],
)
def test_nothing_is_imported_or_unpickled(node: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        state_tree.loads(msgspec.msgpack.encode(node))
    with pytest.raises(ValueError):
        state_tree.loads(b"\x80\x04\x95")
