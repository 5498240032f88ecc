"""What the tests of Skip Blocks share: a sampling run, and what is known of the models of ``tools.architectures``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tools.oracles import error

STEPS = 9  # as few as leave some to skip
RUN = {"width": 72, "height": 56, "steps": STEPS}  # of bench.models.sample; odd latent sides
PLANNED = {"full": 3, "skipped": 6, "resets": {}}  # of as many steps, by default
BLOCKS = 5  # in each list of blocks of a transformer
# Their first block lays the stream out in another order, so it always runs, and the last one with it.
FIRST_RUNS = ("WAN21_T2V", "WAN22_T2V", "WAN21_CausalAR_T2V", "CogVideoX_T2V")


def left_out(patcher: Any, name: str, make: Callable[[nn.Module], Any], close: float) -> tuple[Tensor, ...] | str:
    """The features of one forward of a tiny model, or why there are none; tried with what ``make`` gives of a model.

    Asserts that a full step is the model's own to the bit, that with its own features a skipped one is within ``close``
    of it, and that without them it is not.
    """
    from tools.architectures import patchers

    model = patcher.model.diffusion_model

    def forward() -> Tensor:
        return torch.cat([part.flatten() for part in patchers.apply(patcher, 1, name)])

    with torch.inference_mode():
        own, rows, blocks = forward(), len(patchers.apply(patcher, 1, name)[0]), make(model)
        out, features = blocks.full(model, forward, rows)
        assert torch.equal(out, own)
        if not isinstance(features, str):
            nothing = [torch.zeros_like(feature) for feature in features]
            assert error(blocks.skipped(model, forward, features), own) < close
            assert error(blocks.skipped(model, forward, nothing), own) > 1e-3
    return features


class Call(NamedTuple):
    """How one call of a model ran under Skip Blocks, and at which noise level."""

    skipped: bool
    sigma: float
    stored: bool = False  # features of it were
    first: bool = False  # of their kind: the model is on no tape any more


def log_calls(patch: Any, log: list[Call]) -> None:
    """Logs each call of a model under Skip Blocks, from here on. patch: pytest's."""
    from anyshape.accel.skip.features import SkipRun

    call, in_full, store = SkipRun.call, SkipRun.in_full, SkipRun._store

    def called(self: Any, *args: Any) -> Tensor:
        log.append(Call(False, self._sigma()))
        before, place = self.stats.skipped, len(log) - 1
        out = call(self, *args)
        del log[place + 1 :]  # it counted itself
        log[place] = log[place]._replace(skipped=self.stats.skipped > before)
        return out

    def counted_in_full(self: Any, reason: str) -> None:
        log.append(Call(False, self._sigma()))
        in_full(self, reason)

    def stored(self: Any, parts: list, *args: Any) -> None:
        log[-1] = log[-1]._replace(stored=True, first=any(part not in self._entries for part in parts))
        store(self, parts, *args)

    patch.setattr(SkipRun, "call", called)
    patch.setattr(SkipRun, "in_full", counted_in_full)
    patch.setattr(SkipRun, "_store", stored)


def has_blocks_of_others(model: nn.Module) -> bool:
    """Whether a block's forward was replaced. A recording leaves it out with the others, and ``following`` does not."""
    from anyshape.accel.tape import blocks

    return any("forward" in vars(model.get_submodule(path)) for path in blocks.find(model))


def following(patcher: Any, log: list[Call], depth: int) -> Any:
    """A clone of a model that leaves out, by ComfyUI's own operations alone, what the calls of ``log`` left out.

    For runs of one prompt's batch on a model that leaves no more out than ``unrecorded`` does.
    """
    from anyshape.accel.skip.settings import SkipSettings
    from anyshape.accel.skip.unrecorded import UnrecordedBlocks
    from anyshape.accel.skip.unrecorded_stages import UnrecordedStages
    from anyshape.accel.tape import blocks
    from comfy.patcher_extension import WrappersMP

    calls, made, histories, sigma = iter(log), None, [], float("inf")

    def forward(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal made, histories, sigma
        model, own, call = executor.class_obj, lambda: executor(*args, **kwargs), next(calls, Call(False, 0.0))
        if made is None or call.sigma > sigma:  # a run begins
            made, histories = (UnrecordedStages if blocks.stages(model) else UnrecordedBlocks)(model, depth, ()), []
        sigma = call.sigma
        if call.skipped:
            return made.skipped(model, own, tuple(each.at(sigma).clone() for each in histories))
        if not call.stored:
            return own()
        out, features = made.full(model, own, len(args[0]))
        histories = [] if call.first else histories
        histories = histories or [SkipSettings().history(())() for _ in features]
        for history, feature in zip(histories, features, strict=True):
            history.add(sigma, feature)
        return out

    follower = patcher.clone()
    follower.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "follows", forward)
    return follower
