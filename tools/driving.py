"""What several tests do to a model: compile it as the node does, and call it as a sampling run does.

Models are patchers of ComfyUI's own classes with random weights (``bench.models``), on the CPU and in float32.
"""

import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

SHORT_RUN = {"width": 128, "height": 128, "steps": 2}  # of bench.models.sample
SMALL_RUN = SHORT_RUN | {"width": 64, "height": 64}  # of SMALL_UNETS, whose deepest level has 4x4 elements then
Patcher = Any  # comfy.model_patcher.ModelPatcher; ComfyUI is imported when the tests' fixtures say so

NARROW_UNET = {"model_channels": 32, "context_dim": 64, "num_head_channels": 16, "num_heads": -1}
UNETS = {  # as T2I-Adapters want them: two blocks for each level, of which some have transformers
    "sd15": NARROW_UNET  # 1x1 convolutions around the transformer
    | {
        "transformer_depth": [1, 0, 0, 0, 0, 1, 0, 0],
        "transformer_depth_output": [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    },
    "sdxl": NARROW_UNET  # linear layers there, and a pooled embedding
    | {
        "transformer_depth": [0, 0, 1, 0, 0, 2],
        "transformer_depth_output": [0, 0, 0, 0, 1, 0, 2, 0, 0],
        "transformer_depth_middle": 2,
    },
}  # fmt: skip
SMALL_UNETS = {  # two levels of one block, with and without transformers, where SD1.5 has four of two and SDXL three
    "sd15": NARROW_UNET
    | {
        "channel_mult": (1, 2), "num_res_blocks": [1, 1], "transformer_depth": [1, 0],
        "transformer_depth_output": [1, 1, 0, 0],
    },
    "sdxl": NARROW_UNET
    | {
        "channel_mult": (1, 2), "num_res_blocks": [1, 1], "transformer_depth": [0, 2],
        "transformer_depth_output": [0, 0, 2, 2], "transformer_depth_middle": 2,
    },
}  # fmt: skip
SMALL_UNET = SMALL_UNETS["sd15"]
DEEP_UNET = NARROW_UNET | {  # four levels of one block, for nodes that patch blocks of a certain depth
    "num_res_blocks": [1, 1, 1, 1], "transformer_depth": [1, 0, 1, 0],
    "transformer_depth_output": [1, 0, 0, 1, 1, 0, 0, 0],
}  # fmt: skip
DEEP_UNETS = {  # with all their levels, on the lower of which a latent with odd sides is odd again
    "sd15": DEEP_UNET,
    "sdxl": UNETS["sdxl"] | {"channel_mult": (1, 2, 2)},  # two blocks for each level
}
TINY_UNET = {  # of a UNet that torch.compile traces in seconds
    "num_res_blocks": [1, 1], "channel_mult": (1, 2), "transformer_depth": [1, 1], "transformer_depth_output": [1] * 4,
}  # fmt: skip
ONE_LEVEL_UNET = SMALL_UNET | {  # without a lower level: half of what a small one computes
    "channel_mult": (1,), "num_res_blocks": [1], "transformer_depth": [1], "transformer_depth_output": [1, 1],
}  # fmt: skip
COMPILED_PARTS = {  # what other packs compile of such a model
    "unet": ["diffusion_model.middle_block.1.transformer_blocks.0", "diffusion_model.out"],
    "flux": ["diffusion_model.double_blocks.0", "diffusion_model.single_blocks.1"],
}
SMALL_FLUX = {
    "hidden_size": 64, "num_heads": 2, "depth": 2, "depth_single_blocks": 3, "axes_dim": [8, 12, 12],
    "vec_in_dim": 32, "context_in_dim": 48,
}  # fmt: skip
FLUX_RUN = SHORT_RUN | {"tokens": 20, "cfg": 3.0}


def compile_with_message(patcher: Patcher, **settings: Any) -> tuple[Patcher, str]:
    """The Compile Model node's work, and what it tells the user."""
    from anyshape.accel.call import Settings
    from anyshape.accel.comfy.attach import compile_model

    return compile_model(patcher, Settings(**settings))


def compiled(patcher: Patcher, **settings: Any) -> Patcher:
    """The Compile Model node's work, where it has nothing to say."""
    out, message = compile_with_message(patcher, **settings)
    assert message == "", message
    return out


def compiled_vae(vae: Any) -> Any:
    """The Compile VAE node's work, where it has nothing to say."""
    from anyshape.accel.comfy.vae import compile_vae

    out, message = compile_vae(vae)
    assert message == "", message
    return out


def skip_with_message(
    patcher: Patcher, tell: Callable[[str], None] = lambda line: None, **settings: Any
) -> tuple[Patcher, str]:
    """The Skip Blocks node's work, and what it tells the user."""
    from anyshape.accel.comfy.skipping import skip_blocks
    from anyshape.accel.skip.settings import SkipSettings

    return skip_blocks(patcher, SkipSettings(**settings), tell)


def skipping(patcher: Patcher, tell: Callable[[str], None] = lambda line: None, **settings: Any) -> Patcher:
    """The Skip Blocks node's work, where it has nothing to say."""
    out, message = skip_with_message(patcher, tell, **settings)
    assert message == "", message
    return out


def compiled_control(control: Any) -> Any:
    """The Compile ControlNet node's work, where it has nothing to say."""
    from anyshape.accel.comfy.controlnet import compile_controlnet

    out, message = compile_controlnet(control)
    assert message == "", message
    return out


def one_call(patcher: Patcher, name: str, compiled_by: Patcher | None = None) -> Any:
    """One call of a model of the table, in bfloat16, through Compile Model's wrappers if there are any."""
    from tools import architectures

    arguments, named = architectures.in_bfloat16(*architectures.TABLE[name].inputs(1))
    named["transformer_options"] = {**named.get("transformer_options", {}), **options_of(compiled_by or patcher)}
    with torch.inference_mode():
        return patcher.model.diffusion_model(*arguments, **named)


def calls_of(patch: Any, owner: Any, name: str, noted: Callable[..., Any] = lambda *args, **kwargs: None) -> list:
    """What is ``noted`` of each call of ``owner.name`` from here on; the call is made as before."""
    seen, own = [], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(noted(*args, **kwargs))
        return own(*args, **kwargs)

    patch.setattr(owner, name, call)
    return seen


def in_threads(work: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
    """What ``work`` gives of each, all of them at once in threads of their own. Raises what one of them raises."""
    each = list(each)
    together = threading.Barrier(len(each))

    def begun(one: Any) -> Any:
        together.wait()
        return work(one)

    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(begun, each))


def steering(*controls: Any, width: int = 128, height: int = 128, **apply: Any) -> Callable[[list, list], tuple]:
    """Apply ControlNet (Advanced) for each control, as ``steer`` of bench.models.sample; random hints of that size.

    apply: strength, start_percent, end_percent and batch, of the hint.
    """
    import nodes

    strength, start, end = (
        apply.get(n, d) for n, d in (("strength", 1.0), ("start_percent", 0.0), ("end_percent", 1.0))
    )

    def steer(positive: list, negative: list) -> tuple:
        for index, control in enumerate(controls):
            hint = torch.rand(apply.get("batch", 1), height, width, 3, generator=torch.Generator().manual_seed(index))
            node = nodes.ControlNetApplyAdvanced()
            positive, negative = node.apply_controlnet(positive, negative, control, hint, strength, start, end)
        return positive, negative

    return steer


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unet_inputs(
    patcher: Patcher, width: int, height: int, rows: int = 2, tokens: int = 77, seed: int = 0
) -> dict[str, Tensor | None]:
    """Random arguments of a UNet of ``UNETS``; sizes in image pixels."""
    config = patcher.model.model_config.unet_config
    y = randn(rows, config["adm_in_channels"], seed=seed + 2) if config.get("num_classes") else None
    x, context = randn(rows, 4, height // 8, width // 8, seed=seed), randn(rows, tokens, 64, seed=seed + 1)
    return {"x": x, "timesteps": torch.full((rows,), 500.0), "context": context, "y": y}


def options_of(patcher: Patcher) -> dict[str, Any]:
    """transformer_options as ComfyUI's sampler hands them to the model."""
    options = patcher.model_options["transformer_options"]
    return {"sigmas": torch.ones(1), **options, "wrappers": patcher.wrappers, "cond_or_uncond": [1, 0]}


def unet_forward(patcher: Patcher, *args: Any, control: Any = None, **kwargs: Any) -> Tensor:
    """One call of a UNet on ``unet_inputs``, as inside a sampling run."""
    with torch.inference_mode():
        call = unet_inputs(patcher, *args, **kwargs)
        return patcher.model.diffusion_model(**call, control=control, transformer_options=options_of(patcher))


def _skips_of(patcher: Patcher, width: int, height: int, rows: int) -> list[torch.Size]:
    """The shapes of a UNet's skip connections, outermost first."""
    found, probe = [], patcher.clone()
    probe.set_model_input_block_patch(lambda h, o: found.append(h.shape) or h)
    unet_forward(probe, width, height, rows)
    return found


def residuals(patcher: Patcher, x_shape: tuple[int, ...], kind: str) -> dict[str, list[Tensor | None]]:
    """What a ControlNet gives: lists that ComfyUI empties from their ends, None where nothing is added."""
    skips = _skips_of(patcher, x_shape[-1] * 8, x_shape[-2] * 8, x_shape[0])
    random = [randn(*shape, seed=index) * 0.3 for index, shape in enumerate(skips)]
    middle = [randn(*skips[-1], seed=99) * 0.3]
    return {
        "controlnet": {"input": [], "middle": middle, "output": random},
        "with gaps": {"input": [], "middle": [None], "output": [r if i % 3 else None for i, r in enumerate(random)]},
        "short": {"middle": middle, "output": random[-4:]},
        "t2i adapter": {"input": [r if i % 3 == 0 else None for i, r in enumerate(reversed(random))], "output": []},
    }[kind]


def memory_by_turns(monkeypatch: Any, *answers: bool) -> None:
    """Whether there is memory for what ComfyUI's sampler wants to join into one batch: these answers, over and over."""
    import comfy.model_management as mm
    import comfy.samplers
    from comfy.model_patcher import ModelPatcher

    turns = itertools.cycle(answers)

    def free(*args: Any, **kwargs: Any) -> int:
        return 1 << 60 if next(turns) else 1

    if hasattr(ModelPatcher, "get_free_memory"):  # newer ComfyUI asks the model
        monkeypatch.setattr(ModelPatcher, "get_free_memory", free)
    else:
        own = types.SimpleNamespace(**vars(mm) | {"get_free_memory": free})
        monkeypatch.setattr(comfy.samplers, "model_management", own)


def every_progress(monkeypatch: Any) -> None:
    """ComfyUI's progress bar tells everything; a newer one leaves out what comes soon after the last."""
    import comfy.utils

    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)


def sampled_once(models: types.ModuleType, patchers: dict[str, Patcher]) -> Callable[[str, dict[str, Any]], Tensor]:
    """Gives the latent of a run of a model by its name; each is sampled once."""

    @functools.cache
    def sampled(name: str, run: tuple[tuple[str, Any], ...]) -> Tensor:
        return models.sample(patchers[name], **dict(run))

    return lambda name, run: sampled(name, tuple(run.items()))


def sample_prompts(
    patcher: Patcher, positive: list, negative: list, latent: Tensor | None = None, steps: int = 2, cfg: float = 4.0,
    sampler: str = "euler", noise_mask: Tensor | None = None, seed: int = 1,
) -> Tensor:  # fmt: skip
    """One run through ``comfy.sample`` with these CONDITIONINGs; on a latent [N, C, H, W], by default 128x128."""
    import comfy.sample

    channels = patcher.model.latent_format.latent_channels
    latent = torch.zeros(1, channels, 16, 16) if latent is None else latent
    noise, kind = comfy.sample.prepare_noise(latent, seed), "simple" if channels == 16 else "normal"
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, steps, cfg, sampler, kind, positive, negative, latent, noise_mask=noise_mask,
            disable_pbar=True, seed=seed,
        )  # fmt: skip


def short_of_memory(monkeypatch: Any, owner: type, name: str, limit: int) -> None:
    """``owner.name`` runs out of memory for an image [N, C, H, W] that is higher than ``limit``."""
    own = getattr(owner, name)

    def limited(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[2] > limit:
            raise torch.OutOfMemoryError("injected")
        return own(self, x, *args, **kwargs)

    monkeypatch.setattr(owner, name, as_own(owner, limited))


def programs_short_of_memory(monkeypatch: Any, limit: int) -> None:
    """A tape's program runs out of memory for an input [N, C, H, W] that is higher than ``limit``."""
    from anyshape.accel.tape.program import Program

    own = Program.run

    def limited(self: Any, inputs: Any, *args: Any) -> Any:
        if inputs[0].shape[2] > limit:
            raise torch.OutOfMemoryError("injected")
        return own(self, inputs, *args)

    monkeypatch.setattr(Program, "run", limited)


def as_own(owner: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as if its code were in the file of ``owner``: a fault of ComfyUI's own, not of another pack."""
    function.__code__ = function.__code__.replace(co_filename=sys.modules[owner.__module__].__file__)
    return function


def sample_tiny(
    patcher: Patcher, name: str, seed: int = 0, height: int = 8, width: int = 8, batch: int = 1, steps: int = 2,
    cfg: float = 3.0, sampler: str = "euler", tokens: int | None = None, callback: Callable[..., None] | None = None,
    options: dict[str, Any] | None = None, conditions: dict[str, Any] | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A run of the model ``name`` of ``tools.architectures``, as SamplerCustom does it; latents of height x width.

    tokens: of the negative prompt, if not as many as the positive one has. Videos have three latent frames, and what
    the table gives one frame has one.
    options: more of the model's transformer_options. conditions: more of both prompts. mask: where noise is added.
    """
    import comfy.sample
    import comfy.samplers

    from tools.architectures import TABLE

    if options:
        patcher = patcher.clone()
        patcher.model_options["transformer_options"].update(options)
    kind = TABLE[name]
    parts = kind.request(0)["conditions"]
    # as ComfyUI's text encoders give it: always there, and older versions ask for it
    context, extra = parts["context"][:1], {"pooled_output": parts["y"][:1] if "y" in parts else None}
    if name == "LTXV":
        extra["attention_mask"] = torch.ones(1, context.shape[1], dtype=torch.int64)
    extra |= conditions or {}
    prompts = [[[context, extra]], [[context[:, :tokens] * 0.5, extra]]]
    frames = [min(3, kind.frames)] if kind.dimensions > 2 else []
    shape = (batch, kind.channels, *frames, height, width)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", steps)
    with torch.inference_mode():
        return comfy.sample.sample_custom(
            patcher, noise, cfg, comfy.samplers.ksampler(sampler), sigmas, *prompts, torch.zeros(shape),
            disable_pbar=True, seed=seed, callback=callback, noise_mask=mask,
        )  # fmt: skip
