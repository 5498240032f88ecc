"""Patches as other packs set them on a model, and what a patched model must give. For the tests of several files.

Each patch of ``PATCHES`` logs where it is called.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tools.architectures.table import parts_of
from tools.oracles import error

ATTN_INPUT = ("input", 1)  # where that block lies, as patches see it
Options = dict[str, Any]
Log = list[Any]
Patcher = Any  # comfy.model_patcher.ModelPatcher
CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a patch must show, so that a test can tell
SIZE = {"width": 72, "height": 64}


def place(options: dict[str, Any]) -> tuple:
    """Where a patch is called, as it sees it."""
    return (options["block"], options.get("block_index"), options["transformer_index"])


def input_block(patcher: Patcher, log: Log) -> None:
    patcher.set_model_input_block_patch(lambda h, o: log.append(place(o)) or h * 1.1)


def input_block_after_skip(patcher: Patcher, log: Log) -> None:
    patcher.set_model_input_block_patch_after_skip(lambda h, o: log.append(place(o)) or h * 1.1)


def output_block_in_place(patcher: Patcher, log: Log) -> None:
    def patch(h: Tensor, skip: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        log.append(place(options))
        h[:, : h.shape[1] // 2] *= 1.3
        return h, skip.mul_(0.8)

    patcher.set_model_output_block_patch(patch)


def attn1(patcher: Patcher, log: Log) -> None:
    patcher.set_model_attn1_patch(lambda n, k, v, o: log.append(place(o)) or (n * 1.2, k, v * 0.9))


def attn2(patcher: Patcher, log: Log) -> None:
    patcher.set_model_attn2_patch(lambda n, k, v, o: log.append(place(o)) or (n, k, v * 1.5))


def attn1_output(patcher: Patcher, log: Log) -> None:
    patcher.set_model_attn1_output_patch(lambda n, o: log.append(place(o)) or n * 1.2)


def attn2_output(patcher: Patcher, log: Log) -> None:
    patcher.set_model_attn2_output_patch(lambda n, o: log.append(place(o)) or n * 1.2)


def attn1_replace_one(patcher: Patcher, log: Log) -> None:
    patcher.set_model_attn1_replace(lambda q, k, v, o: log.append(place(o)) or v * 0.5, *ATTN_INPUT)


def attn2_replace_one(patcher: Patcher, log: Log) -> None:
    def mean(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        log.append(place(options))
        return v.mean(1, keepdim=True).expand_as(q)

    patcher.set_model_attn2_replace(mean, *ATTN_INPUT, 0)  # by block and index in it, as IPAdapter does


def middle(patcher: Patcher, log: Log) -> None:
    patcher.set_model_patch(lambda x, o: log.append(place(o)) or x * 1.1, "middle_patch")


def embedding(patcher: Patcher, log: Log) -> None:
    patcher.set_model_emb_patch(lambda emb, channels, o: log.append(channels) or emb * 1.2)


def attention_override(patcher: Patcher, log: Log) -> None:
    def override(func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, **kwargs: Any) -> Tensor:
        log.append((tuple(q.shape), heads, place(kwargs["transformer_options"])))
        return func(q, k, v * 1.2, heads, **kwargs)

    patcher.model_options["transformer_options"]["optimized_attention_override"] = override


def attention_values(patcher: Patcher, log: Log) -> None:
    """Of any model, transformers too."""

    def override(func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        log.append(tuple(q.shape))
        return func(q, k, v * 1.2, *args, **kwargs)

    patcher.model_options["transformer_options"]["optimized_attention_override"] = override


def choose_attention(patcher: Patcher, attention: Callable[..., Tensor]) -> None:
    """As ComfyUI's node ModelAttentionBackend; for a ComfyUI that has none, its function under the same file's name."""
    if hasattr(patcher, "set_model_optimized_attention"):
        patcher.set_model_optimized_attention(attention)
        return

    def override(_: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, **kwargs)

    module = sys.modules["comfy.model_patcher"]
    code = override.__code__.replace(co_filename=module.__file__)
    made = FunctionType(code, {"__name__": module.__name__}, closure=override.__closure__)
    patcher.model_options["transformer_options"]["optimized_attention_override"] = made


PATCHES = [
    input_block, input_block_after_skip, output_block_in_place, attn1, attn2, attn1_output, attn2_output,
    attn1_replace_one, attn2_replace_one, middle, embedding, attention_override,
]  # fmt: skip


def changing_in_mid_run(model: Any, layer: str, change: Callable[[Any], Callable[[], None]]) -> Any:
    """A clone by which another pack changes a layer for a run's second and third call. change: gives what undoes it."""
    from comfy.patcher_extension import WrappersMP

    calls, model = [], model.clone()
    module = model.model.diffusion_model.get_submodule(layer)

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        undo = change(module) if len(calls) in (2, 3) else None
        try:
            return executor(*args, **kwargs)
        finally:
            if undo:
                undo()

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)
    return model


def takes_of(patcher: Patcher) -> list[Any]:
    """The recordings of a compiled model."""
    from anyshape.accel.comfy.attach import engine_of

    takes = engine_of(patcher)(patcher.model.diffusion_model)._tape._tapes._takes
    return [take for group in takes.values() for take in group]


def with_patch(patcher: Patcher, set_patch: Callable[[Patcher], Any]) -> Patcher:
    """A clone that is patched."""
    patched = patcher.clone()
    set_patch(patched)
    return patched


def run(models: Any, patcher: Patcher, **changes: Any) -> Tensor:
    """A sampling run of four steps. models: ``bench.models``."""
    return models.sample(patcher, **SIZE | {"steps": 4} | changes)


def assert_equal(models: Any, plain: Patcher, fast: Patcher, **changes: Any) -> Tensor:
    """Both give the same picture; the second is the compiled one."""
    wanted = run(models, plain, **changes)
    assert error(run(models, fast, **changes), wanted) < CLOSE
    return wanted


def reading(model: Any, read: Callable[[Tensor, Options], Tensor]) -> Callable[..., Tensor]:
    """The forward of a model whose last layer reads the options of the forward."""
    forward = model.forward

    def ours(*args: Any, **kwargs: Any) -> Tensor:
        return read(forward(*args, **kwargs), kwargs["transformer_options"])

    return ours


def past_torch(compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` gives on the CPU, as a kernel gives it that torch knows nothing of."""
    with _disable_current_modes():
        found = compute().contiguous()
    out = torch.empty(found.shape, dtype=found.dtype)
    ctypes.memmove(out.data_ptr(), found.data_ptr(), found.nbytes)
    return out


def read_back(
    model: nn.Module, name: str = "_forward", read: Callable[..., Any] = lambda x, timestep, *_, **__: timestep
) -> None:
    """Has a model of ComfyUI's read a value back at each call, so that its blocks are recorded one by one.

    name: of its method. read: of its arguments, the tensor that is read: its time step.
    """
    own = getattr(type(model), name)

    @functools.wraps(own)
    def reads_back(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert float(parts_of(read(*args, **kwargs))[0].flatten()[0]) < float("inf")
        return own(self, *args, **kwargs)

    model.__class__ = type(type(model).__name__, (type(model),), {name: reads_back})
