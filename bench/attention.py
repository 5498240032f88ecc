"""Attention by each of torch's exact backends, beside what ComfyUI takes: milliseconds of one call.

python -m bench.attention [--model zimage,flux,...] [--sizes 1024x1024,512x512] [--dynamic] [--json FILE]

The calls are those of a model's first forward, each form of them once: a few blocks of full width are enough. ComfyUI's
time is that of its own function with its own priorities, to [B, N, H * D]; those of the backends are without it.
"flash64" is the kernel that UNets get (heads of 64 channels, no mask). ``chosen``: the backend that a program takes
where torch's are compared at all (``accel.tape.attention_choice``).
"""

import sys

from tools import dynamic_vram, embed

DYNAMIC = "--dynamic"
if DYNAMIC in sys.argv:  # its library must be there before ComfyUI is imported
    dynamic_vram.start(store=False)
else:
    embed.use_comfyui()
    embed.load_pack(store=False)

import argparse  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from anyshape.accel.kernels import flash_attention, operations  # noqa: E402
from anyshape.accel.tape import attention_choice  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from bench import measure, zoo  # noqa: E402
from bench.step import Case, inside, size  # noqa: E402

FEW = {  # blocks: all calls of a model are like these
    "zimage": {"n_layers": 1}, "flux": {"depth": 1, "depth_single_blocks": 1}, "qwen": {"num_layers": 1},
    "krea": {"layers": 1}, "ltxv": {"num_layers": 1}, "wan": {"num_layers": 1},
    "chroma": {"depth": 1, "depth_single_blocks": 1}, "cosmos": {"num_blocks": 1},
}  # fmt: skip
VIDEO = {"ltxv": [Case(768, 512, frames=65)], "wan": [Case(1024, 1024), Case(832, 480, frames=33)]}
USUAL = [Case(1024, 1024), Case(512, 512)]
ROUNDS, CALLS = 6, 6
WAIT = 4_000_000  # cycles that the GPU waits, two milliseconds, so that launching is not what is measured


class Call(NamedTuple):
    """One call of attention: ComfyUI's function with its arguments, and what torch was given in it."""

    own: Callable[[], Tensor]
    q: Tensor  # [B, H, N, D]
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    backend: str  # that torch took

    @property
    def form(self) -> tuple:
        """Calls of one form take one time."""
        tensors = (self.q, self.k, self.v) if self.mask is None else (self.q, self.k, self.v, self.mask)
        return tuple((x.shape, x.stride(), x.dtype) for x in tensors), self.causal


class _Given(TorchFunctionMode):
    """Notes what torch's attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: tuple = ()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.arguments = *args[:3], mask, bool(kwargs.get("is_causal", False))
        return func(*args, **kwargs)


class _Taken(TorchDispatchMode):
    """Notes which backend ran."""

    backend = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # as a whole, in inference mode
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_"):
            self.backend = name.removeprefix("_scaled_dot_product_").partition("_")[0]
        return func(*args, **(kwargs or {}))


def calls(patcher: ModelPatcher, case: Case) -> list[Call]:
    """Every form of call that the first forward of this size makes."""
    found: dict[tuple, Call] = {}

    def listening(own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("transformer_options", None)  # or it would come here again
        with _Given() as given, _Taken() as taken:
            out = own(*args, **kwargs)
        if given.arguments:
            call = Call(lambda: own(*args, **kwargs), *given.arguments, taken.backend)
            found.setdefault(call.form, call)
        return out

    patcher = patcher.clone()
    patcher.model_options["transformer_options"]["optimized_attention_override"] = listening
    inside(patcher, case, lambda step: step())
    return list(found.values())


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of one call on the device, handed over before it begins."""
    ticks = measure.Ticks()
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda._sleep(WAIT)
        ticks.mark()
        for _ in range(CALLS):
            call()
        ticks.mark()
    rounds = ticks.intervals_ms()[::2]
    return round(statistics.median(rounds[1:]) / CALLS, 4)  # the first one makes plans


def row(call: Call, device: torch.device) -> dict[str, Any]:
    """A call's figures."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    rows, heads, queries, width = q.shape
    able = [each for each in attention_choice.BACKENDS if device.type == "cuda" and k.shape[1] == heads
            and attention_choice.supports(each, q, k, v, mask, call.causal)]  # fmt: skip
    times = {
        each: milliseconds(lambda each=each: attention_choice.attend(each, q, k, v, mask, call.causal, None))
        for each in able
    }
    if device.type == "cuda" and mask is None and width == flash_attention.HEAD and not call.causal:
        flat = [x.transpose(1, 2).flatten(2).contiguous() for x in (q, k, v)]
        times["flash64"] = milliseconds(lambda: operations.flash_attention(*flat, heads))
    chosen = call.backend
    if able and chosen in able and chosen != "cudnn":  # cuDNN's is not compared: see accel.tape.rules.attention
        chosen = attention_choice.fastest(
            attention_choice.case_of(q, k, v, mask is not None, call.causal), chosen, device
        )
    return {
        "images": rows, "heads": heads, "key_heads": k.shape[1], "head_width": width, "queries": queries,
        "keys": k.shape[2], "masked": mask is not None, "comfyui": call.backend, "comfyui_ms": milliseconds(call.own),
        "ms": times, "chosen": chosen,
    }  # fmt: skip


def told(name: str, case: Case, found: dict[str, Any]) -> None:
    """Prints a row for the person who waits."""
    times = ", ".join(f"{backend} {ms:.3f}" for backend, ms in found["ms"].items())
    print(f"{name} {case}: {found['images']} x {found['heads']} heads of {found['head_width']}, {found['queries']} to "
          f"{found['keys']}{' masked' if found['masked'] else ''}: ComfyUI {found['comfyui_ms']:.3f} ms by "
          f"{found['comfyui']}; {times}; chosen {found['chosen']}", flush=True)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = measure.options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="zimage,flux,qwen,sd35l,krea,ltxv,wan,sdxl", help="a list of bench.zoo")
    parser.add_argument("--sizes", help="a list; without it the model's own")
    parser.add_argument(DYNAMIC, action="store_true", help="ComfyUI with DynamicVRAM, as its main.py starts it")
    chosen = parser.parse_args()
    chosen.model = chosen.model.split(",")
    chosen.sizes = [size(text) for text in chosen.sizes.split(",")] if chosen.sizes else []
    return chosen


def main() -> None:
    """Prints every row as it is measured; writes the JSON."""
    chosen, rows = arguments(), []
    for name in chosen.model:
        make = dynamic_vram.made if chosen.dynamic else zoo.make
        patcher = make(name, **FEW.get(name, {}))
        for case in chosen.sizes or VIDEO.get(name, USUAL):
            with torch.inference_mode():
                for call in calls(patcher, case):
                    found = {"model": name, "width": case.width, "height": case.height, "frames": case.frames}
                    rows.append(found | row(call, patcher.load_device))
                    told(name, case, rows[-1])
        del patcher
        measure.freed_mib()
        measure.write(chosen.json, {"dynamic": chosen.dynamic, "rows": rows})


if __name__ == "__main__":
    main()
