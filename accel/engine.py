"""Decides for each call: the tape, or ComfyUI's own forward.

A model's forward comes as a ``Call``, and is recorded (``tape_tier``). The engine runs a call in the fastest way that
is safe, counts what it did, and turns every failure of ours into ComfyUI's own forward. Eager is the last resort, and
we never change it.
"""

import logging
import time
import traceback
import weakref
from dataclasses import dataclass

import torch

from . import devices, graphs, times
from .attempt import attempt, named
from .call import Call, Settings
from .errors import AnyShapeError, is_out_of_memory, let_go
from .outputs import Output
from .reasons import say
from .stats import STATS, ModelStats, ShapeStats
from .tape_tier import TapeTier

log = logging.getLogger(__name__)


@dataclass
class Engine:
    """Decides for one model. Holds no reference to the model or to a call's tensors.

    ``passthrough``: exceptions that are messages, not failures (the user's interrupt).
    ``uses_graphs``: False for models that a graph does not make faster (a VAE is bound by the GPU).
    """

    stats: ModelStats
    passthrough: tuple[type[BaseException], ...] = ()
    uses_graphs: bool = True
    _retired: str = ""  # why the tape is not used for this model any more
    _untold: str = ""  # how it failed, for the log

    def __post_init__(self) -> None:
        self._tape = TapeTier(self.stats, id(self), self.passthrough, self.uses_graphs)
        # Not as a ``__del__``, which would find this module empty where Python ends.
        weakref.finalize(self, graphs.abandon, id(self)).atexit = False

    def __call__(self, call: Call, settings: Settings) -> Output:
        """The model's output for ``call``, in the fastest way that is safe."""
        with devices.current(call.key.device):  # another one may be: kernels and graphs start on the current one
            if settings.timed:
                with self.stats.eager_at(call.key.own).measure(call.key.device):
                    return call.eager()
            return self._counted(call, settings)

    def _counted(self, call: Call, settings: Settings) -> Output:
        key = call.key
        shape = self.stats.shape(str(key), call.width, call.height, call.batch, call.frames, key.step, key.own)
        shape.calls += 1
        shape.asked += not times.is_rehearsing()
        STATS.prompts.called(shape)
        try:
            out = self._timed(call, settings, shape)
        except self.passthrough:
            if shape.calls == 1:  # the next call is this size's first
                self.stats.shapes.pop(shape.key, None)
            raise
        if out is None:  # a skipped step without a program: the call runs in full, and counts there
            self._take_back(shape)
        else:
            STATS.totals.called(self.stats.kind, shape.state, key.step)
        return out

    def _take_back(self, shape: ShapeStats) -> None:
        """Nothing was called at this size after all."""
        shape.calls -= 1
        shape.asked -= not times.is_rehearsing()
        STATS.prompts.took_back(shape)
        if not shape.calls:
            self.stats.shapes.pop(shape.key, None)

    def _timed(self, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        begun = call.begun or times.begin(call.key.device)
        if shape.calls > 1:
            with shape.times.measure(begun) as timed:
                out = self._run(call, settings, shape)
                timed.fast = shape.state != "eager"
            return out
        out = self._run(call, settings, shape)
        devices.wait(call.key.device)  # once per shape: the first call's true cost
        shape.first_call_seconds = time.perf_counter() - begun.clock
        STATS.totals.first_call(self.stats.kind, shape.first_call_seconds)
        shape.times.first(shape.first_call_seconds, shape.state != "eager")
        return out

    def _run(self, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        why = call.obstacle
        if call.taped is not None and not why:
            why = self._retired
            if not why:
                out, why = attempt(lambda: self._tape.run(call, settings, shape), self._step_down, self.passthrough)
                if not why:
                    return out
        shape.state, shape.reason = "eager", why
        try:
            out = self._eager(call)
        except BaseException as error:
            theirs, is_failure = bool(self._untold), not isinstance(error, self.passthrough)
            if theirs:
                self._retired = self._untold = ""  # the call itself is wrong (another node's patch, its input), not we
            if theirs and is_failure:
                shape.reason = why = say("fails_anyway", error=named(error))
            if is_failure:
                self.stats.note(shape, "eager", why)
            raise
        if out is None and self._untold:  # the forward in full, which comes next, says whether the call is wrong or we
            return None
        self.stats.note(shape, "eager", why)
        self._tell(call)
        return out

    def _eager(self, call: Call) -> Output:
        """ComfyUI's own forward; once more without any graph, if memory was too short for it beside our graphs."""

        def judge(error: Exception) -> str | None:
            if not (is_out_of_memory(error) and graphs.cache(call.key.device).used_bytes):
                return None
            let_go(error)
            graphs.clear()
            torch.cuda.empty_cache()
            return say("no_memory_left")

        out, why = attempt(call.eager, judge, self.passthrough)
        return call.eager() if why else out

    def _step_down(self, error: Exception) -> str:
        """Retires the tape, unless only memory was short, and returns the reason."""
        self.drop_graphs()  # what was captured is no better than what it computes
        if is_out_of_memory(error):
            let_go(error)
            torch.cuda.empty_cache()
            return say("no_memory_left")
        ours = isinstance(error, AnyShapeError)  # whose text is made for the user
        self._retired = str(error) if ours else say("tape_failed", error=named(error))
        # as text: a log handler that keeps the error would keep its frames, and with them the model
        self._untold = "".join(traceback.format_exception(error))
        return self._retired

    def _tell(self, call: Call) -> None:
        """Logs what failed in this call, now that eager has given its result."""
        if self._untold:
            log.warning("AnyShape: %s (%s): %s\n%s", self.stats.name, call.key, self._retired, self._untold)
            self._untold = ""

    def drop_graphs(self) -> None:
        """Frees the memory of this model's graphs. The next call of a shape captures it again."""
        graphs.drop_owner(id(self))
        self._tape.release()

    def loosen(self) -> None:
        """Holds the weights no longer than their model does. Recordings and graphs stay."""
        self._tape.loosen()

    def release(self) -> None:
        """Releases the weights and keeps the recordings. For a model without graphs, after each of its calls."""
        self._tape.release()
