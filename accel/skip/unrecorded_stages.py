"""Skips steps of a network shaped like a U that is on no tape: ComfyUI's own forward runs without its deep stages.

Such a network has as many stages up as down, and a stage up is given what the stage at its depth gave on the way down.
So whatever lies between stage ``depth`` down and its counterpart reaches the rest by one tensor alone, the feature:
what the last of those layers gives. On a skipped step a deep layer gives a picture without channels, which costs
nothing where it is joined, and the last one gives the forecast. A layer that makes the picture larger behind it runs.

Whether that is all is not deduced but tried: behind the first full step the forward runs once as it will be skipped,
with the feature that it has just given, and must give the same.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..attempt import Passthrough, attempt, failed
from ..block_forwards import Blocks
from ..errors import is_out_of_memory
from ..tape import blocks
from ..tape.cut import LEAST_SHARE, MAX_SHARE
from .unrecorded import NOT_ALL, TOO_SMALL, Forward, NotLeftOut, SkippedStep

CLOSE = 1e-3  # of the result: the same layers on the same tensors


@dataclass(frozen=True)
class _Deep:
    """The layers that are left out, in the order of their calls. share: of the work that is left."""

    depth: int
    paths: list[str]
    share: float


class UnrecordedStages:
    """The stages of one model in one sampling run. Holds no module. depth: as in ``SkipSettings``, None for auto."""

    def __init__(self, model: nn.Module, depth: int | None, passthrough: Passthrough) -> None:
        self.depth, self.share = depth or 0, 1.0
        self._wanted, self._judge, self._passthrough = depth, failed(type(model).__name__, "its stages"), passthrough
        self._down, self._up = ([list(_within(model, stage)) for stage in stages] for stages in _stages(model))
        self._layers, self._end = Blocks(), Blocks()
        self._layers.paths = [path for name, _ in model.named_children() for path in _layers(model, name)]
        self._deep: _Deep | None = None
        self._why = ""  # nothing is left out

    def full(self, model: nn.Module, forward: Forward, rows: int) -> tuple[Any, tuple[Tensor, ...] | str]:
        """(what ``forward`` gives, its features [rows, ...] or why there are none). rows: of the batch."""
        if self._why:
            return forward(), self._why
        known = self._deep is not None
        watch = _FullStep(self._end.paths if known else [stage[-1] for stage in self._up])
        with (self._end if known else self._layers).ours(model, watch.call):
            out = forward()
        if not known:
            found, failure = attempt(lambda: self._begin(model, forward, watch, out), self._judge, self._passthrough)
            self._why = failure or found
            if self._why:
                return out, self._why
        feature = watch.given.get(self._end.paths[0])
        return out, NOT_ALL if feature is None or len(feature) != rows else (feature,)

    def skipped(self, model: nn.Module, forward: Forward, features: Sequence[Tensor]) -> Any:
        """What ``forward`` gives without its deep stages. Raises ``NotLeftOut``."""
        return _WithoutLayers(self._deep.paths, features[0]).run(self._layers, model, forward)

    def _begin(self, model: nn.Module, forward: Forward, watch: "_FullStep", out: Tensor) -> str:
        """Chooses the layers, and tries to do without them; why it cannot, or ""."""
        found = list(self._choices(watch))
        if not found or 1 - found[0].share < LEAST_SHARE:
            return TOO_SMALL
        cheap = [deep for deep in found if deep.share <= MAX_SHARE]
        chosen = (cheap or found[:1])[-1] if self._wanted is None else found[min(self._wanted, len(found) - 1)]
        self._deep = chosen
        try:
            again = self.skipped(model, forward, [watch.given[chosen.paths[-1]]])
            same = bool((again - out).float().norm() <= CLOSE * out.float().norm())
        except (NotLeftOut, RuntimeError) as error:  # of a layer that is given a picture without channels
            if is_out_of_memory(error):
                raise
            same = False
        if not same:
            self._deep = None
            return NOT_ALL
        self.depth, self.share, self._end.paths = chosen.depth, chosen.share, chosen.paths[-1:]
        return ""

    def _choices(self, watch: "_FullStep") -> Iterator[_Deep]:
        """What may be left out, the most first."""
        order, total = list(watch.work), sum(watch.work.values())
        for depth, (after, end) in enumerate(zip(self._down[1:], reversed(self._up[:-1]), strict=True)):
            first, last = after[0], watch.last.get(end[-1])
            if first not in order or last not in order or order.index(first) >= order.index(last):
                return
            paths = order[order.index(first) : order.index(last) + 1]
            yield _Deep(depth, paths, 1 - sum(map(watch.work.get, paths)) / total)


class _FullStep:
    """Notes the calls of layers. ends: layers whose result is kept, or what they are given where they enlarge that."""

    def __init__(self, ends: Collection[str]) -> None:
        self.work: dict[str, float] = {}  # weights times pixels, in the order of calls
        self.given: dict[str, Tensor] = {}  # results, by the layer that gave them
        self.last: dict[str, str] = {}  # of each end, the layer that gave what is kept
        self._ends, self._before = ends, ""

    def call(self, path: str, layer: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs in place of a layer's own forward."""
        out = own(*args, **kwargs)
        x = args[0] if args else None
        if isinstance(x, Tensor) and isinstance(out, Tensor):
            pixels = max(tensor.shape[2:].numel() for tensor in (x, out))
            self.work[path] = pixels * float(sum(weight.numel() for weight in layer.parameters()))
            if path in self._ends:
                enlarges = x.shape[2:] != out.shape[2:]
                self.last[path] = self._before if enlarges else path
                self.given[self.last[path]] = x if enlarges else out
            self._before = path
        return out


class _WithoutLayers(SkippedStep):
    """Leaves the layers ``paths`` out; the last of them gives ``feature``."""

    def __init__(self, paths: Sequence[str], feature: Tensor) -> None:
        super().__init__(paths)
        self._deep, self._feature = frozenset(paths), feature

    def call(self, path: str, layer: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs in place of a layer's own forward."""
        if path not in self._deep:
            return own(*args, **kwargs)
        self.take_turn(path)
        if len(args[0]) != len(self._feature):
            raise NotLeftOut(f"{path} is given another batch")
        return args[0][:, :0] if self._left else self._feature


def _stages(model: nn.Module) -> list[list[str]]:
    """The paths of the stages down, and of those up."""
    return [[f"{name}.{number}" for number in range(len(part))] for name, part in blocks.stage_lists(model)]


def _layers(model: nn.Module, name: str) -> Iterator[str]:
    """The layers of one of the model's own parts."""
    part = model.get_submodule(name)
    if isinstance(part, nn.ModuleList):
        for number in range(len(part)):
            yield from _within(model, f"{name}.{number}")
    else:
        yield from _within(model, name)


def _within(model: nn.Module, path: str) -> Iterator[str]:
    """The layers of a stage; a part without any is one itself."""
    names = [name for name, _ in model.get_submodule(path).named_children()]
    yield from [f"{path}.{name}" for name in names] or [path]
