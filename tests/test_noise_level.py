"""The noise level as patches of other packs read it: once per forward, and never another number than the GPU's.

On the CPU: what is counted are readings of the tensor that stands for the GPU's.
"""

import pytest
import torch
from torch import Tensor

from tools import embed

embed.bare_pack()

from anyshape.accel.tape.noise_level import NoiseLevel, _Source  # noqa: E402 - the package exists from the line above on

READINGS = {  # each as packs have it
    "IPAdapter": lambda s: s.detach().cpu()[0].item(),
    "an element": lambda s: s[0].item(),
    "the largest": lambda s: s.max().item(),
    "a float": lambda s: float(s[0]),
    "in a condition": lambda s: bool(2.0 < s[0] <= 7.5),
    "a share": lambda s: bool(0.5 <= 1 - s[0] / 14.6),
    "moved": lambda s: s.to("cpu")[1].item(),
    "moved and cast": lambda s: s.to(device=torch.device("cpu"), dtype=torch.float64).tolist(),
    "a list": lambda s: s.tolist(),
    "an array": lambda s: s.double().cpu().numpy().sum().item(),
    "with another tensor": lambda s: (s.cpu() == torch.tensor([7.5, 7.25])).all().item(),
    "shown": lambda s: f"{s[0]:.3f} {s}",
}


@pytest.fixture
def level():
    """(a noise level, its readings from the device, the tensor)."""
    tensor, readings = torch.tensor([7.5, 7.25]), []

    def host():
        readings.append(1)
        return tensor.clone()

    return NoiseLevel.made(tensor, _Source(), host), readings, tensor


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_it_is_read_once(level, read):
    found, readings, tensor = level
    for _ in range(3):
        assert read(found) == read(tensor)
    assert len(readings) == (read is not READINGS["a share"])  # a GPU divides otherwise


def test_what_computes_with_it_gets_tensors(level):
    found, readings, tensor = level
    x = torch.randn(2, 3)
    for out in (
        x * found[:, None],
        torch.cat([found, found]),
        found.log(),
        found.expand(3, 2),
        torch.where(found > 7.3, 1, 0),
    ):
        assert type(out) is Tensor
    assert torch.equal(x * found[:, None], x * tensor[:, None])
    assert isinstance(found, Tensor) and found.shape == tensor.shape and found.data_ptr() == tensor.data_ptr()
    assert not readings


@pytest.mark.parametrize(
    "write",
    [lambda s: s.mul_(2), lambda s: s.__setitem__(0, 3.0), lambda s: s[0].fill_(1), lambda s: torch.mul(s, 2, out=s)],
    ids=["in place", "an element", "a view", "out"],
)
def test_what_was_changed_in_place_is_read_as_it_is(level, write):
    found, readings, tensor = level
    first = found[0]
    assert first.item() == 7.5
    write(found)
    assert (found.tolist(), first.item()) == (tensor.tolist(), tensor[0].item()) != ([7.5, 7.25], 7.5)
    assert len(readings) == 1


def test_what_was_read_is_the_patchs_own(level):
    """Writing into it changes neither the tensor nor what is read next."""
    found, readings, tensor = level
    found.cpu().mul_(0)
    found.cpu().numpy()[:] = 0
    assert found.tolist() == tensor.tolist() == [7.5, 7.25] and len(readings) == 1


def test_indices_and_lists_that_hold_tensors(level):
    found, readings, tensor = level
    at = torch.tensor([1])
    assert torch.equal(found[(at,)], tensor[at]) and torch.equal(torch.stack([found, found])[0], tensor)
    assert not readings
    torch._foreach_mul_([found], 2.0)
    assert found.tolist() == tensor.tolist() == [15.0, 14.5]


def test_a_cpus_tensor_is_itself():
    tensor = torch.ones(2)
    assert NoiseLevel.of(tensor) is tensor
