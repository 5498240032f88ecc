"""Turns any diffusion model's call into one that may be recorded: tensors by name, plain arguments, options.

Nothing here knows a model. ComfyUI's own forward is called with the same arguments; only containers are copied, because
some forwards empty the lists that they are given (ControlNet residuals).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..block_call import OPTIONS
from ..call import Call
from ..foreign import foreign_method
from ..key import ShapeKey, shape_key
from ..reasons import say
from ..skip.features import RUN_KEY
from ..take import Skipping, Taped, named_features
from ..tape.options import PLAIN
from ..tape.patch_call import OVERRIDE
from ..tape.state import Glance
from ..tape.values import Weight
from ..times import Begun, begin
from . import dynamic, recorded_attention
from .sampling_state import SamplingState
from .streaming import StreamedWeights
from .surroundings import autocast

SAMPLED = "cond_or_uncond"  # among the options, from the sampler
PATCHED, REPLACED = PATCH_KEYS = ("patches", "patches_replace")
PLACES = frozenset(("block", "block_index", "transformer_index"))
OWN = ("comfy.", "torch.")  # where classes are from that nobody else has written
SETTINGS = (*PLAIN, torch.dtype, torch.device, Enum)  # arguments that never change, and say by name what they are
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# (width, height, frames) in image pixels, of a latent of this shape
SizeOf = Callable[[tuple[int, ...]], tuple[int, int, int]]


@dataclass
class Given:
    """One call of a diffusion model's forward, taken apart. Holds the caller's tensors."""

    args: tuple
    kwargs: dict[str, Any]
    options: Mapping[Any, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: list[tuple[str, Any]] = field(default_factory=list)
    unknown: str = ""  # an argument that is neither
    begun: Begun | None = None  # the call, where it has a tensor

    @property
    def first(self) -> Tensor | None:
        """Of the tensors: the latent."""
        return next(iter(self.tensors.values()), None)

    @property
    def theirs(self) -> Mapping[Any, Any]:
        """The options without our own, which is another one in each run; see ``recorded_attention.settled`` too."""
        options = recorded_attention.settled(self.options)
        if RUN_KEY not in options:
            return options
        return {key: value for key, value in options.items() if key != RUN_KEY}

    def call(self, original: Callable[..., Any], options: Mapping[Any, Any] | None = None) -> Any:
        """``original`` with these arguments, or with other options."""
        swap = self.theirs if options is None else options
        return original(
            *(_copied(item, self.options, swap) for item in self.args),
            **{name: _copied(item, self.options, swap) for name, item in self.kwargs.items()},
        )


def take(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Given:
    """The arguments of a call of ``original``, by name where it has names."""
    names = _names(original)
    named = [(names[index] if index < len(names) else str(index), item) for index, item in enumerate(args)]
    named += kwargs.items()
    options = next((item for name, item in named if _are_options(name, item)), {})
    given = Given(args, kwargs, options)
    for name, item in named:
        if item is not options or not isinstance(item, dict):
            _walk(given, name, item)
    if given.first is not None:
        given.begun = begin(given.first.device)
    return given


def _are_options(name: str, item: Any) -> bool:
    """A forward that somebody replaced may not name its arguments, but the sampler's notes are in its options."""
    return isinstance(item, dict) and (name == OPTIONS or SAMPLED in item)


def _names(original: Callable[..., Any]) -> Sequence[str]:
    """Of the arguments that may be given by place."""
    function = original.__func__ if isinstance(original, MethodType) else original
    if type(function) is FunctionType and not vars(function):  # no ``__wrapped__`` or ``__signature__``, as nearly all
        code, own = function.__code__, isinstance(original, MethodType)
        if code.co_argcount >= own:
            return code.co_varnames[own : code.co_argcount]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(original).parameters.items() if parameter.kind in kinds]


def _walk(given: Given, name: str, item: Any) -> None:
    if isinstance(item, Tensor):
        given.tensors[name] = item
    elif isinstance(item, SETTINGS):
        given.plain.append((name, item))
    elif isinstance(item, (list, tuple)):
        given.plain.append((name, len(item)))
        for index, each in enumerate(item):
            _walk(given, f"{name}.{index}", each)
    elif isinstance(item, dict):
        for key, each in item.items():
            _walk(given, f"{name}.{key}", each)
        given.plain.append((name, tuple(map(str, item))))
    else:
        given.unknown = given.unknown or f"{name}, a {type(item).__name__}"


def _copied(item: Any, options: Mapping[Any, Any], swap: Mapping[Any, Any]) -> Any:
    """``item`` with containers of its own; tensors and everything else are the caller's."""
    if item is options and isinstance(item, dict):
        return swap
    if type(item) in (list, tuple):
        return type(item)(_copied(each, options, swap) for each in item)
    if type(item) is dict:
        return {key: _copied(each, options, swap) for key, each in item.items()}
    return item


def pixels(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(width, height, frames) of a latent, where the model does not say: those of the latent, times 8."""
    if len(shape) < 4:
        return shape[-1], 1, 1
    return shape[-1] * 8, shape[-2] * 8, shape[2] if len(shape) > 4 else 1


def obstacle(given: Given) -> str:
    """Says why this call must run in ComfyUI's own forward; "" if it, or its blocks, may be recorded."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return say("training", what="model")
    first = given.first
    if first is None:
        return say("no_tensor")
    if why := autocast(first.device):
        return why
    if first.dtype not in DTYPES:
        return say("dtype", dtype=first.dtype)
    if odd := [name for name, tensor in given.tensors.items() if tensor.device != first.device]:
        return say("other_device", name=odd[0])
    return ""


def call_of(
    model: nn.Module, original: Callable[..., Any], given: Given, run: SamplingState | None,
    fallback: Callable[[], Any], size_of: SizeOf, lean: bool = False, why: str = "", may_fetch: bool = False,
) -> Call:  # fmt: skip
    """Returns the engine's call. size_of: the latent's, from its shape. lean: see ``Tape.lean``.

    why: only ComfyUI's own forward runs, if that is known. may_fetch: see ``Taped.stream``.
    """
    why, taped, structure, stream = why or obstacle(given), None, 0, None
    x, key = given.first, key_of(given)
    if run is not None and not why:
        why, structure, stream = _looked_at(model, x, key, run, may_fetch)
    changes, left = run.in_blocks if run is not None and not why else ("", frozenset())
    if changes and calls_patches(given.options):  # nobody knows what a patch reads of the model
        why = changes
    if run is not None and not why:
        options = given.theirs
        if run.mapped is not None:  # the weights are there
            options = without_prefetch(options)

        unknown = say("strange_argument", name=given.unknown) if given.unknown else changes

        def forward(options: Mapping[Any, Any]) -> Any:
            run.let_go()
            return given.call(original, options)

        taped = Taped(
            model, forward, options, structure, recorded_attention.prepare, run.changed, run.lay_out, lean,
            partial(_places, options, run.calls_within), run.altered, calls_patches(given.options),
            run.foreign, named=partial(_named, run, options), run=run.number, once=_makes_one_step(given.options),
            looks=run.looks, unknown=unknown, left=left,
            content=partial(run.read.content, run.looks, model, run.within_blocks) if run.foreign else int,
            hold=partial(run.hold, key), let_go=run.let_go,
            no_graph=partial(run.no_graph, x.device), rest=run.rest, fetches=partial(run.fetches, x.device),
        )  # fmt: skip
        if stream is not None:
            taped = replace(taped, stream=stream, hold=str, lay_out=_as_they_lie, no_graph=lambda: stream.why)
    rows = len(x) if x is not None and x.ndim else 1
    width, height, frames = size_of(tuple(x.shape)) if x is not None else (0, 0, 1)

    def eager() -> Any:
        if run is not None:
            run.let_go()
        return fallback()

    return Call(
        key=key,
        inputs=given.tensors,
        eager=eager,
        weights=run.weights() if run is not None and not why and stream is None else 0,
        width=width,
        height=height,
        frames=frames,
        batch=max(1, rows // max(1, len(given.options.get("cond_or_uncond", (0,))))),
        obstacle=why,
        taped=taped,
        begun=given.begun,
    )


def _looked_at(
    model: nn.Module, x: Tensor, key: ShapeKey, run: SamplingState, may_fetch: bool
) -> tuple[str, int, StreamedWeights | None]:  # fmt: skip
    """(Why only ComfyUI's own forward runs, or ""; the model's structure; its weights, where steps fetch them)."""
    streams, may_fetch = run.streams(x.device), may_fetch and run.may_fetch
    if streams and not may_fetch:
        return streams, 0, None
    structure, why = run.structure(model, key), run.obstacle(key, x.dtype, streams)
    stream = run.stream(x.device, x.dtype, streams) if why and may_fetch else None
    return why if stream is None else "", structure, stream


def _as_they_lie(wanted: frozenset[Weight], known: int) -> int:
    """No weight is laid out, because it is fetched again at the next step."""
    return known


def _named(run: SamplingState, options: Mapping[Any, Any], patches: Glance) -> frozenset[str] | None:
    """What all code names that may run in this call; None if that is not known. patches: those on the tape."""
    is_known = not (patches.hides or recorded_attention.is_anothers(options.get(OVERRIDE)))
    return run.named(patches.functions) if is_known else None


def _makes_one_step(options: Mapping[Any, Any]) -> bool:
    sigmas = options.get("sample_sigmas")
    return isinstance(sigmas, Tensor) and sigmas.numel() == 2


def key_of(given: Given) -> ShapeKey:
    """The key of a call with these arguments."""
    return shape_key(given.tensors, _structure(given))


def in_full(
    call: Call, depth: int | None, watched: Callable[[], Any] | None, looked_at: Callable[[], Call] | None = None
) -> Call:
    """``call`` at a full step of a run that skips blocks: its result is a ``FullStep``. watched: see ``Skipping``.

    looked_at: ``call``, with another look at the model.
    """
    skipping = Skipping(depth, lambda features: skipped(call, depth, features).key, watched)
    taped = replace(call.taped, skipping=skipping)

    def afresh() -> Call | None:
        again = looked_at() if looked_at is not None else None
        return in_full(again, depth, watched) if again is not None and again.taped is not None else None

    return replace(call, key=_step(call, "full", depth, call.inputs), taped=taped, afresh=afresh)


def skipped(call: Call, depth: int | None, features: Sequence[Tensor]) -> Call:
    """``call`` at a skipped step, given its features. Its result is None where there is no program of it."""
    inputs = call.inputs | named_features(features)
    taped = replace(call.taped, leaves_out=True)
    return replace(call, key=_step(call, "skipped", depth, inputs), inputs=inputs, taped=taped, eager=lambda: None)


def apart(
    call: Call, depth: int | None, why: str, eager: Callable[[], Any], features: Sequence[Tensor] | None = None
) -> Call:
    """``call`` with ``eager`` in the place of the model's own forward, which is on no tape: its blocks alone may be.

    At a full step, or at a skipped one with these ``features``.
    """
    inputs = call.inputs | named_features(features or ())
    key = _step(call, "full" if features is None else "skipped", depth, inputs)
    taped = None if call.taped is None else replace(call.taped, unknown=why)
    return replace(call, key=key, taped=taped, eager=eager)


def without_prefetch(options: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The options of a forward for which no block's weights are fetched ahead."""
    return {**options, dynamic.PREFETCH: False} if options.get(dynamic.PREFETCH) else options


def calls_patches(options: Mapping[Any, Any]) -> bool:
    """Whether patches of other packs are called; these may count their calls."""
    return any(options.get(key) for key in PATCH_KEYS) or recorded_attention.is_anothers(options.get(OVERRIDE))


def _step(call: Call, step: str, depth: int | None, inputs: dict[str, Tensor]) -> ShapeKey:
    key = shape_key(inputs, dict(call.key.structure) | {"step": step, "depth": "auto" if depth is None else depth})
    return replace(key, step=step, instead_of=call.key)


def _structure(given: Given) -> dict[str, str]:
    """What decides a recording besides shapes and dtypes: plain arguments, layouts, one tensor given twice."""
    found = {name: repr(value) if isinstance(value, str) else str(value) for name, value in given.plain}
    if given.unknown:  # such a call is on no tape, and one without that argument may be
        found["unknown"] = given.unknown
    first: dict[int, str] = {}
    for name, tensor in given.tensors.items():
        if not tensor.is_contiguous():
            found[f"{name} strides"] = "x".join(map(str, tensor.stride()))
        if (same := first.setdefault(id(tensor), name)) != name:
            found[f"{name} is"] = same
    return found


def _places(options: Mapping[Any, Any], others: bool, block: nn.Module, uncalled: bool = False) -> frozenset[str]:
    """The options in which ComfyUI's own blocks note for patches which of them runs, where there is no patch.

    others: blocks may call functions of other packs, which may read them (RadialAttn). uncalled: it is known that the
    block calls none of the patches that are for all blocks.
    """
    chosen = options.get(OVERRIDE)
    if (
        others
        or recorded_attention.is_anothers(chosen)
        or options.get(REPLACED)
        or (options.get(PATCHED) and not uncalled)
    ):
        return frozenset()
    kinds = {type(part) for part in block.modules()}
    own = all(kind.__module__.startswith(OWN) and not foreign_method(kind) for kind in kinds)
    return PLACES if own and (chosen is not None or recorded_attention.is_open()) else frozenset()
