"""The graphs of one model's takes: made where one pays, and replayed."""

from collections.abc import Callable, Iterable

from torch import Tensor

from . import graphs
from .call import Call, Settings
from .errors import CaptureFailed
from .key import ShapeKey
from .outputs import Output, empty_like, flat
from .preparing import preparing
from .reasons import say
from .stats import ModelStats, ShapeStats
from .take import Take, bound
from .tape.binding import NotBound, copies_fit
from .tape.rules.resident import fetched_bytes
from .tape.this_forward import silence
from .tape.values import Tape

NO_GRAPHS = say("no_graphs")


class TakeGraphs:
    """owner: stands for the model among graphs."""

    def __init__(self, stats: ModelStats, owner: int) -> None:
        self._stats, self._owner = stats, owner

    def replay(self, call: Call, take: Take, inputs: dict[str, Tensor]) -> Output | None:
        """The result of the take's graph, or None if there is none."""
        if take.program.resident:
            try:
                bound(take, call.taped, call.weights)
            except NotBound:  # the graph's weights are others
                return None
        return graphs.cache(call.key.device).replay(self._name(call, take), call.weights, inputs)

    def may_stay(self, call: Call, settings: Settings, tape: Tape) -> bool:
        """Whether there is room on the device for what layers copy there at each call, and for a graph beside it."""
        size = fetched_bytes(tape)
        if not size or call.taped.no_graph():
            return False
        return size <= settings.graph_budget_bytes // 2 and copies_fit(size, tape.device)

    def drop(self, takes: Iterable[tuple[ShapeKey, int]]) -> None:
        """Forgets the graphs of the takes with these keys and numbers."""
        for key, number in takes:
            graphs.cache(key.device).drop(graphs.Name(self._owner, key, number))

    def first(
        self, call: Call, settings: Settings, shape: ShapeStats, take: Take, inputs: dict[str, Tensor], like: Output,
        checked: Callable[[Output], Output],
    ) -> Output | None:  # fmt: skip
        """The result of the program's graph, or of its run before the capture, checked; None if there is no graph.

        like: what the result looks like. Nothing waits but the check: while the GPU still runs it, the host captures
        the graph.
        """
        program, cache, name = take.program, graphs.cache(call.key.device), self._name(call, take)
        take.graph = True
        try:
            self._capture(call, settings, shape, take, inputs, like, wanted=not take.live)
        except CaptureFailed as error:  # remembered: it is told when this size settles
            if take.needs_graph:
                raise CaptureFailed(say("patches_slower", why=error)) from error
            return None
        try:
            out = checked(self.replay(call, take, inputs) if take.live else cache.result(name))
        except BaseException:
            cache.drop(name)
            raise
        if take.program is not program:
            cache.drop(name)
            self.settle(call, settings, shape, take, inputs, out)
        return out

    def again(
        self, call: Call, settings: Settings, shape: ShapeStats, take: Take, inputs: dict[str, Tensor]
    ) -> Output | None:  # fmt: skip
        """The result of a graph that is captured once more, because its weights are others; None if there is none."""
        if not (take.graph and settings.graph_budget_mb) or take.live or take.features or take.like is None:
            return None
        if call.taped.no_graph():
            return None
        like = empty_like(take.like, call.key.device)
        return self.first(call, settings, shape, take, inputs, like, lambda out: out)

    def settle(
        self, call: Call, settings: Settings, shape: ShapeStats, take: Take, inputs: dict[str, Tensor],
        out: Output | None,
    ) -> None:  # fmt: skip
        """Notes that the program ran, and captures it where a graph pays."""
        shape.state, shape.reason, shape.note = "tape", "", take.note
        if call.taped.stream is not None:
            self._stats.note(shape, "tape", call.taped.stream.why)
            return
        if take.program.fetches:
            shape.note = say("patches_fetched", need=-(-take.program.fetches // graphs.MIB))
        if not take.graph or out is None:
            return
        if not settings.graph_budget_mb:
            if settings.has_budget:
                self._stats.note(shape, "tape", NO_GRAPHS)
            return
        if why := call.taped.no_graph():
            self._stats.note(shape, "tape", why)
            return
        try:
            self._capture(call, settings, shape, take, inputs, out)
        except CaptureFailed as error:  # the cache remembers why, and for how long
            self._stats.note(shape, "tape", str(error))

    def _capture(
        self, call: Call, settings: Settings, shape: ShapeStats, take: Take, inputs: dict[str, Tensor],
        like: Output, wanted: bool = False,
    ) -> None:  # fmt: skip
        """Raises ``CaptureFailed``."""
        program = take.program
        recording = graphs.Recording(
            lambda static: flat(program.run(list(static.values()))), inputs, call.weights,
            tuple(program.constants()), like, self._stats.name, wanted, program.calls,
            program.is_long,
        )  # fmt: skip
        cache = graphs.cache(call.key.device)
        with preparing(self._stats.name, shape.size), silence():
            shape.bytes = cache.capture(self._name(call, take), recording, settings.graph_budget_bytes)
        shape.state, shape.reason, shape.note = "graph", "", take.called

    def _name(self, call: Call, take: Take) -> graphs.Name:
        return graphs.Name(self._owner, call.key, take.number)
