"""Which parts of a UNet or of its ControlNet run on fused operations, decided once per sampling run."""

from collections.abc import Callable, Iterable

import comfy.ldm.modules.attention as attention
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, Upsample
from torch import Tensor, nn

from ..ops import LinearGroup
from .compat import drops_out
from .layers import Survey, is_altered, is_cast


class Plan:
    """Which parts of one model may run on fused operations.

    A part runs its own forward if another pack hooked or replaced anything in it, if it has layers of an unknown kind,
    or if it is of a form that no model in use has (scale-shift norm, an ungated feed-forward, ...).
    """

    def __init__(self, model: nn.Module) -> None:
        self.survey = Survey(model)
        modules = list(model.modules())
        self.res_blocks = {id(m): m for m in modules if self._fits(m, ResBlock, _plain_res_block)}
        projections = {key: m.emb_layers[1] for key, m in self.res_blocks.items() if not is_cast(m.emb_layers[1])}
        self.embedded = list(projections)
        self.embedding = LinearGroup([layer.weight for layer in projections.values()])
        self.upsamplings = self._fit(modules, Upsample, lambda m: m.dims == 2)
        self.transformer_blocks = self._fit(modules, BasicTransformerBlock, _plain_transformer_block)
        self.transformers = self._fit_transformers(modules)
        blocks = [m for m in modules if id(m) in self.transformer_blocks and not _is_streamed(m)]
        self.text_blocks = [id(m) for m in blocks]
        self.text = LinearGroup([weight for m in blocks for weight in _text_weights(m)])

    def fuses(self, part: nn.Module) -> bool:
        """Whether a part that is no block (the model's end) may run on fused operations."""
        return id(part) not in self.survey.odd

    def constants(self) -> tuple[Tensor | None, ...]:
        """The tables of the weights that are multiplied together."""
        return self.text.table, self.embedding.table

    def _fit_transformers(self, modules: list[nn.Module]) -> set[int]:
        """Transformers whose own layers are as they should be: their blocks are judged one by one."""
        found = (m for m in modules if type(m) is SpatialTransformer and not is_altered(m))
        return {id(m) for m in found if not self.survey.odd & {id(m.norm), id(m.proj_in), id(m.proj_out)}}

    def _fit(self, modules: list[nn.Module], kind: type, is_plain: Callable[[nn.Module], bool]) -> set[int]:
        return {id(m) for m in modules if self._fits(m, kind, is_plain)}

    def _fits(self, m: nn.Module, kind: type, is_plain: Callable[[nn.Module], bool]) -> bool:
        return type(m) is kind and id(m) not in self.survey.odd and is_plain(m)


def unknown_layers(stages: Iterable[Iterable[nn.Module]]) -> str:
    """The classes of layers in these stages that no mirrored forward has; "" if all are known."""
    return ", ".join(sorted({type(m).__name__ for stage in stages for m in stage if not _is_known(m)}))


def _is_known(layer: nn.Module) -> bool:
    # exact types: VideoResBlock and SpatialVideoTransformer are subclasses with other forwards
    return type(layer) in (ResBlock, SpatialTransformer, Upsample, Downsample) or isinstance(layer, nn.Conv2d)


def _is_streamed(m: BasicTransformerBlock) -> bool:
    layers = (m.attn2.to_k, m.attn2.to_v)
    return any(is_cast(layer) or layer.bias is not None for layer in layers)


def _text_weights(m: BasicTransformerBlock) -> tuple[Tensor, Tensor]:
    return m.attn2.to_k.weight, m.attn2.to_v.weight


def _plain_res_block(m: ResBlock) -> bool:
    return (
        isinstance(m.in_layers[-1], nn.Conv2d)
        and not m.use_scale_shift_norm
        and not m.exchange_temb_dims
        and not m.skip_t_emb
        and not drops_out(m)
    )


def _plain_transformer_block(m: BasicTransformerBlock) -> bool:
    return (
        not m.ff_in
        and m.is_res
        and type(m.attn1) is CrossAttention
        and type(m.attn2) is CrossAttention
        and not m.disable_self_attn
        and not m.switch_temporal_ca_to_sa
        and type(m.ff.net[0]) is attention.GEGLU
        and not drops_out(m)
    )
