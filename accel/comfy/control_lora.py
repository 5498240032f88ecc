"""Control-LoRAs: ComfyUI builds their network again for each run, of the model's own weights and of small matrices.

So what is kept belongs to the file: one engine, whose recordings fit every network of the same form. A run's network is
shared by all controls of its file, as all would build the same one.
"""

import threading
import weakref

import comfy.controlnet
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine import Engine
from ..fingerprint import ModuleFingerprint
from ..stats import STATS
from .controlnet_run import KIND, Sampling, shadow_of
from .known_code import Fingerprints
from .surroundings import INTERRUPTS

NAME = "Control-LoRA"  # in the stats


class File:
    """What is kept for one Control-LoRA file."""

    def __init__(self) -> None:
        self.sampling = Sampling(Engine(STATS.model(NAME, KIND), INTERRUPTS), SameForm(), built_again=True)
        # the controls that are in a run, and the diffusion model that they steer
        self._steered: weakref.WeakKeyDictionary[comfy.controlnet.ControlLora, weakref.ref[nn.Module]]
        self._steered = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict) -> "File":
        """A control that is copied to the bottom has equal weights."""
        return self

    def built(self, control: comfy.controlnet.ControlLora, diffusion_model: nn.Module, verify: bool) -> None:
        """ComfyUI has built ``control``'s network: it serves all controls of this file on the same model."""
        shadow = shadow_of(control.control_model, verify, self.sampling)
        with self._lock:
            self._steered[control] = weakref.ref(diffusion_model)
            for other, steered in list(self._steered.items()):
                if steered() is diffusion_model:
                    other.control_model = shadow

    def over(self, control: comfy.controlnet.ControlLora) -> None:
        """``control``'s run is over."""
        with self._lock:
            self._steered.pop(control, None)
        self.sampling.end(control)


_FILES: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # by one of the file's tensors, which copies of a control share
_LOCK = threading.Lock()


def file_of(control: comfy.controlnet.ControlLora) -> File:
    """Returns what is kept for the file of ``control``."""
    first = next(item for item in control.control_weights.values() if isinstance(item, Tensor))
    with _LOCK:
        if first not in _FILES:
            _FILES[first] = File()
        return _FILES[first]


class SameForm(Fingerprints):
    """Of networks that are built again: one that differs in nothing but its parts' identity has the same number."""

    def of(self, model: nn.Module) -> int:
        """As in ``Fingerprints``."""
        last = self._current
        if last is None or last.is_of(model):
            return super().of(model)
        self._earlier.clear()  # those look at the networks that they are of
        if not last.fits(model):
            self.release()
            self._current = None
            return super().of(model)
        self._current = ModuleFingerprint(model)
        return self._number
