"""Random workflows of ComfyUI's own nodes, one after the other: are the pictures ComfyUI's, to the bit?

    python -m tools.random_workflows [--first 0] [--seconds 60]

A model stays loaded while a person changes the workflow from run to run: nodes that patch the model and their order
around Compile Model, networks that such nodes bring, LoRAs, hooks on prompts, ControlNets, prompts for areas, for masks
and for a part of the steps, prompts of other lengths, sizes, batches, samplers. Some runs are those of before, with the
nodes' outputs from ComfyUI's cache; before some, everything is unloaded. Some draws have Skip Blocks as well, with and
without Compile Model. On a GPU or a CPU (``tools.draws``). The number of a draw makes it again.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tools import draws
from tools.skip_driving import BLOCKS

RUNS = 6
SIZES = ((128, 128), (192, 128), (128, 192), (136, 120), (256, 64))
SAMPLERS = (
    "euler", "euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_sde", "uni_pc", "lcm", "res_multistep", "er_sde",
    "dpm_fast", "ddim", "sa_solver",
)  # fmt: skip
PROMPTS = ("one", "one", "longer", "area", "masked", "late", "three", "averaged", "joined", "zeroed")
OURS, SKIP = "Compile Model", "Skip Blocks"
# Of any transformer, besides guidance. Of Flux and of UNets everything that ``tools.comfy_nodes`` has.
OF_TRANSFORMERS = (
    "ModelSamplingSD3", "ModelSamplingAuraFlow", "ScaleROPE", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple",
)  # fmt: skip
BRINGING = (  # of ``model_patches``
    "QwenImageDiffsynthControlnet", "ZImageFunControlnet", "ZImageFunControlnet 2", "WanUni3CControlnetApply",
    "AnimaLLLiteApply", "AnimaLLLiteApply, a range", "USOStyleReference",
)  # fmt: skip
MODELS = (
    "unet", "unet", "unet", "Flux", "Flux", "ZImage", "QwenImage", "WAN21_T2V", "SD3", "Anima", "Chroma", "Lumina2",
)  # fmt: skip
LAYERS = 6  # of a LoRA
# A GPU's picture may be as many times as far from ComfyUI's as that moves by itself, if its noise is scaled by this.
MOVES, NUDGE = 4, 1 + 1e-7


class Far(NamedTuple):
    """A run whose picture is another."""

    number: int
    kind: str
    run: int
    error: float
    workflows: str


@dataclass(frozen=True)
class Workflow:
    """What one run is made of. nodes: of the model, from the first to the last one.

    Where ComfyUI is to run by itself, ``OURS`` among them does nothing; ``SKIP`` does.

    loras: (seed, strength) before all nodes. hook: the strength of a LoRA on the positive prompt, and whether it
    changes in mid-run. control: (strength, start, end, whether it is compiled). fresh: all nodes run again.
    """

    nodes: tuple[str, ...]
    loras: tuple[tuple[int, float], ...] = ()
    prompt: str = "one"
    hook: tuple[float, bool] | None = None
    control: tuple[float, float, float, bool] | None = None
    size: tuple[int, int] = SIZES[0]
    batch: int = 1
    tokens: int = 24
    sampler: str = "euler"
    steps: int = 3
    cfg: float = 3.0
    mode: str = "auto"
    masked: bool = False
    fresh: bool = False
    unload: bool = False

    def __str__(self) -> str:
        usual = Workflow(())
        other = [f"{name} {value}" for name, value in vars(self).items() if value != getattr(usual, name)]
        return ", ".join(other)


def nodes_of(kind: str) -> dict[str, Callable[[Any], Any]]:
    """ComfyUI's nodes that patch such a model, by name."""
    from tools import architectures, model_patches
    from tools.comfy_nodes import GUIDANCE, NODES

    there = {} if architectures.is_older() else model_patches.NODES
    bringing = {name: there[name][1] for name in BRINGING if name in there and there[name][0] == kind}
    if kind in ("unet", "Flux"):
        return {name: apply for name, (apply, _) in NODES[kind.lower()].items()} | bringing
    return GUIDANCE | {name: NODES["flux"][name][0] for name in OF_TRANSFORMERS} | bringing


def workflows(draw: random.Random, kind: str, skips: bool = False) -> Iterator[Workflow]:
    """Each from the one before, by one to three changes, or an earlier one again. skips: with ``SKIP``, mostly."""
    known = list(nodes_of(kind))
    names = known + [name for name in known if name in BRINGING] * 3  # which are few
    past = [Workflow((OURS, SKIP), steps=9) if skips else Workflow((OURS,))]

    def chain() -> tuple[str, ...]:
        chosen = draw.sample(names, draw.choice((0, 1, 1, 2, 3)))
        for each in (OURS, *([SKIP] if skips and draw.random() < 0.8 else [])):
            chosen.insert(draw.randint(0, len(chosen)), each)
        return tuple(chosen)

    changes: dict[str, Callable[[], Any]] = {
        "nodes": chain,
        "loras": lambda: tuple((draw.randint(0, 2), draw.choice((0.5, 1.0))) for _ in range(draw.choice((0, 1, 2)))),
        "prompt": lambda: draw.choice(PROMPTS),
        "hook": lambda: draw.choice((None, (0.7, False), (0.7, True))),
        "control": lambda: (
            draw.choice((None, (0.8, *draw.choice(((0.0, 1.0), (0.0, 0.5), (0.4, 1.0))), draw.random() < 0.7)))
            if kind == "unet" else None
        ),
        "size": lambda: draw.choice(SIZES),
        "batch": lambda: draw.choice((1, 1, 2, 3)),
        "tokens": lambda: draw.choice((24, 77, 154) if kind == "unet" else (24, 24, 40, 7)),
        "sampler": lambda: draw.choice(SAMPLERS),
        "steps": lambda: draw.choice((9, 12) if skips else (2, 3, 4, 5)),
        "cfg": lambda: draw.choice((1.0, 3.0, 3.0)),
        # Skipped steps of another mode have no program yet: the first of a part of a patch's range is in full then.
        "mode": lambda: "auto" if skips else draw.choice(("auto", "auto", "exact", "off")),
        "masked": lambda: draw.random() < 0.3,
    }  # fmt: skip
    for _ in range(RUNS):
        if len(past) > 2 and draw.random() < 0.3:
            now = draw.choice(past[:-1])
        else:
            changed = draw.sample(list(changes), draw.choice((1, 1, 2, 3)))
            if len(past) == 1 or draw.random() < 0.3:
                changed.append("nodes")
            now = replace(past[-1], **{name: changes[name]() for name in changed})
        past.append(replace(now, fresh=draw.random() < 0.3, unload=draw.random() < 0.15))
        yield past[-1]


class World:
    """A model, and the nodes' outputs that ComfyUI would keep. fast: with Compile Model and Compile ControlNet."""

    def __init__(self, kind: str, fast: bool, dtype: torch.dtype, blocks: int) -> None:
        from bench import models
        from tools import driving
        from tools.architectures import patchers

        self._kind, self._fast, self._models = kind, fast, models
        self._made: dict[Any, Any] = {}
        self.model = (
            models.unet("sd15", dtype, **driving.DEEP_UNET) if kind == "unet"
            else patchers.make(kind, dtype, draws.device(), blocks=blocks)
        )  # fmt: skip
        self._control = models.controlnet_for(self.model) if kind == "unet" else None

    def picture(self, flow: Workflow, seed: int, scale: float = 1.0) -> Tensor:
        """The latent of one run. scale: of its noise."""
        import comfy.model_management as memory
        import comfy.sample

        if flow.unload:
            memory.unload_all_models()
        if flow.fresh:
            self._made.clear()
        model, models = self._patched(flow), self._models
        frames = 5 if self._kind.startswith("WAN") else 1
        latent = models.empty_latent(model, *flow.size, flow.batch, frames)
        mask = (torch.arange(latent.shape[-1]) % 4 < 2).float().expand(1, *latent.shape[-2:]) if flow.masked else None
        noise, positive = comfy.sample.prepare_noise(latent, seed) * scale, self._positive(flow, seed)
        negative = models.conditioning(model, 24, seed + 1)
        positive, negative = self._controlled(flow, positive, negative)
        torch.manual_seed(seed)
        with torch.inference_mode():
            return comfy.sample.sample(
                model, noise, flow.steps, flow.cfg, flow.sampler, models.traits(model).scheduler, positive, negative,
                latent, noise_mask=mask, disable_pbar=True, seed=seed,
            )  # fmt: skip

    def _patched(self, flow: Workflow) -> Any:
        from tools.driving import compiled, skipping

        known = nodes_of(self._kind)
        model, done = self.model, ()
        for step in (*flow.loras, *flow.nodes):
            done += ((step, flow.mode) if step == OURS else step,)
            if done in self._made:
                model = self._made[done]
                continue
            if step == OURS:
                model = compiled(model, mode=flow.mode) if self._fast else model
            elif step == SKIP:
                model = skipping(model, interval=3, depth="1")
            elif isinstance(step, str):
                model = known[step](model)
            else:
                model = self._with_lora(model, *step)
            self._made[done] = model
        return model

    def _lora(self, seed: int) -> dict[str, Tensor]:
        from tools.loras import of_layers

        weights = self.model.model.diffusion_model.named_parameters()
        layers = [name.removesuffix(".weight") for name, each in weights if name.endswith(".weight") and each.ndim == 2]
        return of_layers(self.model, *random.Random(seed).sample(layers, LAYERS))

    def _with_lora(self, model: Any, seed: int, strength: float) -> Any:
        from tools.loras import with_lora

        return with_lora(model, self._lora(seed), strength)

    def _positive(self, flow: Workflow, seed: int) -> list:
        import nodes
        from tools.loras import hooked

        first = self._models.conditioning(self.model, flow.tokens, seed + 2)
        second = self._models.conditioning(self.model, flow.tokens, seed + 3)
        longer = self._models.conditioning(self.model, 2 * flow.tokens, seed + 4)
        combined = nodes.ConditioningCombine().combine
        if flow.prompt == "longer":
            first = longer
        elif flow.prompt == "area":
            first = combined(first, *nodes.ConditioningSetArea().append(second, 64, 64, 32, 0, 0.8))[0]
        elif flow.prompt == "masked":
            mask = (torch.arange(flow.size[0] // 8) < 6).float().expand(1, flow.size[1] // 8, -1)
            first = combined(first, *nodes.ConditioningSetMask().append(longer, mask, "default", 0.7))[0]
        elif flow.prompt == "late":
            first = combined(first, *nodes.ConditioningSetTimestepRange().set_range(longer, 0.4, 1.0))[0]
        elif flow.prompt == "three":
            first = combined(combined(first, second)[0], longer)[0]
        elif flow.prompt == "averaged":
            first = nodes.ConditioningAverage().addWeighted(first, second, 0.4)[0]
        elif flow.prompt == "joined":
            first = nodes.ConditioningConcat().concat(first, longer)[0]
        elif flow.prompt == "zeroed":
            first = nodes.ConditioningZeroOut().zero_out(first)[0]
        return first if flow.hook is None else hooked(first, self._lora(7), *flow.hook)

    def _controlled(self, flow: Workflow, positive: list, negative: list) -> tuple[list, list]:
        import nodes
        from tools.driving import compiled_control

        if flow.control is None:
            return positive, negative
        strength, start, end, is_compiled = flow.control
        control = self._control
        if self._fast and is_compiled:
            if OURS not in self._made:
                self._made[OURS] = compiled_control(control)
            control = self._made[OURS]
        hint = torch.rand(1, flow.size[1], flow.size[0], 3, generator=torch.Generator().manual_seed(5))
        return nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, control, hint, strength, start, end)


def _by_comfyui(world: World, flows: list[tuple[int, Workflow]]) -> list[tuple[int, Workflow, Tensor]]:
    """(run, workflow, its picture) of those that ComfyUI can do."""
    usable = []
    for run, flow in flows:
        try:
            wanted = world.picture(flow, run)
        except Exception:  # noqa: BLE001 - such a workflow is of no use
            continue
        if wanted.isfinite().all():
            usable.append((run, flow, wanted))
    return usable


def compared(number: int, made: Callable[..., World] = World, hooks: bool = True) -> Iterator[Far]:
    """What is wrong with one draw. Nothing is said of runs with which ComfyUI itself fails.

    made: given what ``World`` is, which is to draw the same for both. hooks: whether prompts may have some.
    """
    from tools.oracles import error

    draw = random.Random(f"workflows {number}")
    kind, skips, fused = draw.choice(MODELS), draw.random() < 0.3, draw.random() < 0.7
    dtype = torch.float32 if skips else draw.choice((torch.float32, torch.float32, torch.bfloat16))
    if draws.device() == "cuda":
        dtype = torch.float32  # in 16 bits, rounding carries such models too far to tell
    flows = [flow for flow in workflows(draw, kind, skips) if hooks or flow.hook is None]
    what = {"dtype": dtype, "blocks": BLOCKS if skips else 0}
    usable = _by_comfyui(made(kind, fast=False, **what), list(enumerate(flows)))
    if len(usable) < len(flows):  # a run that failed may have prepared something for a later one
        usable = _by_comfyui(made(kind, fast=False, **what), [(run, flow) for run, flow, _ in usable])
    with pytest.MonkeyPatch.context() as patch:
        draws.stand_in(patch, f"workflows {number}", fused)
        ours, past = made(kind, fast=True, **what), []
        for run, flow, wanted in usable:
            past.append(f"[{flow}]")
            try:
                far = error(ours.picture(flow, run), wanted)
            except Exception as fault:
                raise RuntimeError(f"workflows {number}, {kind}: {' '.join(past)}") from fault
            if far > (draws.skipped() if SKIP in flow.nodes else draws.rounding()):
                if draws.device() == "cuda":  # where kernels round
                    alone = made(kind, fast=False, **what)
                    if far <= MOVES * error(alone.picture(flow, run, NUDGE), alone.picture(flow, run)):
                        continue
                yield Far(number, f"{kind} {dtype}", run, far, " ".join(past))


if __name__ == "__main__":
    draws.run(__doc__, compared)
