"""Random changes that another pack makes to a model or to ComfyUI's functions: are the pictures ComfyUI's?

    python -m tools.random_changes [--kind models|forms|tensors|vaes|controls|skips] [--first 0] [--seconds 60]

A pack's function stands at random in the place of a layer's forward, of a class's method or of a function that the
model's code calls, or hooks a layer. What it does follows from a number that lies somewhere at random: in its closure,
in an object, a list, a dict, a tensor, in the layer. That number changes never, in each step, once, between runs, in
each call or in the first one; or the function is made again. Half of the models read a value back, so that their
blocks are recorded one by one. On a GPU or a CPU (``tools.draws``). The number of a draw makes it again.

Of a VAE both ways are called, of a ControlNet the model's latent is compared. A run that skips blocks is compared with
ComfyUI's own operations, which leave the same blocks out of the same steps (``tools.skip_driving``).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tools import draws
from tools.pack_changes import HOLDERS, MORE, ONLY_CLASSES, STEPS, TENSORS, WHERE, Change
from tools.random_patches import SIZES

MODELS = ("QwenImage", "Flux", "ZImage", "WAN21_T2V", "SD15", "Anima")
VAES = ("SD", "Flux", "SVD", "TAESD", "HunyuanVideo", "Wan 2.1, Qwen-Image", "Wan 2.2", "LTX", "TAEHV", "Mage-Flow")
CALLS = 3  # of a VAE, at each size
CONTROLS = ("unet", "flux", "lora")
CONTROL_STEPS = 4
SKIPS = ("QwenImage", "ZImage", "WAN21_T2V", "SD15", "Anima", "AuraFlow")
ORDERS = ("behind", "before", "alone")  # Compile Model and Skip Blocks


class Far(NamedTuple):
    """A draw whose picture is another."""

    number: int
    what: str
    run: int
    error: float


class Drawn(NamedTuple):
    """What a pack changes. pictures: given whether ours takes part, the changes, and what ends them.

    fused: whether operations fuse. skips: whether steps are skipped.
    """

    what: str
    pictures: Callable[[bool, Sequence[Change], ExitStack], Iterator[Tensor]]
    fused: bool
    where: Sequence[str] = MORE
    steps: int = STEPS
    whole: Sequence[str] = ("forward",)
    skips: bool = False
    holders: Sequence[str] = HOLDERS


def models(draw: random.Random) -> Drawn:
    """A model under Compile Model."""
    from bench import models
    from tools.architectures import patchers
    from tools.driving import compiled
    from tools.patching import read_back

    kind, reads_back, fused = draw.choice(MODELS), draw.random() < 0.5, draw.random() < 0.7

    def pictures(fast: bool, changes: Sequence[Change], stack: ExitStack) -> Iterator[Tensor]:
        patcher = patchers.make(kind, device=draws.device())
        if reads_back:
            read_back(patcher.model.diffusion_model)
        _begin(changes, patcher.model.diffusion_model, stack)
        model = compiled(patcher) if fast else patcher
        for run in _runs(changes, kind):
            yield models.sample(model, steps=STEPS, **run)

    return Drawn(_shown(kind, reads_back, fused), pictures, fused, WHERE)


def forms(draw: random.Random) -> Drawn:
    """As ``models``, where the function may be an object too, say, and stand in more places."""
    return models(draw)._replace(where=MORE, whole=("forward", "_forward"))


def tensors(draw: random.Random) -> Drawn:
    """As ``forms``, where the number is a tensor, which may lie in a list, or in a module in one."""
    return forms(draw)._replace(holders=TENSORS)


def vaes(draw: random.Random) -> Drawn:
    """A VAE under Compile VAE, both ways. behind: the pack's node comes after ours."""
    from tools.architectures import autoencoders
    from tools.driving import compiled_vae
    from tools.patching import read_back

    kind, reads_back, fused = draw.choice(VAES), draw.random() < 0.3, draw.random() < 0.7
    behind, entry = draw.random() < 0.5, autoencoders.TABLE[kind]

    def pictures(fast: bool, changes: Sequence[Change], stack: ExitStack) -> Iterator[Tensor]:
        vae = autoencoders.make(kind)
        if reads_back:
            for way in entry.ways:
                read_back(vae.first_stage_model, way, lambda x, *_, **__: x)
        own = vae.first_stage_model
        vae = compiled_vae(vae) if fast else vae
        _begin(changes, vae.first_stage_model if behind else own, stack)
        for run, size in enumerate((0, 1, 0)):
            for call in range(CALLS):
                for change in changes:
                    change.step(call) if call else change.run(run)
                for way in entry.ways:
                    with torch.inference_mode():
                        yield getattr(vae.first_stage_model, way)(*entry.inputs(way, size))

    what = _shown(kind, reads_back, fused, "behind ours" if behind else "before ours")
    return Drawn(what, pictures, fused, steps=CALLS, whole=entry.ways)


def controls(draw: random.Random) -> Drawn:
    """A ControlNet under Compile ControlNet."""
    from bench import models
    from tools.control_driving import flux_control
    from tools.driving import SMALL_FLUX, SMALL_UNET, compiled, compiled_control, steering
    from tools.patching import read_back

    kind, reads_back, fused = draw.choice(CONTROLS), draw.random() < 0.4, draw.random() < 0.7
    model_too, count = draw.random() < 0.5, draw.choice((1, 1, 2))

    def pictures(fast: bool, changes: Sequence[Change], stack: ExitStack) -> Iterator[Tensor]:
        if kind == "flux":
            patcher, control = models.flux(torch.float32, **SMALL_FLUX), flux_control(models)
        else:
            patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
            control = models.control_lora(patcher) if kind == "lora" else models.controlnet_for(patcher)
        network = models.controlnet_for(patcher).control_model if kind == "lora" else control.control_model
        if reads_back and kind != "lora":
            read_back(network, "forward", lambda x, *_, **__: x)
        _begin(changes, network, stack)
        model = compiled(patcher) if fast and model_too else patcher
        steer = steering(*[compiled_control(control) if fast else control] * count)
        for run in _runs(changes, kind):
            yield models.sample(model, steps=CONTROL_STEPS, steer=steer, **run)

    what = _shown(kind, reads_back, fused, f"{count} controls", "the model too" if model_too else "")
    return Drawn(what, pictures, fused, ONLY_CLASSES if kind == "lora" else MORE, CONTROL_STEPS)


def skips(draw: random.Random) -> Drawn:
    """A model under Skip Blocks."""
    from bench import models
    from tools import skip_driving
    from tools.architectures import patchers
    from tools.driving import compiled, skipping
    from tools.patching import read_back

    kind, reads_back, fused = draw.choice(SKIPS), draw.random() < 0.4, draw.random() < 0.7
    order, interval, log = draw.choice(ORDERS), draw.choice((1, 2, 3)), []

    def pictures(fast: bool, changes: Sequence[Change], stack: ExitStack) -> Iterator[Tensor]:
        patcher = patchers.make(kind, device=draws.device(), blocks=skip_driving.BLOCKS)
        if reads_back:
            read_back(patcher.model.diffusion_model)
        _begin(changes, patcher.model.diffusion_model, stack)
        if fast:
            skip_driving.log_calls(stack.enter_context(pytest.MonkeyPatch.context()), log)
            model = compiled(patcher) if order == "behind" else patcher
            every = 1 if skip_driving.has_blocks_of_others(patcher.model.diffusion_model) else interval
            model = skipping(model, interval=every, depth="1")
            model = compiled(model) if order == "before" else model
        else:
            model = skip_driving.following(patcher, log, depth=1)
        for run in _runs(changes, kind):
            yield models.sample(model, steps=skip_driving.STEPS, **run)

    what = _shown(kind, reads_back, fused, f"Skip Blocks {order}", f"every {interval}")
    return Drawn(what, pictures, fused, steps=skip_driving.STEPS, skips=True)


KINDS = {each.__name__: each for each in (models, forms, tensors, vaes, controls, skips)}


def _begin(changes: Sequence[Change], model: Any, stack: ExitStack) -> None:
    for change in changes:
        change.begin(model, stack)


def _runs(changes: Sequence[Change], kind: str) -> Iterator[dict[str, Any]]:
    """Arguments of ``bench.models.sample`` for a run of each size, during which the pack changes what it does."""

    def callback(number: int, *_: Any) -> None:
        for change in changes:
            change.step(number + 1)

    for seed, (width, height) in enumerate(SIZES):
        for change in changes:
            change.run(seed)
        run = {"width": width, "height": height, "frames": 5 if kind.startswith("WAN") else 1, "cfg": 3.0}
        yield run | {"seed": seed, "tokens": 24, "callback": callback}


def _shown(kind: str, reads_back: bool, fused: bool, *more: str) -> str:
    return ", ".join(filter(None, (kind, "reads back" if reads_back else "", "fused" if fused else "", *more)))


def compared(number: int, kind: str = "models") -> Iterator[Far]:
    """What is wrong with one draw. Nothing is said of changes with which ComfyUI itself fails."""
    from tools.oracles import error

    draw = random.Random(number if kind == "models" else f"{kind} {number}")
    drawn = KINDS[kind](draw)
    seeds = [draw.randint(0, 10**6) for _ in range(draw.choice((1, 1, 2)))]

    def pictures(fast: bool) -> list[Tensor]:
        changes = [Change(seed, drawn.where, drawn.steps, drawn.whole, drawn.holders) for seed in seeds]
        with ExitStack() as stack:
            if fast:
                draws.stand_in(stack.enter_context(pytest.MonkeyPatch.context()), f"{kind} {number}", drawn.fused)
            out = list(drawn.pictures(fast, changes, stack))
        shown.append("; ".join(map(str, changes)))
        return out

    shown: list[str] = []
    found, failed = None, None
    try:
        found = pictures(True)
    except Exception as fault:  # noqa: BLE001 - it is raised where ComfyUI's own do not fail
        failed = fault
    try:
        wanted = pictures(False)
    except Exception:  # noqa: BLE001 - such changes are of no use
        return
    if not all(out.isfinite().all() for out in wanted):
        return
    what = f"{drawn.what}; {shown[-1]}"
    close = draws.skipped() if drawn.skips else draws.rounding()
    if failed is not None:
        raise RuntimeError(f"{kind} {number}: {what}") from failed
    for run, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if (far := error(mine, theirs)) > close:
            yield Far(number, what, run, far)


if __name__ == "__main__":
    draws.run(__doc__, compared, tuple(KINDS))
