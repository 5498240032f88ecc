"""One ControlNet's forwards through its engine, and what is known of it while it is sampled.

Every network is recorded, as a model is. What is known of it begins with its control's ``pre_run`` and ends with the
sampling run, however that ends.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.controlnet
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from ..attempt import Fallback, attempt, failed
from ..call import Settings
from ..engine import Engine
from ..key import ShapeKey
from ..tape.values import replaced
from ..weights import ChannelsLastWeights
from . import known_code, sampling_state, taping
from .attach import engine_for, settings_of
from .compat import outside_memory_plan
from .surroundings import INTERRUPTS, through

KIND = "controlnet"  # in the stats
NAME = "ControlNet"  # there, too
MAX_FORMS = 256  # more than there are recordings
RUN_KEY = "anyshape.control"  # of the callback that ends a run


class Sampling:
    """One network's engine, and what is known of the network until the last sampling run that it takes part in ends.

    built_again: ComfyUI makes another network for each run, of the same form and partly of the model's own memory. So
    no weight is laid out, and nothing of it is held beyond a run.
    """

    def __init__(self, engine: Engine, fingerprints: known_code.Fingerprints, built_again: bool = False) -> None:
        self.engine, self.settings = engine, Settings()
        self.prompts = 1  # that the rows of a call belong to
        # of its results: their containers, with places for tensors. Found again like recordings
        self.forms: OrderedDict[ShapeKey, Any] = OrderedDict()
        self._fingerprints, self._built_again = fingerprints, built_again
        self._users: weakref.WeakSet[comfy.controlnet.ControlNet] = weakref.WeakSet()
        self._run: sampling_state.SamplingState | None = None
        self._lock = threading.RLock()

    def begin(self, control: comfy.controlnet.ControlNet, patcher: ModelPatcher | None) -> bool:
        """Begins a run of ``patcher`` for ``control``; False if it has begun."""
        with self._lock:
            if control in self._users:
                return False
            self._users.add(control)
            of_model = settings_of(patcher)
            self.settings = Settings(graph_budget_mb=of_model.graph_budget_mb, timed=of_model.timed)
        if patcher is not None:  # a run that breaks off is cleaned up on its model's side alone
            patcher.add_callback_with_key(CallbacksMP.ON_CLEANUP, RUN_KEY, _Ending(self, control))
        return True

    def end(self, control: comfy.controlnet.ControlNet) -> None:
        """Ends the run of ``control``. After the last one, the weights are as ComfyUI had them."""
        with self._lock:
            if control not in self._users:  # both ComfyUI and our callback say so
                return
            self._users.remove(control)
            if self._users:
                return
            run, self._run, self.prompts, self.settings = self._run, None, 1, Settings()
            if run is not None:
                attempt(run.close, failed(self.engine.stats.name, "the run's end"), INTERRUPTS)
            if self._built_again:
                attempt(self.engine.drop_graphs, failed(self.engine.stats.name, "the run's end"), INTERRUPTS)

    @contextmanager
    def run(self, model: nn.Module) -> Iterator[sampling_state.SamplingState]:
        """The run's state, for one forward of ``model``; outside a sampling run one of its own."""
        with self._lock:
            run = self._run
            if run is None or run.model is not model:
                layout = ChannelsLastWeights() if self._users and not self._built_again else None
                run = sampling_state.SamplingState(model, self._fingerprints, layout)
                self._run = run if self._users else None
        try:
            yield run
        finally:
            run.let_go()
            if run is not self._run:  # no sampling run will end it
                run.close()

    def form(self, key: ShapeKey, new: Any | None) -> Any:
        """The containers of a call's result; ``new`` ones, if the network itself has just made them."""
        known = self.forms
        if new is not None:
            known[key] = new
        known.move_to_end(key)
        while len(known) > MAX_FORMS:
            known.popitem(last=False)
        return known[key]


class _Ending:
    """The callback that ends a run with its model's, and takes itself off the model."""

    def __init__(self, sampling: Sampling, control: comfy.controlnet.ControlNet) -> None:
        self._sampling, self._control = sampling, control

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ending":
        """It lies in ``model_options`` while the model is sampled, which a pack may copy to the bottom."""
        return self

    def __call__(self, patcher: ModelPatcher, *_: Any) -> None:
        patcher.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, RUN_KEY)
        if not patcher.callbacks.get(CallbacksMP.ON_CLEANUP, True):  # as it was: ComfyUI makes the entry when needed
            del patcher.callbacks[CallbacksMP.ON_CLEANUP]
        self._sampling.end(self._control)


_SAMPLING: "weakref.WeakKeyDictionary[nn.Module, Sampling]" = weakref.WeakKeyDictionary()


def sampling_of(model: nn.Module) -> Sampling:
    """That of a network which ComfyUI keeps: one, however many nodes it has."""
    found = _SAMPLING.get(model)
    if found is None:
        found = Sampling(engine_for(model, NAME, KIND), known_code.fingerprints(model))
    return _SAMPLING.setdefault(model, found)


def shadow_of(model: nn.Module, verify: bool, sampling: Sampling | None = None) -> nn.Module:
    """A shallow copy of the network, whose forward goes through the engine. sampling: of one that is built again."""
    shadow = copy.copy(model)
    shadow._forward_hooks, shadow._forward_pre_hooks = OrderedDict(), OrderedDict()  # or the model's own run twice
    shadow.forward = Forward(model, verify, sampling)
    return shadow


class Forward:
    """A network's forward through its engine."""

    def __init__(self, model: nn.Module, verify: bool, sampling: Sampling | None = None) -> None:
        self.network, self._verify, self._given = model, verify, sampling
        self.sampling = sampling or sampling_of(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        """A pack that copies prompts to the bottom gets a network of its own, as it does without us."""
        return type(self)(copy.deepcopy(self.network, memo), self._verify, self._given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's result; ComfyUI's own if anything of ours fails."""
        where = self.sampling.engine.stats.name
        return through(self._through_engine, self.network, args, kwargs, where, "a forward")

    def _through_engine(self, fallback: Fallback, args: tuple, kwargs: dict[str, Any]) -> Any:
        sampling, model, forms = self.sampling, self.network, []
        settings = replace(sampling.settings, verify=self._verify)

        def flat(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return taken_apart(model(*args, **kwargs))

        def taken_apart(out: Any) -> tuple[Tensor, ...]:
            tensors: dict[int, Tensor] = {}  # a residual that serves several blocks is one tensor
            places = dict[int, int]()

            def place(tensor: Tensor) -> _Place:
                tensors[id(tensor)] = tensor
                return _Place(places.setdefault(id(tensor), len(places)))

            forms.append(replaced(out, Tensor, place))
            return tuple(tensors.values())

        given = taping.take(model.forward, args, kwargs)
        fallback.run = lambda: given.call(model)
        with sampling.run(model) as run, outside_memory_plan():
            call = taping.call_of(
                model, flat, given, run, lambda: taken_apart(fallback()), taping.pixels, may_fetch=True
            )
            if not call.obstacle:
                call = replace(call, batch=max(1, len(given.first) // sampling.prompts))
            out = sampling.engine(call, settings)
        form = sampling.form(call.key, forms[-1] if forms else None)
        return replaced(form, _Place, lambda place: out[place.number])


class _Place:
    """Where a tensor lies in the flat result of a network."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
