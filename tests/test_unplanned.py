"""What a forward computes without its library's plans is what it gives with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tools import embed

embed.bare_pack()

from anyshape.accel.tape.unplanned import (  # noqa: E402 - the package exists from the line above on
    ATTENTION,
    CONVOLUTION,
    heard,
    instead,
    void,
)

LAST = torch.channels_last


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "x", [randn(2, 6, 5, 3), randn(2, 6, 5, 3).to(memory_format=LAST), randn(1, 5, 6, 3).mT.mT[:, :, :3]]
)
@pytest.mark.parametrize("bias", [None, randn(4)])
def test_a_convolution_of_a_pixel(x: Tensor, bias: Tensor | None) -> None:
    """Its result lies as the library's."""
    weight = randn(4, x.shape[1], 1, 1)
    out = instead(CONVOLUTION, (x, weight, bias), {})
    wanted = F.conv2d(x, weight, bias)
    torch.testing.assert_close(out, wanted)
    assert out.stride() == wanted.stride()
    torch.testing.assert_close(instead(CONVOLUTION, (x, weight), {"bias": bias, "padding": [0, 0]}), wanted)


@pytest.mark.parametrize("given", [{"stride": [2, 2]}, {"padding": [1, 1]}, {"groups": 2}])
def test_other_convolutions_are_the_librarys(given: dict) -> None:
    x, weight = randn(1, 4, 5, 5), randn(4, 4 // given.get("groups", 1), 1, 1)
    assert instead(CONVOLUTION, (x, weight), given) is None
    assert instead(CONVOLUTION, (x, randn(4, 4, 3, 3)), {}) is None
    assert instead(torch.ops.aten.linear.default, (x, weight), {}) is None


def test_what_attention_gives_besides_its_result_is_heard_of_a_real_call(monkeypatch) -> None:
    """A call of cuDNN's just to see it takes long."""
    from anyshape.accel.tape import unplanned

    monkeypatch.setattr(unplanned, "_BESIDES", {})
    given = (*[torch.randn(1, 2, 5, 8)] * 3, None, False, 0.0, False, False)
    assert void(given, {}) is None and instead(ATTENTION, given, {}) is None
    large, seed = torch.empty(1, 2, 5, 1), torch.zeros(())
    heard(given, {}, (given[0], large.expand(1, 2, 5, 4), None, 5, seed))  # what a gradient needs: not kept
    heard((*given[:4], True, *given[5:]), {}, (given[0], None, None, 5, seed))
    assert void(given, {}) is None
    heard(given, {}, (given[0], None, None, 5, seed))
    out, *besides = void((*[torch.randn(2, 2, 9, 8)] * 3, *given[3:]), {})
    assert out.shape == (2, 2, 9, 8) and besides[:3] == [None, None, 5] and besides[3] is not seed
    assert besides[3].data_ptr() == seed.data_ptr()
    assert void((*given[:4], True, *given[5:]), {}) is None
