"""Plain data travels as what it is; anything else is refused with its path."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import fractions
import json
import math
import pathlib
import struct
import subprocess
import sys
import typing
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.serialization import state_tree
from checkpointless.serialization.state_tree import StateTreeError

any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # halves of characters, too
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
    """Whether two states are equal in values and in all types."""
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


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(back(tree), tree)


@given(trees)
def test_what_is_checked_can_be_split_and_joined(tree: Any) -> None:
    state_tree.check(tree)
    skeleton, tensors = state_tree.split(tree, inline_bytes=0)
    assert tensors == []
    assert same(state_tree.join(skeleton, tensors), tree)


@given(trees)
def test_a_copy_is_equal_and_has_the_digest(tree: Any) -> None:
    copied = state_tree.copy(tree)
    assert same(copied, tree)
    assert state_tree.digest(copied) == state_tree.digest(tree) == state_tree.digest(back(tree))


@given(st.binary())
def test_any_bytes_give_plain_data_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(data)


@given(st.binary(min_size=1), st.integers(1, 30))
def test_what_is_cut_off_is_a_value_error(blob: bytes, missing: int) -> None:
    data = state_tree.dumps([blob, {"a": (1, 2)}])
    with pytest.raises(ValueError):
        state_tree.loads(data[: max(0, len(data) - missing)])
    with pytest.raises(ValueError, match="bytes that it does not refer to"):
        state_tree.loads(data + b"x")


KINDS = ("tensor", "array", "registered", "same", "numpy", "ordered", "deque", "size", "dict", "set", "range")
nodes = st.recursive(
    st.none() | st.integers(-2, 9) | st.sampled_from(["float32", "<f4", "|O8", "builtins.print", "cuda", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"t": st.sampled_from(KINDS)},
            optional=dict.fromkeys(
                ("v", "at", "dtype", "shape", "of", "order", "metadata", "max", "device"), inner
            ),
        )
    ),
    max_leaves=12,
)


@given(nodes)
def test_a_forged_header_gives_plain_data_or_a_value_error(node: Any) -> None:
    header = json.dumps(node).encode()
    with contextlib.suppress(ValueError):
        state_tree.loads(struct.pack("<I", len(header)) + header)


def test_keys_and_empty_mappings_survive() -> None:
    tree = {1: {}, "1": [], "a.b": (1, (2,)), (0, "x"): {"t": "dict"}, "set": {3, 4}}
    assert same(back(tree), tree)


def test_not_a_number_and_infinities() -> None:
    numbers = back([math.nan, math.inf, -math.inf, 0.1, -0.0])
    assert math.isnan(numbers[0])
    assert numbers[1:4] == [math.inf, -math.inf, 0.1]
    assert math.copysign(1, numbers[4]) == -1


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...], inline: int) -> None:
    tensor = torch.ones(shape).to(dtype)
    arrived = state_tree.join(*state_tree.split(tensor, inline))
    assert type(arrived) is torch.Tensor
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived.to(torch.complex64), tensor.to(torch.complex64))


@pytest.mark.parametrize("inline", [0, 1 << 20])
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


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "|b1", "<c16", "<U3", "|S2", "<M8[ns]", "|V4", "<f2"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_arrays(dtype: str, shape: tuple[int, ...], inline: int) -> None:
    array = np.arange(max(1, math.prod(shape))).astype("<i8").astype(dtype if dtype != "|V4" else "<i4").view(dtype)
    array = array[: math.prod(shape)].reshape(shape)
    for each in (array, np.asfortranarray(array), array[..., ::-1] if shape else array):
        arrived = state_tree.join(*state_tree.split(each, inline))
        assert type(arrived) is np.ndarray
        assert arrived.dtype.str == dtype
        assert arrived.shape == each.shape
        assert arrived.tobytes() == each.tobytes()
        assert arrived.flags.writeable
    assert not shape or state_tree.join(*state_tree.split(np.asfortranarray(array), inline)).flags.f_contiguous


def test_an_array_that_must_not_be_written_travels() -> None:
    array = np.arange(5000)
    array.flags.writeable = False
    assert np.array_equal(state_tree.join(*state_tree.split(array)), array)


@pytest.mark.parametrize("scalar", [np.float32(0.5), np.int64(3), np.bool_(False), np.float64(0.1), np.uint8(7)])
def test_numpy_scalars_stay_what_they_are(scalar: Any) -> None:
    assert type(back(scalar)) is type(scalar)
    assert back(scalar) == scalar


def test_an_array_and_a_tensor_without_dimensions_are_no_scalars() -> None:
    array, scalar = back([np.array(2.0), np.float64(2.0)])
    assert type(array) is np.ndarray
    assert array.shape == ()
    assert type(scalar) is np.float64


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
    assert len(state_tree.digest(tree)) == 32
    assert len(state_tree.copy(tree)) == 2


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
    header = b"[" * 100_000
    with pytest.raises(ValueError):
        state_tree.loads(struct.pack("<I", len(header)) + header)


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    pass


class Settings(dict[str, Any]):
    pass


class Pair(typing.NamedTuple):
    left: int
    right: int


class Shape(torch.Tensor):
    pass


class Loud:
    def __repr__(self) -> str:
        return "two\nlines"


@pytest.mark.parametrize(
    "intruder",
    [
        object(),
        lambda: None,
        Loud(),
        Colour.RED,
        Word("a"),
        Settings(),
        Pair(1, 2),
        torch.nn.Linear(1, 1),
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
    for refuse in (state_tree.check, state_tree.dumps, state_tree.split, state_tree.digest):
        with pytest.raises(StateTreeError, match=r"^state\['callbacks'\]\['EMA'\]\[1\].* (is|has) .*") as caught:
            refuse({"callbacks": {"EMA": [0, intruder]}})
        assert "\n" not in str(caught.value)
    state_tree.copy([intruder])


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(
        StateTreeError, match=r"^state\['net'\] is a torch.nn.modules.linear.Linear, which .*state_dict"
    ):
        state_tree.check({"net": torch.nn.Linear(1, 1)})
    with pytest.raises(StateTreeError, match="keep a plain int, or call register_plain_type"):
        state_tree.check(Colour.RED)


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(StateTreeError, match="quantized"):
        state_tree.check(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_a_check_reads_no_tensor() -> None:
    state_tree.check([np.broadcast_to(np.zeros(1), (1 << 40,)), np.broadcast_to(np.zeros(1), (1 << 20, 1 << 20)).T])
    state_tree.check(torch.zeros(1).expand(1 << 40))


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
    assert type(arrived[4]) is Span
    assert arrived[4].stop.equal(torch.ones(2))


def test_what_is_not_registered_here_is_not_imported() -> None:
    header = json.dumps({"t": "registered", "of": "collections.Counter", "v": ["a"]}).encode()
    with pytest.raises(ValueError, match=r"collections\.Counter is not registered on this rank"):
        state_tree.loads(struct.pack("<I", len(header)) + header)


@pytest.mark.parametrize("kind", [dict, Loud, Word, 3])
def test_only_classes_of_plain_parts_can_be_registered(kind: Any) -> None:
    with pytest.raises(TypeError, match="cannot be registered"):
        state_tree.register_plain_type(kind)


def test_the_digest_is_that_of_the_state_alone() -> None:
    one = {"a": 1, "b": {3, "x"}, "c": torch.arange(6).reshape(2, 3).t()}
    other = {"c": torch.arange(6).reshape(2, 3).t().contiguous(), "b": {"x", 3}, "a": 1}
    assert state_tree.digest(one) == state_tree.digest(other)
    twice = [1.0]
    assert state_tree.digest([twice, twice]) == state_tree.digest([[1.0], [1.0]])
    imported = "from checkpointless.serialization import state_tree"
    code = f"{imported}; print(state_tree.digest({{'a': {{'x', 'y', 'z'}}, 2: [1.5]}}))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.split()[-1] == state_tree.digest({2: [1.5], "a": {"z", "y", "x"}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", 1),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ([[1], 2], [1, [2]]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.zeros(2), np.zeros(2, "<f4")),
        (np.float32(1), np.float64(1)),
        (0.0, -0.0),
        (b"a", bytearray(b"a")),
        ([], None),
    ],
)
def test_states_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert state_tree.digest(one) != state_tree.digest(other)


def test_nothing_that_changes_reaches_a_copy() -> None:
    tree: dict[str, Any] = {
        "t": torch.zeros(3),
        "l": [np.zeros(2)],
        "d": collections.deque([1]),
        "p": torch.nn.Parameter(torch.ones(1)),
    }
    copied = state_tree.copy(tree)
    tree["t"].add_(1)
    tree["l"][0] += 1
    tree["l"].append(1)
    tree["d"].append(2)
    assert copied["t"].eq(0).all()
    assert len(copied["l"]) == 1
    assert not copied["l"][0].any()
    assert list(copied["d"]) == [1]
    assert type(copied["p"]) is torch.nn.Parameter
    assert copied["p"].requires_grad


def test_unknown_objects_are_copied_if_they_can_be() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    shared = [1]
    known, stubborn = Loud(), Stubborn()
    known.items = shared  # type: ignore[attr-defined]
    copied: list[Any] = state_tree.copy([known, stubborn, shared, known])
    assert copied[0] is copied[3] is not known
    assert copied[0].items is copied[2] is not shared
    assert copied[1] is stubborn


def test_nothing_is_unpickled() -> None:
    with pytest.raises(ValueError):
        state_tree.loads(b"\x80\x04\x95")
    for name in ("Decimal", "builtins.eval"):
        header = json.dumps({"t": name, "v": "1"}).encode()
        with pytest.raises(ValueError, match="unknown kind"):
            state_tree.loads(struct.pack("<I", len(header)) + header)


def test_decimals_and_fractions() -> None:
    assert same(
        back([Decimal("1.10"), fractions.Fraction(1, 10**40)]), [Decimal("1.10"), fractions.Fraction(1, 10**40)]
    )
