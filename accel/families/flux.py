"""ComfyUI's ``Flux`` in the form of Flux.1 (dev, schnell, Kontext, Fill, ...) in fused operations.

``forward`` mirrors ``Flux._forward`` and ``forward_orig`` (comfy/ldm/flux/model.py) step by step, so that reference
latents, ControlNet residuals and patches meet the same points; only the inside of the blocks that nobody patched is
ours (``flux_blocks``).
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

import comfy.ldm.flux.layers as layers
import comfy.ldm.flux.math as flux_math
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock, LastLayer, SingleStreamBlock
from comfy.ldm.flux.model import Flux
from einops import rearrange
from torch import Tensor, nn

from ..ops import FusedOps, GatedStream
from .compat import PROCESS_IMG_TAKES_OPTIONS, RMS_NORMS
from .family import Arguments, residuals, unconsumed, unknown_patches
from .flux_blocks import Attention, Modulations, Plan, double_block, is_half, last_layer, single_block

KIND = "model"
MODEL = Flux
MIRRORED = ("_forward", "forward_orig", "process_img")
LATENT_TO_PIXELS = 8
# What Flux may be built with; another name that is neither at its default nor empty is a new form.
PARAMETERS = frozenset(
    "in_channels out_channels vec_in_dim context_in_dim hidden_size mlp_ratio num_heads depth depth_single_blocks "
    "axes_dim theta patch_size qkv_bias guidance_embed ops_bias default_ref_method ref_index_scale".split()
)
PATCHES = frozenset({"post_input"})  # that the mirrored forward calls
METHODS = ("offset", "index", "uxo")  # of placing references, that every version of ComfyUI knows alike

Control = dict[str, list[Tensor | None]] | None


def unsupported(model: Flux) -> str:
    """Why this Flux is not one that ``forward`` mirrors; "" if it is."""
    foreign = sorted(f.name for f in fields(model.params) if _is_new(f, getattr(model.params, f.name)))
    if foreign:
        return f"this Flux has a form that AnyShape does not know ({', '.join(foreign)}; it knows Flux.1)"
    places = getattr(model.params, "default_ref_method", "offset") in METHODS and len(model.params.axes_dim) == 3
    if not places or not hasattr(model, "final_layer"):
        return "this Flux has a form that AnyShape does not know (it knows Flux.1)"
    return ""


def _is_new(field: Any, value: Any) -> bool:
    default = [] if field.default is MISSING else field.default
    return field.name not in PARAMETERS and value != default


def arguments(
    x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None = None, guidance: Tensor | None = None,
    ref_latents: list[Tensor] | None = None, control: Control = None,
    transformer_options: dict[str, Any] | None = None, **extra: Any,
) -> Arguments:  # fmt: skip
    """Flux._forward's arguments."""
    options = {} if transformer_options is None else transformer_options
    known = {name: extra.pop(name) for name in ("attention_mask", "ref_latents_method") if name in extra}
    return Arguments(
        tensors={"x": x, "timesteps": timestep, "context": context, "y": y, "guidance": guidance}
        | {"attention_mask": known.get("attention_mask")},
        lists=residuals(control) | ({} if ref_latents is None else {"ref_latents": ref_latents}),
        options=options,
        original=lambda: (x, timestep, context, y, guidance, ref_latents, unconsumed(control), options),
        extra=extra,
        known=known,
        plain={name: str(value) for name, value in _plain(known, options)},
    )


def _plain(known: dict[str, Any], options: dict[str, Any]) -> list[tuple[str, Any]]:
    """What places the tokens besides their sizes."""
    named = (("ref_latents_method", known.get("ref_latents_method")), ("rope_options", options.get("rope_options")))
    return [(name, value) for name, value in named if value is not None]


def obstacle(given: Arguments) -> str:
    """Why only ComfyUI's own forward is right for this call; "" if ours is."""
    if unknown := unknown_patches(given, PATCHES, "Flux") or _unknown_references(given):
        return unknown
    if any(_is_replaced(owner, name) for owner, name in _OWN) or layers.attention is not flux_math.attention:
        return "another node replaced a part of ComfyUI's Flux for every model, so it runs in eager"
    return ""


def _unknown_references(given: Arguments) -> str:
    """Why the references of this call are not ours to place; "" if they are."""
    method = given.known.get("ref_latents_method")
    if not given.lists.get("ref_latents") or method in (None, *METHODS) and "rope_options" not in given.options:
        return ""
    why = "with rope options" if method in (None, *METHODS) else f'by the method "{method}"'
    return f"AnyShape does not place references {why}: the model runs in eager"


_OWN = (
    *((Flux, name) for name in MIRRORED),
    *((block, "forward") for block in (DoubleStreamBlock, SingleStreamBlock, LastLayer)),
    *((layer, "forward") for layer in (layers.Modulation, layers.QKNorm, *RMS_NORMS)),
)


def _is_replaced(owner: type, name: str) -> bool:
    """Whether a class's method comes from elsewhere than the class (packs that patch Flux as a whole)."""
    return getattr(getattr(owner, name), "__globals__", {}).get("__name__") != owner.__module__


def forward(ops: FusedOps, model: Flux, plan: Plan, given: Arguments, tensors: dict[str, Tensor]) -> Tensor:
    """Flux._forward on flattened tensors."""
    x, method = (
        tensors["x"],
        given.known.get("ref_latents_method", getattr(model.params, "default_ref_method", "offset")),
    )
    references = given.listed("ref_latents", tensors) if "ref_latents" in given.lists else []
    placed = {"transformer_options": given.options} if PROCESS_IMG_TAKES_OPTIONS else {}
    img, img_ids = model.process_img(x, **placed)
    tokens = [(img, img_ids), *_reference_tokens(model, x, references, method)]
    img, img_ids = (torch.cat(each, dim=1) if references else each[0] for each in zip(*tokens, strict=True))
    if references:
        given.options["reference_image_num_tokens"] = [places.shape[1] for _, places in tokens[1:]]
    fused = FluxForward(ops, model, plan, given.options, tensors.get("attention_mask"))
    vec = fused.embedding(x, tensors["timesteps"], tensors.get("y"), tensors.get("guidance"))
    out = fused(img, img_ids, tensors["context"], vec, given.control(tensors))[:, : tokens[0][0].shape[1]]
    return _to_image(out, x, model.patch_size)


def _reference_tokens(model: Flux, x: Tensor, references: Sequence[Tensor], method: str) -> list[tuple[Tensor, Tensor]]:
    """(tokens [B, T, C], their places [B, T, 3]) of each reference latent."""
    places = _reference_places(model, x, references, method)
    return [model.process_img(ref, **place) for ref, place in zip(references, places, strict=True)]


def _reference_places(model: Flux, x: Tensor, references: Sequence[Tensor], method: str) -> list[dict[str, float]]:
    """Where Flux._forward puts each reference latent: behind one another ("index"), along the diagonal ("uxo") or side
    by side on the shorter side of what is there ("offset", the default).
    """
    sides = [_round_up(side, model.patch_size) * model.patch_size for side in x.shape[-2:]]
    places, h, w = [], 0, 0
    for number, (height, width) in enumerate((ref.shape[-2:] for ref in references), start=1):
        if method == "index":
            index, top, left = number * getattr(model.params, "ref_index_scale", 1.0), 0, 0
        elif method == "uxo":
            index, top, left = 0, sides[0] + h, sides[1] + w
            h, w = h + height, w + width
        else:
            index, top, left = 1, *((0, w) if height + h > width + w else (h, 0))
            h, w = max(h, height + top), max(w, width + left)
        places.append({"index": index, "h_offset": top, "w_offset": left})
    return places


def _round_up(side: int, patch: int) -> int:
    return (side + patch // 2) // patch


def _to_image(out: Tensor, x: Tensor, patch: int) -> Tensor:
    """Tokens [B, h * w, C * p * p] -> [B, C, H, W] of x's height and width."""
    h, w = (_round_up(side, patch) for side in x.shape[-2:])
    image = rearrange(out, "b (h w) (c ph pw) -> b c (h ph) (w pw)", h=h, w=w, ph=patch, pw=patch)
    return image[:, :, : x.shape[-2], : x.shape[-1]]


class FluxForward:
    """One forward. ``options`` is the call's transformer_options; patches read and write it."""

    def __init__(self, ops: FusedOps, model: Flux, plan: Plan, options: dict[str, Any], mask: Tensor | None) -> None:
        self.ops, self.model, self.plan, self.options, self.mask = ops, model, plan, options, mask
        self.replacements: dict[tuple[str, int], Callable] = options.get("patches_replace", {}).get("dit", {})

    def embedding(self, x: Tensor, timesteps: Tensor, y: Tensor | None, guidance: Tensor | None) -> Tensor:
        """The conditioning vector [B, C]."""
        model, width = self.model, self.model.params.vec_in_dim
        vec = model.time_in(layers.timestep_embedding(timesteps, 256).to(x.dtype))
        if model.params.guidance_embed and guidance is not None:
            vec = vec + model.guidance_in(layers.timestep_embedding(guidance, 256).to(x.dtype))
        if model.vector_in is None:
            return vec
        y = x.new_zeros((x.shape[0], width)) if y is None else y
        return vec + model.vector_in(y[:, :width])

    def __call__(self, img: Tensor, img_ids: Tensor, context: Tensor, vec: Tensor, control: Control) -> Tensor:
        """Flux.forward_orig from the point where the streams begin; img [B, T, C] -> [B, T, C']."""
        txt_ids = torch.zeros((*context.shape[:2], img_ids.shape[-1]), device=img.device, dtype=torch.float32)
        tokens = {"img": self.model.img_in(img), "txt": self.model.txt_in(context)}
        img, txt, rotation = self._post_input(tokens | {"img_ids": img_ids, "txt_ids": txt_ids})
        self.vec, self.rotation = vec, rotation
        self.modulations = Modulations(self.ops, self.plan, vec)
        self.attend = Attention(self.ops, rotation, self.mask, self.options)
        img, txt = self._double(img, txt, control)
        if is_half(img):
            img = torch.nan_to_num(img, nan=0.0, posinf=65504, neginf=-65504)
        return self._last(self._single(torch.cat((txt, img), 1), txt.shape[1], control).tokens(txt.shape[1]))

    def _post_input(self, tokens: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Patches of the input tokens, then (img, txt, the rotation of each token)."""
        for patch in self.options.get("patches", {}).get("post_input", ()):
            out = patch(tokens | {"transformer_options": self.options})
            tokens = {name: out[name] for name in ("img", "txt", "img_ids", "txt_ids")}
        ids = None if tokens["img_ids"] is None else torch.cat((tokens["txt_ids"], tokens["img_ids"]), dim=1)
        return tokens["img"], tokens["txt"], None if ids is None else self.model.pe_embedder(ids)

    def _is_ours(self, block: nn.Module) -> bool:
        return id(block) in self.plan.ours and self.rotation is not None

    def _blocks(self, kind: str, blocks: nn.ModuleList) -> Any:
        """(index, block, the patch that replaces it or None), with the options that patches read."""
        self.options["total_blocks"], self.options["block_type"] = len(blocks), kind
        for index, block in enumerate(blocks):
            self.options["block_index"] = index
            yield index, block, self.replacements.get((f"{kind}_block", index))

    def _double(self, img: Tensor, txt: Tensor, control: Control) -> tuple[Tensor, Tensor]:
        img, txt = GatedStream(img), GatedStream(txt)
        for index, block, patch in self._blocks("double", self.model.double_blocks):
            if patch is None and self._is_ours(block):
                img, txt = double_block(self.ops, block, img, txt, self.modulations, self.attend)
            else:
                img, txt = self._own_double(block, patch, *map(self.ops.gated_residual, (img, txt)))
            img = self._controlled(img, control, "input", index, 0)
        return self.ops.gated_residual(img), self.ops.gated_residual(txt)

    def _single(self, x: Tensor, length: int, control: Control) -> GatedStream:
        stream, self.options["img_slice"] = GatedStream(x), [length, x.shape[1]]
        for index, block, patch in self._blocks("single", self.model.single_blocks):
            if patch is None and self._is_ours(block):
                stream = single_block(self.ops, block, stream, self.modulations, self.attend)
            else:
                stream = self._own_single(block, patch, self.ops.gated_residual(stream))
            stream = self._controlled(stream, control, "output", index, length)
        return stream

    def _shared(self) -> dict[str, Any]:
        """What every block takes besides its tokens, by the names that patches know."""
        names = {"vec": self.vec, "pe": self.rotation, "attn_mask": self.mask}
        return names | {"transformer_options": self.options}

    def _own_double(
        self, block: nn.Module, patch: Callable | None, img: Tensor, txt: Tensor
    ) -> tuple[GatedStream, GatedStream]:
        """The block's own forward, or the patch that replaces it."""

        def wrap(args: dict[str, Any]) -> dict[str, Tensor]:
            given = {name: args[name] for name in ("img", "txt", "vec", "pe")}
            more = {name: args.get(name) for name in ("attn_mask", "transformer_options")}
            return dict(zip(("img", "txt"), block(**given, **more), strict=True))

        args = {"img": img, "txt": txt} | self._shared()
        out = wrap(args) if patch is None else patch(args, {"original_block": wrap})
        return GatedStream(out["img"]), GatedStream(out["txt"])

    def _own_single(self, block: nn.Module, patch: Callable | None, x: Tensor) -> GatedStream:
        """The block's own forward, or the patch that replaces it."""

        def wrap(args: dict[str, Any]) -> dict[str, Tensor]:
            more = {name: args.get(name) for name in ("attn_mask", "transformer_options")}
            return {"img": block(args["img"], vec=args["vec"], pe=args["pe"], **more)}

        args = {"img": x} | self._shared()
        return GatedStream((wrap(args) if patch is None else patch(args, {"original_block": wrap}))["img"])

    def _controlled(self, stream: GatedStream, control: Control, name: str, index: int, start: int) -> GatedStream:
        """A ControlNet's residual added to the tokens from ``start`` on."""
        added = [] if control is None else control.get(name)
        if index >= len(added) or added[index] is None:
            return stream
        x = self.ops.gated_residual(stream)
        x[:, start : start + added[index].shape[1]] += added[index]
        return GatedStream(x)

    def _last(self, stream: GatedStream) -> Tensor:
        m = self.model.final_layer
        if id(m) in self.plan.ours:
            return last_layer(self.ops, m, stream, self.modulations)
        return m(self.ops.gated_residual(stream), self.vec)
