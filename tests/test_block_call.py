"""The arguments of a block's call, taken apart: what its program is given, and what it depends on besides."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.block_call import NotUsed, take_apart  # noqa: E402 - exists from the line above on
from anyshape.accel.block_take import Visit, record_block  # noqa: E402
from anyshape.accel.reasons import say  # noqa: E402
from anyshape.accel.tape.patch_book import PatchBook  # noqa: E402
from anyshape.accel.tape.swaps import swapped  # noqa: E402


@dataclass
class Modulation:
    shift: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Frozen:
    shift: Tensor


class Frames:
    """As some models bundle the noise levels of a video's frames."""

    __slots__ = ("data", "count")

    def __init__(self, data: Tensor, count: int) -> None:
        self.data, self.count = data, count


class Hidden:
    __slots__ = ("__data",)

    def __init__(self, data: Tensor) -> None:
        self.__data = data


class Words(list):
    """It holds more than its attributes."""


class Chain:
    """It leads back to itself."""

    def __init__(self) -> None:
        self.next = self


class Block(nn.Module):
    def forward(self, *args: Any) -> None: ...


X, Y = torch.zeros(2, 3), torch.ones(4)


def given(*args: Any):
    return take_apart(Block, args, {})


def test_tensors_in_an_object_are_the_calls_and_the_rest_is_its_key() -> None:
    call = given(X, Modulation(Y, X), Frames(Y, 3))
    assert [id(tensor) for tensor in call.tensors] == [id(X), id(Y)]
    assert call.key == given(X, Modulation(Y, X), Frames(Y, 3)).key
    others = (Modulation(X, Y), Frames(Y, 3)), (Modulation(Y, X), Frames(Y, 4)), (Frozen(Y), Frames(Y, 3))
    assert all(given(X, *other).key != call.key for other in others)


def test_a_shape_among_the_arguments_is_part_of_the_key() -> None:
    call = given(X, X.shape)
    assert call.tensors[0] is X and call.key == given(X, torch.Size((2, 3))).key
    assert call.key not in (given(X, Y.shape).key, given(X, (2, 3)).key)


def test_an_object_that_the_block_changed_is_seen() -> None:
    frames = Frames(X, 3)
    call = given(frames)
    assert not call.was_changed(Block)
    frames.data = X.clone()
    assert call.was_changed(Block)


@pytest.mark.parametrize("kind", [Modulation, Frozen, Frames])
def test_other_tensors_in_an_object(kind: type) -> None:
    """The caller's object stays as it was; one without such tensors is handed on itself."""
    item = {Modulation: Modulation(X, Y), Frozen: Frozen(X), Frames: Frames(X, 3)}[kind]
    new, names = X + 1, {Modulation: ("shift", "scale"), Frozen: ("shift",), Frames: ("data", "count")}[kind]
    (made,) = swapped((item,), {id(X): new})
    assert type(made) is kind and getattr(made, names[0]) is new and getattr(item, names[0]) is X
    assert [getattr(made, name) for name in names[1:]] == [getattr(item, name) for name in names[1:]]
    assert swapped(item, {id(Y + 1): new}) is item


@pytest.mark.parametrize(
    "argument",
    [Words(), Hidden(X), Chain(), nn.Linear(2, 2), object(), len, Block, Modulation(Modulation(X, Y), Y)],
    ids=lambda argument: type(argument).__name__,
)
def test_what_may_hold_more_than_is_seen_is_refused(argument: Any) -> None:
    with pytest.raises(NotUsed, match=type(argument).__name__ if type(argument) is not Modulation else "Modulation"):
        given(X, argument)


def test_a_function_among_the_arguments_is_known_within_one_recording() -> None:
    def crop(x: Tensor) -> Tensor:
        return x[:1]

    crop.__module__ = "another_pack"
    key = take_apart(Block, (X, {"crop": crop}), {}, functions=True).key
    assert key == take_apart(Block, (X, {"crop": crop}), {}, functions=True).key
    assert key != take_apart(Block, (X, {"crop": lambda x: x}), {}, functions=True).key
    with pytest.raises(NotUsed, match="function"):
        given(X, crop)


def attention(keys: Tensor, options: dict[str, Any], scale: float = 1.0, *, heads: int = 2):
    """As a model makes one for each of its blocks."""

    def attend(x: Tensor, factor: float = scale) -> Tensor:
        return (x + keys.sum()) * factor * heads * options.get("strength", 1)

    return attend


def test_a_function_is_known_by_its_code_and_what_it_holds() -> None:
    call = given(X, attention(Y, {}))
    assert [id(tensor) for tensor in call.tensors] == [id(X), id(Y)]
    assert call.key == given(X, attention(Y + 1, {})).key and not call.was_changed(Block)
    others = attention(X, {}), attention(Y[:2], {}), attention(Y, {"a": 1}), attention(Y, {}, 2.0), lambda x: x
    others += (attention(Y, {}, heads=3),)
    assert all(given(X, other).key != call.key for other in others)


def test_other_objects_in_a_function() -> None:
    """The caller's function stays as it was, and one that has none of them is handed on itself."""
    options = {"strength": 3}
    function = attention(Y, options)
    (made,) = swapped((function,), {id(Y): Y * 2, id(options): {"strength": 5}})
    assert function(X).eq(4 * 2 * 3).all() and made(X).eq(8 * 2 * 5).all() and made(X, factor=2.0).eq(8 * 4 * 5).all()
    assert swapped(function, {id(X): Y}) is function

    held = Y.clone()

    def leads_back(x: Tensor) -> Tensor:
        return leads_back(x) if x.numel() > 9 else x + held

    assert swapped(leads_back, {id(X): Y}) is leads_back
    assert swapped(leads_back, {id(held): Y * 2})(X[0, :1]).eq(2).all()


def test_a_function_that_may_hold_more_than_is_seen_is_refused() -> None:
    def leads_back() -> Any:
        return leads_back

    def of_another_pack(x: Tensor) -> Tensor:
        return x

    def marked(x: Tensor) -> Tensor:
        return x

    def unfinished() -> Any:
        return later

    of_another_pack.__module__, marked.calls = "another_pack", 0
    held = attention(Y, {"cache": object()}), attention(Frames(Y, 1), {}), attention(Y, {"frames": Frames(Y, 1)})
    for function in (leads_back, of_another_pack, marked, unfinished, *held):
        with pytest.raises(NotUsed, match="function"):
            given(X, function)
    later = 1
    assert given(X, unfinished).key == given(X, unfinished).key != given(X).key
    # within one recording it may be known by which it is; what it holds is no argument then
    call = take_apart(Block, (X, attention(Y, {"cache": object()}), Y), {}, functions=True)
    assert [id(tensor) for tensor in call.tensors] == [id(X), id(Y)] and call.key[-1][0] == 1
    assert later == 1


def test_a_function_that_the_block_left_there_is_a_change() -> None:
    cache: dict[str, Any] = {}
    call = given(X, cache)
    cache["crop"] = lambda x: x
    assert call.was_changed(Block)


class Keeping(nn.Module):
    def forward(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        transformer_options["cache"].append(x * 2)
        return x + 1


def test_a_block_that_keeps_something_in_an_option_is_no_program() -> None:
    """A replay would not."""
    options, block = {"cache": []}, Keeping()
    taped = SimpleNamespace(
        prepare=lambda *_: None, places=lambda *_: frozenset(), named=lambda glance: None, stream=None,
        foreign=(),
    )  # fmt: skip
    call = SimpleNamespace(key=SimpleNamespace(device=X.device), taped=taped)
    call_of_block = take_apart(Keeping, (X,), {"transformer_options": options})
    recorded = record_block(Visit(call, None, True), PatchBook(), "", block, block.forward, call_of_block, ())
    assert recorded.take.reason == say("block_changes_options") and len(options["cache"]) == 1
    assert torch.equal(recorded.out, X + 1)
