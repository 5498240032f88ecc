"""Blocks that are alike, within one recording: the first is recorded, the others are added as copies of it.

Recording takes the host longer than eager does. A model of sixty blocks has two or three different ones. So a block
that is like an earlier one (``tape.blocks``), called with arguments of the same form, runs as ComfyUI's own without
being listened to. Its operations are those of the first on its own weights.

A *short* recording leaves such blocks out altogether. What they would give is memory that nobody has written, so the
forward's own result is void. Its tape is what that of a whole recording would be.

What the first one did besides making its result is looked for, and keeps it from being copied: options or lists that it
changed, constants that it wrote into, another pack's attention. Whatever is missed shows in the comparison of the
program with the forward, after which blocks are recorded one by one.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .block_call import Given, NotUsed, take_apart
from .block_forwards import Blocks
from .tape.blocks import is_plain
from .tape.layer_calls import LayerCall
from .tape.named_tensors import PartsByPath, modules_of, resolve, tensors_of
from .tape.options import MISSING, NotedOptions, frozen
from .tape.record import Recorder
from .tape.values import Constant, Operation, Value, Weight, replaced, tensors_in, values_in

SHARED = (Constant, Weight)  # leaves that blocks may read besides their own, the same for all


@dataclass
class Example:
    """The recorded call of a block, for those that are alike. Values stand for tensors."""

    operations: list[Operation]
    given: list[Value]  # the tensors among its arguments
    after: list[Value]  # the same, after the call: it may have written into them
    out: Any
    options: "_Seen"
    path: str
    places: frozenset[str]  # options that say which block it is, and change nothing in it
    weights: list[tuple[Value, Weight]] = field(default_factory=list)  # its own, as far as they are read; names in it
    recipe: list["_Line"] = field(default_factory=list)  # the operations, as copies are made of them


@dataclass
class _First:
    """A call that later ones may be copies of, before it runs. begin, promoted: how far the recorder was."""

    key: Hashable
    given: Given
    values: list[Value]
    seen: "_Seen"
    begin: int
    promoted: tuple[int, ...]


@dataclass
class _Copy:
    """A call that is a copy, before it runs. values: what stands for the example's."""

    example: Example
    given: Given
    values: dict[Value, Value]


class BlockCopies:
    """What runs in place of the blocks' forwards while ``recorder`` listens.

    places: the options that only say which block of its model a block is. short: blocks that are copied do not run.
    altered: see ``Taped``.
    """

    def __init__(
        self, recorder: Recorder, blocks: Blocks, places: Callable[[nn.Module], frozenset[str]], short: bool = False,
        altered: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        self.count = 0  # blocks that were copied
        self.left_out = 0  # and of these, did not run
        self._short, self._altered = short, altered
        self._recorder, self._blocks, self._places = recorder, blocks, places
        self._examples: dict[Hashable, Example | None] = {}  # None: it must not be copied
        self._turned = [weight.module for weight in recorder.turned]

    def forward(self, path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the block's own result. The call is recorded, or added as a copy."""
        recorder = self._recorder
        found = None if recorder.is_deaf else recorder.guarded(lambda: self._found(path, block, args, kwargs))
        if isinstance(found, _Copy):
            with recorder.not_listening():
                out = recorder.guarded(lambda: _void(found.example, found.given)) if self._short else None
                if out is None:
                    out = own(*args, **kwargs)
                else:
                    self.left_out += 1
            self.count += 1
            recorder.guarded(lambda: self._copied(found, path, out))
            return out
        if found is None:
            return own(*args, **kwargs)
        with found.seen.listening(found.given.passed):
            out = own(*args, **kwargs)
        if not (recorder.is_deaf or recorder.calls_packs or recorder.writes.promoted != found.promoted):
            recorder.guarded(lambda: self._keep(found, path, block, out))
        return out

    def _found(self, path: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> "_First | _Copy | None":
        """What this call is; None for one that has nothing to do with others."""
        if any(module.startswith(f"{path}.") for module in self._turned):  # it gives what lies otherwise
            return None
        if self._blocks.is_altered(path, block, self._altered):
            return None
        likeness = self._blocks.likeness(path, block)
        try:
            given = take_apart(type(block), args, kwargs, functions=True) if likeness is not None else None
        except NotUsed:
            given = None
        if given is None:
            return None
        key = (likeness, *given.key)
        if key not in self._examples:
            self._examples[key] = None  # for calls of blocks inside of this one
            values = [self._recorder.value(tensor) for tensor in given.tensors]
            begin = len(self._recorder.operations)
            return _First(key, given, values, _Seen(given.passed), begin, self._recorder.writes.promoted)
        example = self._examples[key]
        values = None if example is None else self._values(example, path, block, given)
        return values and _Copy(example, given, values)

    # The first of its kind ------------------------------------------------------------------------------------------

    def _keep(self, first: "_First", path: str, block: nn.Module, out: Any) -> None:
        """Later calls are copies of this one, if it did nothing but make its result."""
        given, value = first.given, self._recorder.value
        if given.was_changed(type(block)) or first.seen.wrote() or not is_plain(out):
            return
        operations, after = self._recorder.operations[first.begin :], [value(tensor) for tensor in given.tensors]
        example = Example(
            operations, first.values, after, replaced(out, Tensor, value), first.seen, path, self._places(block)
        )
        if self._is_closed(example, block):
            self._examples[first.key] = example

    def _is_closed(self, example: Example, block: nn.Module) -> bool:
        """Whether the example reads nothing but its arguments, its options and its own weights; finds those."""
        known = self._recorder.known
        own = {known(tensor) for _, part in modules_of(block) for _, tensor in tensors_of(part)}
        optional = {known(tensor) for tensor in example.options.tensors}
        made = {value for operation in example.operations for value in operation.outputs}
        given = {*example.given, *(value.root for value in example.given)}
        for read in {value: None for operation in example.operations for value in operation.inputs}:
            if read in made or read in example.given:
                continue
            if type(read.leaf) is Weight and f"{read.leaf.module}.".startswith(f"{example.path}."):
                own_name = Weight(read.leaf.module[len(example.path) + 1 :], read.leaf.name)
                example.weights.append((read, own_name))
            elif type(read.leaf) in SHARED:
                if read.root in own:  # made of sizes, and kept by this block
                    return False
            elif read.root in given or read not in optional:
                return False
        return all(value in made or value in given for value in [*example.after, *values_in(example.out)])

    # The others -----------------------------------------------------------------------------------------------------

    def _values(self, example: Example, path: str, block: nn.Module, given: Given) -> dict[Value, Value] | None:
        """What stands for the example's arguments and weights in this call; None if it cannot be a copy."""
        if not example.options.fits(given.passed, example.places):
            return None
        value, found = self._recorder.value, {}
        for old, tensor in zip(example.given, given.tensors, strict=True):
            new = value(tensor)
            if (old.is_constant or new.is_constant) and new is not old:
                return None  # what was made of it alone is a constant, too
            if found.setdefault(old, new) is not new or found.setdefault(old.root, new.root) is not new.root:
                return None
        if len({new.root for new in found.values()}) != len({old.root for old in found}):
            return None  # arguments share memory here, or did there
        modules = PartsByPath(block)
        for old, name in example.weights:
            full = ".".join(filter(None, (path, name.module)))
            new = self._recorder.renamed(old, Weight(full, name.name)) or value(resolve(modules, name))
            if (new.shape, new.stride, new.dtype, new.device) != (old.shape, old.stride, old.dtype, old.device):
                return None
            found[old] = new
        return None if self._recorder.is_deaf else found

    def _copied(self, copy: _Copy, path: str, out: Any) -> None:
        """Writes down the operations of the example with other values, and which tensor is which of them."""
        recorder, example, values, given = self._recorder, copy.example, copy.values, copy.given
        pairs = list(_pairs(example.out, out))
        if not all(isinstance(new, Tensor) if isinstance(old, Value) else old == new for old, new in pairs):
            recorder.refuse("blocks that are alike gave different results")
            return

        get = values.get
        if not example.recipe:
            example.recipe = [_Line.of(operation) for operation in example.operations]
        for line in example.recipe:
            operation = line.operation
            func = operation.func.at(example.path, path) if isinstance(operation.func, LayerCall) else operation.func
            copied = Operation(
                func, line.arguments(get), line.named(get), [get(value, value) for value in operation.inputs],
                writes=get(operation.writes, operation.writes), opaque=operation.opaque, like=operation,
            )  # fmt: skip
            for value in operation.outputs:
                if value is not None:
                    values[value] = made = value.again(recorder.number(), get(value.base, value.base))
                    made.origin = copied
                    copied.outputs.append(made)
                else:
                    copied.outputs.append(None)
            recorder.operations.append(copied)
        for old, new in [*zip(example.after, given.tensors, strict=True), *pairs]:
            if isinstance(old, Value) and old not in example.given:
                recorder.mark(new, get(old, old))


@dataclass
class _Line:
    """One operation of an example. places: of the values among its arguments, if none lies deeper (in a list, say)."""

    operation: Operation
    places: list[tuple[int, Value]] | None
    has_named: bool  # whether there are values among its keyword arguments

    @classmethod
    def of(cls, operation: Operation) -> "_Line":
        flat = [(place, item) for place, item in enumerate(operation.args) if isinstance(item, Value)]
        deep = len(flat) != sum(1 for _ in values_in(operation.args))
        return cls(operation, None if deep else flat, any(True for _ in values_in(operation.kwargs)))

    def arguments(self, get: Callable[[Value, Value], Value]) -> tuple:
        """Those of a copy. get: what stands for a value, itself by default."""
        if self.places is None:
            return replaced(self.operation.args, Value, lambda value: get(value, value))
        args = list(self.operation.args)
        for place, value in self.places:
            args[place] = get(value, value)
        return tuple(args)

    def named(self, get: Callable[[Value, Value], Value]) -> dict[str, Any]:
        """The keyword arguments of a copy."""
        kwargs = self.operation.kwargs
        return replaced(kwargs, Value, lambda value: get(value, value)) if self.has_named else dict(kwargs)


def _void(example: Example, given: Given) -> Any:
    """A result like the example's, that nobody has computed; None if it would lie in the memory of an argument."""
    tensors: dict[Value, Tensor] = dict(zip(example.after, given.tensors, strict=True))
    roots = {value.root for value in tensors}
    for value in values_in(example.out):
        if value not in tensors:
            if value.root in roots:
                return None
            tensors[value] = value.empty(value.device)
    return replaced(example.out, Value, tensors.__getitem__)


class _Seen:
    """What a block reads of its options, its model's own notes in them (the block's number, say) too."""

    def __init__(self, passed: Mapping[Any, Any] | None) -> None:
        self.tensors: list[Tensor] = []
        self._values: dict[Any, Any] = {}
        self._passed, self._keys = passed, _keys(passed)
        self._before = [] if passed is None else list(map(id, dict.values(passed)))
        # of a plain dict nobody knows what is read
        self._heard: dict[Any, Any] = {} if passed is None or isinstance(passed, NotedOptions) else dict(passed)

    def listening(self, passed: Mapping[Any, Any] | None) -> AbstractContextManager[None]:
        """The body is the block's call with these options."""
        return passed.heard_in(self._heard) if isinstance(passed, NotedOptions) else nullcontext()

    def wrote(self) -> bool:
        """Whether the block wrote into its options. Called once, after the block's call."""
        after = [] if self._passed is None else list(map(id, dict.values(self._passed)))
        changed = _keys(self._passed) != self._keys or after != self._before
        self.tensors = list(tensors_in(self._heard))
        self._values = {key: frozen(value) for key, value in self._heard.items()}
        self._passed, self._heard = None, {}
        return changed

    def fits(self, passed: Mapping[Any, Any] | None, places: frozenset[str]) -> bool:
        """Whether another block's options are the same, as far as they were read; but for ``places``."""
        if _keys(passed) != self._keys:
            return False
        read = [(key, value) for key, value in self._values.items() if key not in places]
        return all(frozen(dict.get(passed, key, MISSING)) == value for key, value in read)


def _keys(options: Mapping[Any, Any] | None) -> frozenset | None:
    return None if options is None else frozenset(dict.keys(options))


def _pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """What lies at the same place in two structures."""
    if isinstance(old, (list, tuple)) and type(old) is type(new) and len(old) == len(new):
        for mine, theirs in zip(old, new, strict=True):
            yield from _pairs(mine, theirs)
    elif isinstance(old, dict) and type(old) is type(new) and list(old) == list(new):
        for mine, theirs in zip(old.values(), new.values(), strict=True):
            yield from _pairs(mine, theirs)
    else:
        yield old, new
