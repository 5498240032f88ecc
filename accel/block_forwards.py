"""The repeated blocks of one model, and our ``forward`` in place of theirs while the model's own forward runs."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .origin import is_called_by_others
from .parts_seen import PartsSeen, is_restored, original, settings_of
from .tape import blocks
from .tape.layer_calls import LayerCalls, paths

# What runs in place of a block's own forward: (path, block, its own forward, arguments, keyword arguments) -> result
Ours = Callable[[str, nn.Module, Callable[..., Any], tuple, dict[str, Any]], Any]

MAX_STRUCTURES = 4  # of a model, that it may have again
_INSTALLING = threading.Lock()


class _Installed(functools.partial):
    """A forward of ours on a block."""

    thread: int  # that it answers in
    before: Any  # what it took the place of: one of ours, or another pack's; None if nothing was there
    over_others: bool  # whether that is another pack's


@dataclass
class _Found:
    """What is known of the blocks of a model with one structure. number: no other one has it."""

    number: int
    paths: list[str]
    alike: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    kinds: dict[Hashable, int] = field(default_factory=dict)  # likenesses are long, and compared at each call
    seen: dict[str, tuple[PartsSeen, list]] = field(default_factory=dict)  # what blocks looked like before a forward


class Blocks:
    """The blocks of one model by path, and which of them are alike. Holds no module. stages: see ``blocks.find``.

    What was found is kept for the last few structures: a model that puts a cache into itself has two in each run.
    """

    def __init__(self, stages: bool = False) -> None:
        self._stages, self._count = stages, 0
        self._structures: OrderedDict[int, _Found] = OrderedDict()  # the latest last
        self._now = _Found(0, [])

    @property
    def paths(self) -> list[str]:
        """Of the blocks, as the model is now."""
        return self._now.paths

    @paths.setter
    def paths(self, paths: list[str]) -> None:
        self._now.paths = paths

    def look(self, model: nn.Module, structure: int) -> bool:
        """Finds the blocks of ``model``. Returns whether its code is not as it was at an earlier look."""
        known = structure in self._structures
        if not known:
            self._count += 1
            self._structures[structure] = _Found(self._count, blocks.find(model, self._stages))
            if len(self._structures) > MAX_STRUCTURES:
                self._structures.popitem(last=False)
        self._structures.move_to_end(structure)
        self._now = self._structures[structure]
        return not known

    def forget(self) -> None:
        """Makes the next look find everything again, because the form of a weight changed, for example."""
        self._structures.clear()

    def likeness(self, path: str, block: nn.Module) -> tuple[int, int] | None:
        """Returns the same value for blocks that are alike, and None for a block that must be left alone.

        Blocks of different structures are never alike.
        """
        now = self._now
        if path not in now.alike:
            found = blocks.likeness(block)
            now.alike[path] = None if found is None else (now.number, now.kinds.setdefault(found, len(now.kinds)))
        return now.alike[path]

    def is_known(self, likeness: tuple[int, int]) -> bool:
        """Whether a look may still find such blocks."""
        return any(found.number == likeness[0] for found in self._structures.values())

    def watch(self, model: nn.Module, again: bool) -> None:
        """Notes what the blocks look like, before a forward in which patches of other packs run.

        again: they may look otherwise since the last time, as a LoRA changes weights at each call, say.
        """
        for path in [path for path in self.paths if again or path not in self._now.seen]:
            block = model.get_submodule(path)
            self._now.seen[path] = PartsSeen(_below(block)), settings_of(block)

    def is_altered(self, path: str, block: nn.Module, altered: Callable[[], bool]) -> bool:
        """Whether a patch that calls this block has changed it, or what its code calls, for as long as it does so.

        altered: whether functions that the model's code names, or methods, are others than before the forward. All
        this takes a while, so it is asked only where another pack's code is among the callers.
        """
        if not is_called_by_others():
            return False
        seen = self._now.seen.get(path)
        return altered() or (seen is not None and not (seen[0].fits(_below(block)) and settings_of(block) == seen[1]))

    @contextmanager
    def ours(
        self, model: nn.Module, forward: Ours, but: Container[str] = (), methods: Ours | None = None,
        over_others: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """While the body runs, ``forward`` runs in place of each block's own, in this thread. but: paths of others.

        Within one another, the inner body's is called first, and the outer's is what it takes for the block's own.
        methods: runs in place of other methods that blocks may be called by, see ``blocks.methods``.
        over_others: whether it runs in place of what another pack has put there, too.
        """
        installed: list[tuple[nn.Module, str, _Installed]] = []
        thread = threading.get_ident()

        def run(path: str, block: nn.Module, name: str, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return own(*args, **kwargs)
            return (forward if name == "forward" else methods)(path, block, own, args, kwargs)

        def install(path: str, block: nn.Module, name: str) -> None:
            before = block.__dict__.get(name)
            mine = before is None or (getattr(before, "thread", None) == thread and not before.over_others)
            compiled = name == "forward" and original(block) is not block  # another node's way to run its own
            free = mine or compiled or is_restored(block, name)  # else it is somebody else's
            if free or (over_others and not isinstance(before, _Installed)):  # what another thread put there stays
                ours = _Installed(run, path, block, name, getattr(block, name))
                ours.thread, ours.before, ours.over_others = thread, before, not free
                installed.append((block, name, ours))
                block.__dict__[name] = ours

        try:
            with _INSTALLING:
                for path in [path for path in self.paths if path not in but]:
                    block = model.get_submodule(path)
                    for name in ("forward",) if methods is None else blocks.methods(type(block)):
                        install(path, block, name)
            yield
        finally:
            with _INSTALLING:
                for block, name, ours in reversed(installed):
                    if block.__dict__.get(name) is ours:
                        del block.__dict__[name]
                        if ours.before is not None:
                            block.__dict__[name] = ours.before


def packs_layers(recorder: Any, model: nn.Module, before: Callable[[], Any] = bool) -> AbstractContextManager[None]:
    """Within it, calls of other packs' layers in ``model`` may become steps of what ``recorder`` writes down.

    before: called if there are any.
    """
    layers = Blocks()
    layers.paths = recorder.guarded(lambda: paths(model)) or []
    if layers.paths:
        recorder.guarded(before)
    return layers.ours(model, LayerCalls(recorder, model).forward, over_others=True)


def _below(block: nn.Module) -> list[nn.Module]:
    """The parts of a block but for itself, whose forward is ours."""
    return list(block.modules())[1:]
