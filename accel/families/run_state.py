"""What is known of a model while it is sampled, and what speaks against running its call fused."""

import torch
from torch import Tensor, nn

from ..reasons import say
from ..weights import ChannelsLastWeights, WeightWatch
from .family import Arguments, Family
from .layers import autocast, surroundings

OPTIONS = frozenset({"rope_options"})  # keys of transformer_options that end so, and that a UNet does without


class Run:
    """What is known of one model during one sampling run. Holds the model: dropped when the run ends."""

    def __init__(self, family: Family, model: nn.Module, layout: ChannelsLastWeights | None) -> None:
        self.model = model
        self._family, self._layout = family, layout
        self._scan()

    def _scan(self) -> None:
        try:
            if self._layout is not None:
                self._layout.apply(self.model)
            self.plan = self._family.Plan(self.model)
            self._watch = WeightWatch(self.model)
            self._weights = self._watch.fingerprint()
        except BaseException:
            self.close()  # nobody else knows of this run yet, and the model is shared
            raise

    def refresh(self) -> None:
        """Looks again if weights moved or parts were hooked: ComfyUI and other packs may do either in mid-run."""
        if self._watch.fingerprint() != self._weights or self.plan.survey.is_stale():
            self._scan()

    def fingerprint(self) -> int:
        """What a graph of this model is valid for: where its weights lie, and what else decides its result."""
        return hash((self._weights, surroundings()))

    def close(self) -> None:
        """Leaves the weights as ComfyUI had them."""
        if self._layout is not None:
            self._layout.restore()


def call_obstacle(given: Arguments) -> str:
    """Why only ComfyUI's own forward is right for this call; "" if ours is."""
    if torch.is_grad_enabled():
        return say("training", what="model")
    if not isinstance(given.tensors["context"], Tensor):
        return say("no_prompt")
    unknown = sorted(name for name, value in given.extra.items() if value is not None)
    if unknown:
        return say("unknown_argument", what="model", names=", ".join(unknown))
    if strange := sorted(name for name in given.options if name.endswith("_options") and name not in OPTIONS):
        return say("unknown_argument", what="model", names=", ".join(strange))
    device, dtype = given.tensors["x"].device, given.tensors["x"].dtype
    if autocast(device):
        return autocast(device)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return say("dtype", dtype=dtype)
    return ""
