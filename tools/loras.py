"""LoRAs of every kind that ComfyUI knows, with random weights, and the layers that tests change by them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tools.driving import randn

Patcher = Any  # comfy.model_patcher.ModelPatcher
State = dict[str, Tensor]
RANK = 4
BLOCK = "middle_block.1.transformer_blocks.0"

# One layer of each kind that the fused forwards treat in a way of its own, and a norm for the kinds that take one.
LAYERS = {
    "unet": (
        f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_k", f"{BLOCK}.ff.net.0.proj", f"{BLOCK}.ff.net.2",
        "input_blocks.1.0.in_layers.2", "middle_block.0.emb_layers.1", "middle_block.1.proj_in",
        "output_blocks.0.0.skip_connection", "time_embed.0", "out.2",
    ),
    "flux": (
        "double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.2", "double_blocks.1.img_mod.lin",
        "single_blocks.1.linear1", "single_blocks.2.linear2", "single_blocks.0.modulation.lin", "img_in",
        "final_layer.linear",
    ),
}  # fmt: skip
NORMS = {"unet": (f"{BLOCK}.norm2", "out.0", "input_blocks.1.0.out_layers.0"), "flux": ()}  # Flux's have no weights


def family(patcher: Patcher) -> str:
    """Which of ``LAYERS`` this model has."""
    return "unet" if hasattr(patcher.model.diffusion_model, "input_blocks") else "flux"


def _factors(out: int, into: int, seed: int) -> tuple[Tensor, Tensor]:
    return randn(out, RANK, seed=seed) * 0.3, randn(RANK, into, seed=seed + 1) * into**-0.5


def _lora(out: int, into: int, seed: int) -> State:
    up, down = _factors(out, into, seed)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(3.0)}


def _dora(out: int, into: int, seed: int) -> State:
    return _lora(out, into, seed) | {"dora_scale": 1.0 + 0.2 * randn(out, 1, seed=seed + 5).abs()}


def _loha(out: int, into: int, seed: int) -> State:
    (a1, b1), (a2, b2) = _factors(out, into, seed), _factors(out, into, seed + 2)
    return {"hada_w1_a": a1, "hada_w1_b": b1 * 4, "hada_w2_a": a2, "hada_w2_b": b2 * into**0.5}


def _lokr(out: int, into: int, seed: int) -> State:
    small, large = randn(2, 2, seed=seed), randn(out // 2, into // 2, seed=seed + 1)
    return {"lokr_w1": small * 0.3, "lokr_w2": large * into**-0.5}


def _glora(out: int, into: int, seed: int) -> State:
    (b1, b2), (a1, a2) = _factors(out, into, seed), _factors(into, into, seed + 2)
    return {"a1.weight": a1, "a2.weight": a2, "b1.weight": b1, "b2.weight": b2}


def _oft(out: int, into: int, seed: int) -> State:
    return {"oft_blocks": randn(out // 4, 4, 4, seed=seed) * 0.2}


def _boft(out: int, into: int, seed: int) -> State:
    return {"oft_blocks": randn(1, out // 4, 4, 4, seed=seed) * 0.2, "alpha": torch.tensor(1.0)}


KINDS: dict[str, Callable[[int, int, int], State]] = {
    "lora": _lora, "dora": _dora, "loha": _loha, "lokr": _lokr, "glora": _glora, "oft": _oft, "boft": _boft,
}  # fmt: skip
FULL_KINDS = ("diff", "set_weight", "norm")
ALL_KINDS = (*KINDS, *FULL_KINDS)


def lora(patcher: Patcher, kind: str = "lora", seed: int = 0) -> State:
    """A LoRA file's tensors, of one of ``ALL_KINDS``, for every one of the model's ``LAYERS``."""
    own, state = patcher.model_state_dict(), {}
    for index, name in enumerate((NORMS if kind == "norm" else LAYERS)[family(patcher)]):
        weight = own[f"diffusion_model.{name}.weight"]
        parts = _full(kind, weight, seed + index) if kind in FULL_KINDS else _factored(kind, weight, seed + 10 * index)
        state |= {f"diffusion_model.{name}.{part}": tensor for part, tensor in parts.items()}
    return state


def of_layers(patcher: Patcher, *layers: str) -> State:
    """A LoRA of these layers alone, all of them changed by the same numbers."""
    own, state = patcher.model_state_dict(), {}
    for name in layers:
        out, into = own[f"diffusion_model.{name}.weight"].flatten(1).shape
        state[f"diffusion_model.{name}.lora_up.weight"] = randn(out, RANK, seed=7)
        state[f"diffusion_model.{name}.lora_down.weight"] = randn(RANK, into, seed=8)
    return state


def _factored(kind: str, weight: Tensor, seed: int) -> State:
    """A convolution is a matrix here too, but for what multiplies its channels alone (GLoRA) or scales them (DoRA)."""
    out, into = weight.flatten(1).shape
    parts = KINDS[kind](out, weight.shape[1] if kind == "glora" else into, seed)
    if kind == "glora" and weight[0, 0].numel() > 1:
        parts["b2.weight"] = randn(RANK, into, seed=seed + 9) * into**-0.5
    if "dora_scale" in parts:
        parts["dora_scale"] = parts["dora_scale"].reshape(-1, *[1] * (weight.ndim - 1))
    return parts


def _full(kind: str, weight: Tensor, seed: int) -> State:
    noise = randn(*weight.shape, seed=seed) * (0.3 if weight.ndim == 1 else 0.3 * weight[0].numel() ** -0.5)
    bias = randn(weight.shape[0], seed=seed + 50) * 0.3
    if kind == "diff":
        return {"diff": noise, "diff_b": bias}
    return {"set_weight": weight.cpu().float() + noise} if kind == "set_weight" else {"w_norm": noise, "b_norm": bias}


def with_lora(patcher: Patcher, state: State, strength: float = 1.0) -> Patcher:
    """ComfyUI's own LoRA loader on these tensors; every layer in them is met."""
    import comfy.sd

    before = sum(map(len, patcher.patches.values()))
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, state, strength, 0)
    layers = {name.rsplit(".", 2 if name.endswith(".weight") else 1)[0] for name in state}
    assert sum(map(len, loaded.patches.values())) - before >= len(layers)
    return loaded


def stacked(patcher: Patcher, stack: Iterable[tuple[State, float]]) -> Patcher:
    """A clone with several of them, each at its strength."""
    patcher = patcher.clone()
    for state, strength in stack:
        patcher = with_lora(patcher, state, strength)
    return patcher


def hooked(prompt: list, state: State, strength: float, changes: bool = False) -> list:
    """A CONDITIONING with these tensors as a LoRA hook. changes: to a third of its strength at half of the steps."""
    import comfy.hooks

    group = comfy.hooks.create_hook_lora(state, strength, 0.0)
    if changes:
        frames = comfy.hooks.HookKeyframeGroup()
        for share, start in ((1.0, 0.0), (0.3, 0.5)):
            frames.add(comfy.hooks.HookKeyframe(strength=share, start_percent=start))
        group.set_keyframes_on_hooks(frames)
    return comfy.hooks.set_hooks_for_conditioning(prompt, group)
