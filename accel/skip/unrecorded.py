"""Skips steps of a forward that is not on a tape: ComfyUI's own runs, without the blocks in its middle.

Weights that are streamed keep a forward off the tape, and so does a value that comes back to the host. Its blocks can
be left out all the same, and then their weights are not even fetched. What a tape shows at one look (``tape.middle``)
is watched here while a full step runs. Blocks of one class are a row where each is given what the one before gave:

- A *stream* is a result that the next block is given: the very same tensor.
- Nothing else is done with it between the two blocks, not even a view.
- Nobody keeps it: it is gone when the block after the next begins.
- A block writes into nothing that it is given but its streams.

The feature of a row is what it added to each stream. A skipped step passes the streams by its blocks and adds the
forecast behind the last. Where there are several rows, each is left out by itself.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..attempt import Passthrough, attempt, failed
from ..block_forwards import Blocks
from ..parts_seen import original
from ..reasons import say
from ..tape.blocks import is_plain
from ..tape.cut import LEAST_SHARE, MAX_SHARE
from ..tape.modes import Operations
from ..tape.traits import traits
from ..tape.values import replaced, tensors_in

LEAST_LIST = 0.1  # of the parameters of all blocks: the blocks of a smaller list (a text refiner's) always run
TOO_SMALL = say("no_middle", why="its repeated blocks are too small a part of it")
NOT_ALL = say("no_middle", why="its blocks do not follow one another, or keep something for each other")
FEWEST = 2  # blocks in a row: what a single one adds to is not known
OTHER = "", 0  # the place of what is no argument of its own

Place = tuple[str | int, int]  # of a tensor among a block's arguments: which one, and the number of the tensor in it
Forward = Callable[[], Any]


class NotLeftOut(Exception):  # noqa: N818  a message, as ``NotCut``
    """Raised where a skipped step behaved differently from the full one before it."""


@dataclass(frozen=True)
class _Taken:
    """In a block's result: here was its tensor of this number."""

    place: int


@dataclass
class _Row:
    """Calls of blocks, each on what the one before gave. streams: a result's tensor, by number, to the argument."""

    kind: type
    paths: list[str]
    starts: dict[Place, Tensor] = field(default_factory=dict)  # what the first one was given, until the row ends
    streams: dict[int, Place] = field(default_factory=dict)
    result: Any = None  # the form of a block's result
    written: set[Place] = field(default_factory=set)


class UnrecordedBlocks:
    """The blocks of one model in one sampling run. Holds no module. depth: as in ``SkipSettings``, None for auto."""

    def __init__(self, model: nn.Module, depth: int | None, passthrough: Passthrough) -> None:
        self._blocks, self._passthrough, self._rows = Blocks(), passthrough, list[_Row]()
        self._blocks.look(model, 0)
        self.middle, self.depth, self.share = _middle(model, self._blocks.paths, depth)

    def full(self, model: nn.Module, forward: Forward, rows: int) -> tuple[Any, tuple[Tensor, ...] | str]:
        """(what ``forward`` gives, its features [rows, ...] or why there are none). rows: of the batch."""
        if not self.middle:
            return forward(), TOO_SMALL
        watch = _FullStep(frozenset(self.middle), rows, type(model).__name__, self._passthrough)
        with self._blocks.ours(model, watch.call), watch:
            out = forward()
        watch.end()
        self._rows = watch.rows
        if not watch.features:
            return out, NOT_ALL
        return out, tuple(watch.features)

    def skipped(self, model: nn.Module, forward: Forward, features: Sequence[Tensor]) -> Any:
        """What ``forward`` gives without its middle. Raises ``NotLeftOut``. features: may be written into."""
        return _WithoutRows(self._rows, features).run(self._blocks, model, forward)


def _middle(model: nn.Module, paths: Sequence[str], depth: int | None) -> tuple[list[str], int, float]:
    """(the blocks that may be left out, how many at either end always run, the share of parameters outside).

    By parameters, because what is streamed takes the time of its bytes.
    """
    sizes = {path: sum(weight.numel() for weight in model.get_submodule(path).parameters()) for path in paths}
    lists: dict[str, int] = {}
    for path, size in sizes.items():
        parent = path.rpartition(".")[0]
        lists[parent] = lists.get(parent, 0) + size
    least = LEAST_LIST * sum(lists.values())
    row = [path for path in paths if lists[path.rpartition(".")[0]] >= least]
    total = sum(weight.numel() for weight in model.parameters()) or 1
    left = [1 - sum(map(sizes.get, row[at : len(row) - at])) / total for at in range((len(row) + 1) // 2)]
    if not left or 1 - left[0] < LEAST_SHARE:
        return [], 0, 1.0
    cheap = [at for at, share in enumerate(left) if share <= MAX_SHARE]
    chosen = max(cheap, default=0) if depth is None else min(depth, len(left) - 1)
    return row[chosen : len(row) - chosen], chosen, left[chosen]


class _FullStep(Operations):
    """Watches a forward for rows of blocks, and keeps what each added. What fails here costs the features alone."""

    def __init__(self, middle: frozenset[str], batch: int, name: str, passthrough: Passthrough) -> None:
        super().__init__()
        self.rows: list[_Row] = []
        self.features: list[Tensor] = []
        self._middle, self._batch = middle, batch
        self._judge, self._passthrough, self._broken = failed(name, "watching its blocks"), passthrough, False
        self._row: _Row | None = None
        self._inside = False  # a block
        self._given: dict[int, Place] = {}  # what it was given, by where that lies
        self._last: dict[int, Tensor] = {}  # what the row's latest block gave, until somebody uses it
        self._harmless = set[Any]()  # operations that write into nothing
        self._passed: list[weakref.ref[Tensor]] = []  # and what the one before gave

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Most operations are a block's own and write nothing: each step in full waits for all of them.
        if self._row is not None and not (self._inside and func in self._harmless):
            self._guarded(lambda: self._look(func, args, kwargs))
        return func(*args, **kwargs)

    def call(self, path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs in place of a block's own forward."""
        self._guarded(lambda: self._enter(path, type(original(block)), args, kwargs))
        out = own(*args, **kwargs)
        self._guarded(lambda: self._leave(path, out))
        return out

    def end(self) -> None:
        """Ends the forward."""
        self._guarded(self._finish)
        if self._broken:
            self.rows, self.features = [], []

    def _guarded(self, ours: Callable[[], None]) -> None:
        if not self._broken:
            _, reason = attempt(ours, self._judge, self._passthrough)
            self._broken = self._broken or bool(reason)

    def _look(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operation is about to run."""
        if not self._inside:
            storages = {tensor.untyped_storage()._cdata for tensor in self._last.values()}
            used = tensors_in((args, kwargs))
            if storages and any(tensor.untyped_storage()._cdata in storages for tensor in used):
                self._finish()  # before it may write into a stream
        elif traits(func).writes < 0:
            self._harmless.add(func)
        else:
            written = tensors_in(_written(func, args, kwargs))
            places = [self._given.get(tensor.untyped_storage()._cdata) for tensor in written]
            self._row.written.update(place for place in places if place is not None)

    def _enter(self, path: str, kind: type, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(_arguments(args, kwargs))
        if any(self._is_kept(ref(), given) for ref in self._passed):
            self._row, self._last = None, {}
            self._broken = True  # nothing is known of the latest blocks, either
            return
        goes_on = path in self._middle and self._goes_on(kind, given)
        if not goes_on:
            self._finish()
        self._passed = [weakref.ref(tensor) for tensor in self._last.values()]
        self._last, self._inside = {}, True
        if goes_on:
            self._row.paths.append(path)
        elif path in self._middle:
            starts = {place: tensor.clone() for place, tensor in given.items() if self._may_be_stream(tensor)}
            self._row = _Row(kind, [path], starts)
        everything = tensors_in((args, kwargs))
        self._given = {tensor.untyped_storage()._cdata: OTHER for tensor in everything}
        self._given |= {tensor.untyped_storage()._cdata: place for place, tensor in given.items()}

    def _goes_on(self, kind: type, given: dict[Place, Tensor]) -> bool:
        """Whether a block of this class, given this, goes on with the row."""
        if self._row is None or self._row.kind is not kind or not self._last:
            return False
        streams: dict[int, Place] = {}
        for place, tensor in self._last.items():
            found = [argument for argument, other in given.items() if other is tensor]
            if len(found) != 1:
                return False
            streams[place] = found[0]
        known, self._row.streams = self._row.streams or streams, self._row.streams or streams
        return streams == known and len(set(streams.values())) == len(streams)

    def _is_kept(self, passed: Tensor | None, given: dict[Place, Tensor]) -> bool:
        """Whether somebody still has what a block gave, and not because the next one wrote into it."""
        return passed is not None and all(passed is not tensor for tensor in given.values())

    def _may_be_stream(self, tensor: Tensor) -> bool:
        by_picture = self._batch == 1 or len(tensor) == self._batch  # of one picture all is its own
        return tensor.is_floating_point() and tensor.ndim > 1 and by_picture

    def _leave(self, path: str, out: Any) -> None:
        self._inside = False
        if self._row is None or self._row.paths[-1] != path:
            return
        form, last = _taken_apart(out)
        if form is None or self._row.result not in (None, form):
            self._row = None
            return
        self._row.result, self._last = form, last

    def _finish(self) -> None:
        """The row ends with what its latest block gave."""
        row, last, self._row, self._last, self._passed = self._row, self._last, None, {}, []
        if row is None or len(row.paths) < FEWEST or not last or row.written - set(row.streams.values()):
            return
        pairs = [(last[place], row.starts.get(argument)) for place, argument in row.streams.items()]
        if all(start is not None and _form(end) == _form(start) for end, start in pairs):
            self.features += [(end - start).contiguous() for end, start in pairs]
            self.rows.append(row)
        row.starts = {}


class SkippedStep:
    """A forward in which some blocks have a ``call`` of ours. left: their paths, in the order of their calls."""

    def __init__(self, left: Iterable[str]) -> None:
        self._left = list(left)

    def run(self, blocks: Blocks, model: nn.Module, forward: Forward) -> Any:
        """What ``forward`` gives. Raises ``NotLeftOut`` where not all that the features stand for was left out."""
        with blocks.ours(model, self.call):
            out = forward()
        if self._left:
            raise NotLeftOut(f"{self._left[0]} is not called")
        return out

    def take_turn(self, path: str) -> None:
        """A block that is left out is called. Raises ``NotLeftOut`` if it is another one's turn."""
        if not self._left or self._left.pop(0) != path:
            raise NotLeftOut(f"{path} is called out of turn")


class _WithoutRows(SkippedStep):
    """Passes streams by the blocks of ``rows``, and adds the features behind each row's last."""

    def __init__(self, rows: Sequence[_Row], features: Sequence[Tensor]) -> None:
        super().__init__(path for row in rows for path in row.paths)
        self._of = {path: row for row in rows for path in row.paths}
        given = iter(features)
        self._features = {id(row): {place: next(given) for place in row.streams} for row in rows}

    def call(self, path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs in place of a block's own forward."""
        row = self._of.get(path)
        if row is None:
            return own(*args, **kwargs)
        self.take_turn(path)
        given, features = dict(_arguments(args, kwargs)), self._features[id(row)]
        streams = {place: given.get(argument) for place, argument in row.streams.items()}
        for place, stream in streams.items():
            if stream is None or _form(stream) != _form(features[place]):
                raise NotLeftOut(f"{path} is given another stream")
        if path == row.paths[-1]:
            streams = {place: stream + features[place] for place, stream in streams.items()}
        elif path == row.paths[0]:  # somebody may write into it between the blocks
            streams = {place: stream.clone() for place, stream in streams.items()}
        return replaced(row.result, _Taken, lambda taken: streams[taken.place])


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    writes = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return [named.get(argument.name) for argument in writes]


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _arguments(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[Place, Tensor]]:
    """The tensors among a block's arguments, but for those in dicts: its options."""
    for name, item in (*enumerate(args), *kwargs.items()):
        if not isinstance(item, dict):
            yield from (((name, index), tensor) for index, tensor in enumerate(tensors_in(item)))


def _taken_apart(out: Any) -> tuple[Any, dict[int, Tensor]]:
    """(the form of a block's result, its tensors); no form where there is more in it than tensors and plain values."""
    if not is_plain(out):
        return None, {}
    places = itertools.count()
    return replaced(out, Tensor, lambda tensor: _Taken(next(places))), dict(enumerate(tensors_in(out)))
