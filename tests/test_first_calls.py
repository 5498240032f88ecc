"""What a program asks of other libraries: found by form, and made by itself."""

import pytest
import torch
from torch import Tensor, nn

from tools import architectures

pytest_plugins = ("tools.quantised_fixtures",)
pytestmark = pytest.mark.usefixtures("pack", "one_thread")


@torch.library.custom_op("anyshape_first_calls::taken", mutates_args=())
def taken(x: Tensor, places: Tensor) -> Tensor:
    """Of another library: rows of x [N, C] by number."""
    return x[places]


@taken.register_fake
def _(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(len(places), x.shape[1])


@torch.library.custom_op("anyshape_first_calls::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Of another library, too. x [N, C]; it was heard of in ``HEARD``."""
    HEARD.append((tuple(x.shape), float(x.abs().max())))
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


HEARD: list[tuple[tuple[int, ...], float]] = []


class Two(nn.Module):
    """x [N, C] through layers whose results another library doubles; ``indexed``: and takes apart."""

    def __init__(self, indexed: bool = False) -> None:
        super().__init__()
        self.layers, self.indexed = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), indexed

    def forward(self, x: Tensor, transformer_options: dict) -> Tensor:
        for layer in self.layers:
            x = doubled(layer(x))
        return taken(x, x[:, 0].argsort()) if self.indexed else x


def recorded(module: nn.Module, rows: int):
    from tools.recording import recorded

    return recorded(module, (torch.randn(rows, 8), {}), {})


def test_one_call_of_each_form_is_made_of_zeros():
    made = recorded(Two(), 5)
    assert made.program.calls and len(made.program.others) == 1
    HEARD.clear()
    for call in made.program.others.values():
        call()
    assert HEARD == [((5, 8), 0.0)]
    assert torch.equal(made.run(), made.out)
    larger = recorded(made.module, 9).program.others
    assert len(larger) == 1 and not larger.keys() & made.program.others.keys()
    again = recorded(made.module, 5).program.others
    assert again.keys() == made.program.others.keys()


def test_numbers_that_may_be_places_are_never_made_up():
    """Nothing is known of the program's calls then: all of it runs before its capture."""
    made = recorded(Two(indexed=True), 5)
    assert not made.program.calls and not made.program.others
    assert torch.equal(made.run(), made.out)


@pytest.mark.parametrize("form", ["int8_tensorwise", "float8_e4m3fn"])
def test_layers_of_a_quantised_model(quantised, form):
    """Layers of one form are one call; none changes what the program gives."""
    from tools.architectures import taped

    model = quantised.make("ZImage", form)
    each = taped.Recording(model, *architectures.TABLE["ZImage"].inputs(1))
    program = each.program(fuse=False)
    others = program.others
    layers = sum("comfy_kitchen" in str(operation.func) for operation in each.tape.operations)
    assert 4 < len(others) < layers and program.calls
    for call in others.values():
        call()
    assert each.error(program, each.eager()) == 0.0
