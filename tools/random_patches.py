"""Random patches of another pack on small models: does Compile Model give ComfyUI's pictures, to the bit?

    python -m tools.random_patches [--first 0] [--seconds 60]

A patch does at random what patches do: it writes into its tensors or into parts of them, gives them back as they are,
or others, counts its calls, keeps what it saw, draws random numbers, reads and writes options, and acts always, later,
in turns or at some noise levels. One to three of them are put on a model, which is sampled at three sizes, first
without us. On a GPU or a CPU (``tools.draws``). The number of a draw makes it again.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tools import draws

PLACES = {  # by kind of model in tools.architectures
    "SD15": (
        "input_block_patch", "input_block_patch_after_skip", "output_block_patch", "attn1_patch", "attn2_patch",
        "attn1_output_patch", "attn2_output_patch", "middle_patch", "middle_block_after_patch",
    ),
    "Flux": ("attn1_patch", "attn1_output_patch", "post_input"),
    "ZImage": ("double_block", "noise_refiner"),
    "QwenImage": ("double_block", "post_input"),
    "WAN21_T2V": ("double_block",),
    "Anima": ("post_input", "attn1_patch", "attn2_patch"),
}  # fmt: skip
RESULTS = {"output_block_patch": 2, "attn1_patch": 3, "attn2_patch": 3}  # how many tensors; else one
GIVEN = ("img", "txt", "h", "vec")  # tensors among the arguments of patches that take one dict
NAMED = ("q", "k", "v")  # what the attention patches of transformers give, in a dict
TIMES = ("always", "always", "late", "in turns", "by level", "by level, read back")
ACTS = ("write", "write a part", "new", "view", "clone", "write an option", "read an option", "draw", "write another")
SIZES = ((128, 128), (192, 128), (128, 128))


class Far(NamedTuple):
    """A draw whose pictures are others, or after which generators are elsewhere."""

    number: int
    kind: str
    patches: str
    run: int
    error: float
    drawn: bool


class RandomPatch:
    """One patch. Each gets a class, by which the engine knows it."""

    def __init__(self, seed: int, place: str) -> None:
        draw = random.Random(seed)
        self.place, self.calls, self.kept = place, 0, None
        self.counts, self.keeps = draw.random() < 0.6, draw.random() < 0.3
        self.when, self.which, self.level = draw.choice(TIMES), draw.randint(0, 5), draw.uniform(0.2, 5.0)
        self.acts = [draw.choice(ACTS) for _ in range(draw.randint(1, 3))]

    def __str__(self) -> str:
        also = [name for name in ("counts", "keeps") if getattr(self, name)]
        return f"{self.place}: {', '.join([self.when, *self.acts, *also])} ({self.which})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ComfyUI wants of a patch at this place."""
        if self.counts or self.when in ("late", "in turns"):
            self.calls += 1
        in_dict = len(args) == 1 and type(args[0]) is dict
        given = args[0] if in_dict else kwargs
        options = given.get("transformer_options") or given.get("extra_options") or args[-1]
        names = [name for name in GIVEN if in_dict and isinstance(given.get(name), Tensor)]
        tensors = [given[name] for name in names] or [each for each in args if isinstance(each, Tensor)]
        out = list(tensors)
        if self._acts_now(options):
            self._act(out, tensors, options)
        if in_dict:
            made = dict(zip(names, out, strict=True))
            return {"h": made["h"]} if "h" in made else given | made
        if "extra_options" in kwargs and self.place != "attn1_output_patch":
            others = {name: kwargs[name] for name in ("pe", "attn_mask") if name in kwargs}
            return dict(zip(NAMED, out, strict=False)) | others
        count = RESULTS.get(self.place, 1)
        return out[0] if count == 1 else tuple(out[:count])

    def _acts_now(self, options: dict[Any, Any]) -> bool:
        if self.when in ("late", "in turns"):
            return self.calls > 9 if self.when == "late" else bool(self.calls % 2)
        if self.when == "always":
            return True
        level = options["sigmas"][0]
        return (float(level) if self.when == "by level" else level.item()) < self.level

    def _act(self, out: list[Tensor], tensors: Sequence[Tensor], options: dict[Any, Any]) -> None:
        place, factor = self.which % len(out), 1 + 0.01 * (self.calls % 5 + 1)
        for act in self.acts:
            now, other = out[place], tensors[(place + 1) % len(tensors)]
            if act == "write":
                now.mul_(factor)
            elif act == "write a part":
                now[:, : max(1, now.shape[1] // 2)] += 0.01 * factor
            elif act == "write another":
                other.add_(0.01)
            elif act == "write an option":
                options["factor"] = factor
            else:
                out[place] = self._made(act, now, factor, options)
        if self.keeps:
            if self.kept is not None and self.kept.shape == out[place].shape:
                out[place] = out[place] + 0.05 * self.kept
            self.kept = out[place].clone()

    @staticmethod
    def _made(act: str, now: Tensor, factor: float, options: dict[Any, Any]) -> Tensor:
        if act == "new":
            return now * factor + 0.001
        if act == "read an option":
            return now * options.get("factor", 1.0)
        if act == "draw":
            return now + 0.01 * torch.randn(now.shape, device=now.device)
        return now.clone() if act == "clone" else now.transpose(-1, -2).transpose(-1, -2)


def compared(number: int) -> Iterator[Far]:
    """What is wrong with one draw. Nothing is said of patches with which ComfyUI itself fails."""
    from bench import models
    from tools.architectures import patchers
    from tools.driving import compiled
    from tools.oracles import error

    draw = random.Random(number)
    kind = draw.choice(list(PLACES))
    chosen = [(draw.randint(0, 10**6), draw.choice(PLACES[kind])) for _ in range(draw.randint(1, 3))]
    patcher = patchers.make(kind, device=draws.device())

    def patched(model: Any) -> Any:
        model = model.clone()
        for seed, place in chosen:
            model.set_model_patch(type(f"Patch{seed}", (RandomPatch,), {})(seed, place), place)
        return model

    def pictures(model: Any) -> Iterator[tuple[Tensor, list[Tensor]]]:
        for seed, (width, height) in enumerate(SIZES):
            torch.manual_seed(seed)
            run = {"width": width, "height": height, "frames": 5 if kind.startswith("WAN") else 1, "cfg": 3.0}
            out = models.sample(model, steps=4, seed=seed, tokens=24, **run)
            yield out, draws.generators()

    try:
        wanted = list(pictures(patched(patcher)))
    except Exception:  # noqa: BLE001 - such patches are of no use
        return
    if not all(out.isfinite().all() for out, _ in wanted):
        return
    shown = "; ".join(str(RandomPatch(*each)) for each in chosen)
    with pytest.MonkeyPatch.context() as patch:
        draws.stand_in(patch, f"patches {number}", fused=False)
        for run, (ours, theirs) in enumerate(zip(pictures(patched(compiled(patcher))), wanted, strict=True)):
            far, drawn = error(ours[0], theirs[0]), all(map(torch.equal, ours[1], theirs[1]))
            if far > draws.rounding() or not drawn:
                yield Far(number, kind, shown, run, far, drawn)


if __name__ == "__main__":
    draws.run(__doc__, compared)
