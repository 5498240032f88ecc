"""What every family shares: ComfyUI layers as weights for fused operations, and the look for foreign code in a model.

ComfyUI may keep a layer's weights elsewhere or in another dtype and cast them at each call (low VRAM, fp8, LoRA
applied on the fly). ``cast_bias_weight`` is its own way to get them; we use it and nothing else.
"""

import comfy.ldm.modules.attention as attention
import comfy.model_management
import comfy.ops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fingerprint import Watch, foreign_method
from ..ops import FusedOps, Norm, Weights
from ..reasons import say
from .compat import is_streamed_layer


def is_cast(layer: nn.Module) -> bool:
    """Whether ComfyUI fetches this layer's weights at each call, so that they have no fixed address."""
    return bool(
        getattr(layer, "comfy_cast_weights", False)
        or getattr(layer, "weight_function", None)
        or getattr(layer, "bias_function", None)
    )


def weights_of(layer: nn.Module, like: Tensor) -> Weights:
    """The layer's weight and bias, on the device and in the dtype of ``like``."""
    if is_cast(layer):
        return Weights(*comfy.ops.cast_bias_weight(layer, like)[:2])
    return Weights(layer.weight, layer.bias)


def norm_of(layer: nn.Module, like: Tensor) -> Norm:
    """The parameters of a GroupNorm or LayerNorm layer."""
    weights = weights_of(layer, like) if layer.weight is not None else Weights(None, None)
    return Norm(weights.weight, weights.bias, layer.eps, getattr(layer, "num_groups", 1))


def conv(ops: FusedOps, layer: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(convolution of x [N, C, H, W], the bias still to be added, or None)."""
    if not ops.defer_bias or is_cast(layer) or layer.padding_mode != "zeros":
        return layer(x), None
    return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups), layer.bias


def pointwise(layer: nn.Module, tokens: Tensor) -> Tensor:
    """A linear layer or a 1x1 convolution on tokens [B, T, C]."""
    weights = weights_of(layer, tokens)
    return F.linear(tokens, weights.matrix(), weights.bias)


def product(ops: FusedOps, layer: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """(``pointwise`` without its bias, the bias still to be added, or None)."""
    if not ops.defer_bias:
        return pointwise(layer, tokens), None
    weights = weights_of(layer, tokens)
    return F.linear(tokens, weights.matrix()), weights.bias


def to_tokens(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H * W, C]; free in channels_last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_image(tokens: Tensor, like: Tensor) -> Tensor:
    """[B, H * W, C] -> [B, C, H, W] of the height and width of ``like``, in channels_last."""
    return tokens.unflatten(1, like.shape[2:]).permute(0, 3, 1, 2)


def is_altered(module: nn.Module) -> bool:
    """Whether another pack changed what calling this module does (hooks, a ``forward`` replaced here or for all)."""
    return _is_altered_itself(module) or bool(foreign_method(type(module)))


def _is_altered_itself(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or any(name in module.__dict__ and is_foreign(module, name) for name in ("forward", "_forward"))
    )


def is_foreign(module: nn.Module, name: str) -> bool:
    """Whether the instance's attribute ``name`` is another method than its class's."""
    # ComfyUI leaves the class's own method behind as an attribute when it undoes an object patch
    return getattr(module.__dict__[name], "__func__", None) is not getattr(type(module), name, None)


def autocast(device: torch.device) -> str:
    """Why fused operations are not right under torch's autocast; "" if it is off."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return say("autocast")


def surroundings() -> int:
    """Changes with what decides a forward's result besides its inputs and weights, and that users and packs switch.

    Attention's backend, and how torch multiplies: a graph holds what was set when it was captured.
    """
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    precision = (getattr(matmul, name, None) for name in _PRECISION)  # not allow_tf32: reading it may raise
    sdpa = (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    )  # fmt: skip
    backends = (attention.optimized_attention, attention.optimized_attention_masked)
    return hash((*precision, torch.backends.cudnn.enabled, *sdpa, *backends))


_PRECISION = (
    "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
)  # fmt: skip
_LAYERS = ("Linear", "Conv2d", "GroupNorm", "LayerNorm")
_KNOWN_LAYERS = frozenset(
    getattr(ops, name) for ops in (nn, comfy.ops.disable_weight_init, comfy.ops.manual_cast) for name in _LAYERS
)


def _is_unknown_layer(module: nn.Module, known: frozenset[type]) -> bool:
    """Whether this layer computes something else than its weights say (scaled fp8, GGUF, other quantisations)."""
    foreign = any(type(p) not in (Tensor, nn.Parameter, type(None)) for p in module._parameters.values())
    return bool(module._parameters) and (type(module) not in known or foreign)


class Survey:
    """One walk through a model's parts for what keeps fused operations, or a graph, from being right.

    odd: ids of the modules that must run their own forward, because they or a part of them are altered or unknown.
    own_layers: classes with parameters that the family knows besides linear, convolution and norm layers.
    """

    def __init__(self, model: nn.Module, own_layers: tuple[type, ...] = ()) -> None:
        self._known = _KNOWN_LAYERS | set(own_layers)
        self.odd: set[int] = set()
        self.altered = False
        # of each class the forward that another pack gave it, for every model
        self.foreign = {type(model): foreign_method(type(model))}
        self.unknown: set[str] = set()
        self.cast = False
        self.streamed = False
        for part in model.children():  # the model itself is called by others, with whatever they hung on it
            self._visit(part)
        self._watch = Watch(model, root=False)

    def is_stale(self) -> bool:
        """Whether a part was hooked, replaced or set to be cast since the walk, or a class changed for every model."""
        return self._watch.changed()

    def _visit(self, module: nn.Module) -> bool:
        kind = type(module)
        if kind not in self.foreign:
            self.foreign[kind] = foreign_method(kind)
        altered, unknown = (
            bool(_is_altered_itself(module) or self.foreign[kind]),
            _is_unknown_layer(module, self._known),
        )
        self.altered |= altered
        self.cast |= is_cast(module)
        self.streamed |= is_streamed_layer(module)
        if unknown:
            self.unknown.add(type(module).__qualname__.split("<locals>.")[-1])
        odd = altered or unknown
        for child in module._modules.values():
            odd |= child is not None and self._visit(child)
        if odd:
            self.odd.add(id(module))
        return odd

    def whose(self) -> str:
        """In brackets the classes whose forward was replaced, and by which module; "" if none was."""
        found = sorted({replaced for replaced in self.foreign.values() if replaced})
        return f" ({', '.join(found)})" if found else ""

    def obstacle(self) -> str:
        """Why nothing of this model may run fused; "" if something may."""
        if self.streamed:
            return say("streamed_now")
        return ""


INTERRUPTS: tuple[type[BaseException], ...] = (comfy.model_management.InterruptProcessingException,)
