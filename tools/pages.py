"""A stand-in for the hardware under DynamicVRAM: comfy-aimdo's page table, over real memory of this machine.

comfy-aimdo has no CPU device, and ComfyUI's ``ModelPatcherDynamic`` gives way to ``ModelPatcher`` on one. So three
things are put in their place for tests, and nothing else is: the page table (``Card``, ``Pages``), the making of a
tensor at an address, and the question in ``cast_bias_weight`` whether a layer's weights are mapped, which asks for a
GPU. What copies, casts, patches and fills weights is ComfyUI's own code.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tools.architectures import is_older
from tools.driving import SMALL_UNET

PAGE = 4096
ENOUGH = 1 << 20  # pages
GARBAGE = 0xFF  # what lies in a page that was given away: not a number, in every dtype
IN_STREAM = [  # the marks of tests in which steps fetch weights
    pytest.mark.usefixtures("clean_stats", "one_thread", "written_over"),
    pytest.mark.skipif(is_older(), reason="it maps no weights in"),
]


class Card:
    """So much memory for all models together, in pages. counts: of several who ask for a page, each must give it free;
    in comfy-aimdo before 0.3 the first one did so for all.
    """

    def __init__(self, pages: int = ENOUGH, counts: bool = True) -> None:
        self.pages, self.counts, self.tables = pages, counts, list[Pages]()

    @property
    def resident(self) -> int:
        return sum(len(table.there) for table in self.tables)


class Pages:
    """As ``comfy_aimdo.model_vbar.ModelVBAR``: addresses that stay, memory as long as there is room."""

    def __init__(self, card: Card, size: int) -> None:
        self.card, self.device, self.offset = card, 0, 0
        self.count = -(-size // PAGE)
        self.watermark = self.count
        self.memory = torch.full((self.count * PAGE,), GARBAGE, dtype=torch.uint8)
        self.base_addr = self.memory.data_ptr()
        self.serials = [0] * self.count
        self.there: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.short_at: nn.Module | None = None  # the layer at whose turn the image's own memory pushes pages out
        card.tables.append(self)

    @property
    def pinned(self) -> set[int]:
        """Pages that stay."""
        return {page for page, count in self.pins.items() if count}

    def alloc(self, size: int) -> tuple["Pages", int, int]:
        self.offset = -(-self.offset // 512) * 512
        place = self.base_addr + self.offset
        self.offset += size
        assert self.offset <= self.count * PAGE
        return self, place, size

    def _range(self, address: int, size: int) -> range:
        start = address - self.base_addr
        return range(start // PAGE, -(-(start + size) // PAGE))

    def fault(self, address: int, size: int) -> Any:
        pages = self._range(address, size)
        signature = (ctypes.c_uint32 * (size // PAGE + 2))()
        if pages.stop > self.watermark:
            return None
        looked = False
        for index, page in enumerate(pages):
            if page not in self.there:
                if not looked:
                    looked = True
                    self._find_room(pages.stop, self.card.pages - self.card.resident - (pages.stop - page))
                    if pages.stop > self.watermark:
                        return None
                self.there.add(page)
                self.serials[page] += 1
            signature[index] = self.serials[page]
        self.pins.update(pages)
        return signature

    def _find_room(self, target: int, surplus: int) -> None:
        """As comfy-aimdo: models of lower priority first, each from its end, and what is not there helps nothing."""
        cursor = self._absent(0)
        while surplus >= 1 and cursor < min(target, self.watermark):
            surplus, cursor = surplus - 1, self._absent(cursor + 1)
        for table in [*(each for each in self.card.tables if each is not self), self]:
            while table.watermark and (cursor < min(target, self.watermark) or surplus < 0):
                page = table.watermark - 1
                if page in table.there and not table.pins[page]:
                    table.give_away(page)
                    surplus += 1
                    while surplus >= 1 and cursor < min(target, self.watermark):
                        surplus, cursor = surplus - 1, self._absent(cursor + 1)
                table.watermark = page

    def _absent(self, page: int) -> int:
        while page < self.watermark and page in self.there:
            page += 1
        return page

    def give_away(self, *pages: int) -> None:
        """Something else has this memory now."""
        for page in pages or list(self.there):
            self.there.discard(page)
            ctypes.memset(self.base_addr + page * PAGE, GARBAGE, PAGE)  # which no recorder hears

    def turn_of(self, layer: nn.Module) -> None:
        """ComfyUI's own forward has come to ``layer``."""
        if layer is self.short_at:
            self.give_away(0, self.count - 1)

    def unpin(self, address: int, size: int) -> None:
        for page in self._range(address, size):
            self.pins[page] = max(0, self.pins[page] - 1) if self.card.counts else 0
            if page >= self.watermark and page in self.there and not self.pins[page]:
                self.give_away(page)

    def loaded_size(self) -> int:
        return len(self.there) * PAGE

    def prioritize(self) -> None:
        self.watermark = self.count


def tensor_at(place: tuple[Any, int, int], device: torch.device) -> Tensor:
    """As ``comfy_aimdo.torch.aimdo_to_tensor``: with a storage of its own."""
    _, address, size = place
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def missing() -> str:
    """Why no weights can be mapped in here; "" where they can."""
    import comfy.ops

    try:
        import comfy_aimdo.model_vbar  # noqa: F401
    except ImportError:
        return "there is no comfy-aimdo"
    return "" if hasattr(comfy.ops, "cast_modules_with_vbar") else "this ComfyUI maps no weights in"


def use(monkeypatch: Any) -> None:
    """Has ComfyUI map weights of layers with ``_v`` in, on the CPU."""
    import comfy.model_management as mm
    import comfy.ops
    import comfy_aimdo.model_vbar as vbars
    import comfy_aimdo.torch

    own = comfy.ops.cast_bias_weight

    def cast_bias_weight(
        s: nn.Module, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None,  # noqa: A002
        offloadable: bool = False, compute_dtype: Any = None, want_requant: bool = False,
    ) -> Any:  # fmt: skip
        if not hasattr(s, "_v"):
            return own(s, input, dtype, device, bias_dtype, offloadable, compute_dtype, want_requant)
        s._v[0].turn_of(s)
        dtype = dtype or input.dtype
        device, bias_dtype = device or input.device, bias_dtype or dtype
        prefetched, kept = hasattr(s, "_prefetch"), None
        if not prefetched:
            mm.sync_stream(device, comfy.ops.cast_modules_with_vbar([s], dtype, device, bias_dtype, False))
        weight, bias = comfy.ops.resolve_cast_module_with_vbar(
            s, dtype, device, bias_dtype, compute_dtype, want_requant
        )
        if not prefetched:
            kept = device if s._prefetch["signature"] is not None else None
            for key in ("weight", "bias"):
                if getattr(s, f"{key}_lowvram_function", None) is not None:
                    getattr(s, f"{key}_lowvram_function").clear_prepared()
            del s._prefetch
        return (weight, bias, (None, kept, None)) if offloadable else (weight, bias)

    cast_bias_weight.__module__ = own.__module__  # as little another pack's as the function in its place
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast_bias_weight)
    monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", tensor_at)
    monkeypatch.setattr(vbars, "vbars_analyze", lambda device=None: 0)
    monkeypatch.setattr(comfy.ops.args, "disable_pinned_memory", True)


def write_over(monkeypatch: Any) -> None:
    """Has what a step of ours has fetched be written over when it is done, as the next layers' weights do it."""
    from anyshape.accel.comfy import streaming
    from anyshape.accel.comfy.layer_casts import NOTES

    own = streaming.Cast

    @contextmanager
    def cast(parts: list, device: torch.device, dtype: torch.dtype) -> Iterator[list]:
        brought = [part for part in parts if NOTES in part.__dict__]  # by ComfyUI's queue, which still has them
        with own(parts, device, dtype) as found:
            lent: list[Tensor | None] = []
            for part, pair in zip(parts, found, strict=True):
                notes = part.__dict__.get(NOTES)
                if notes is not None and notes["signature"] is None and part not in brought:
                    lent += pair
            yield found
        for tensor in [inner for weight in lent if weight is not None for inner in _inner(weight)]:
            if tensor.ndim:
                tensor.view(torch.uint8).fill_(GARBAGE)

    monkeypatch.setattr(streaming, "Cast", cast)


def _inner(weight: Tensor) -> list[Tensor]:
    """The tensors that a quantised weight is made of, or ``weight``."""
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
    return [getattr(weight, name) for name in names] or [weight]


SMALL = 1024  # bytes; ComfyUI's own bound is 16 KB, more than most layers of a tiny model have


class Loads:
    """What ``ModelPatcherDynamic.load`` does to a model's layers, for a card of this kind."""

    def __init__(self, model: nn.Module, card: Card, dtype: torch.dtype | None = None) -> None:
        """dtype: that of the weights on the card, if not as in the file."""
        self.model, self.dtype = model, dtype
        parts = [part for part in model.modules() if hasattr(part, "comfy_cast_weights")]
        self.layers = [
            part
            for part in parts
            if sum(weight.nbytes for weight in part._parameters.values() if weight is not None) > SMALL
        ]
        self.pages = Pages(card, sum(_size(part) + 2048 for part in self.layers) + PAGE)
        self.own = {part: dict(part._parameters) for part in model.modules() if part not in self.layers}

    def __call__(self, patches: dict[str, Any] | None = None, dirty: bool = False) -> None:
        """One load. patches: what a LoRA does, by the name of the weight in the model."""
        self.pages.prioritize()
        names = {part: name for name, part in self.model.named_modules()}
        for part in names:
            if hasattr(part, "comfy_cast_weights"):
                part.comfy_cast_weights, part.seed_key, part._pin_state = True, names[part], {}
                if dirty or not hasattr(part, "_v_signature"):
                    part._v_signature = None
        for part in self.layers:
            for key in ("weight", "bias"):
                weight = part._parameters.get(key)
                if weight is None:
                    continue
                patch = (patches or {}).get(f"{names[part]}.{key}")
                if patch is not None:
                    patch = patch(f"{names[part]}.{key}")
                    patch._pin_state = {}
                setattr(part, f"{key}_lowvram_function", patch)
                setattr(part, f"{key}_function", [])
                if type(weight) is nn.Parameter:  # a quantised one has a form of its own
                    weight._model_dtype = self.dtype or weight.dtype
            if not hasattr(part, "_v"):
                part._v = self.pages.alloc(_size(part))
        for part, parameters in self.own.items():
            for name, weight in parameters.items():
                if weight is not None:  # to another place, each time
                    part._parameters[name] = nn.Parameter(weight.detach().clone(), requires_grad=False)


def is_clean(load: Loads) -> bool:
    """Whether layers are as ComfyUI leaves them: no page is kept, and nothing of ours lies there."""
    return not load.pages.pinned and not any("_prefetch" in part.__dict__ for part in load.layers)


def loaded_unet(models: Any, card: Card) -> Loads:
    """A small UNet of ``bench.models`` after a load; its patcher is ``patcher``."""
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    made = Loads(patcher.model.diffusion_model, card)
    made.patcher = patcher
    made()
    return made


def _size(part: nn.Module) -> int:
    from comfy.memory_management import vram_aligned_size

    return sum(vram_aligned_size(weight) for weight in part._parameters.values() if weight is not None)
