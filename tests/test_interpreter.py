"""Interpreted kernels keep to their tensors, or the test that runs them fails. CPU."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tools.interpreter import OutOfBounds  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


@triton.jit
def copy_kernel(x, out, first, last, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i + last, tl.load(x + i + first, mask=i < N - first - last), mask=i < N - first - last)


@pytest.mark.parametrize("first, last", [(0, 0), (3, 0), (0, 3)])
def test_what_is_masked_is_not_touched(first, last):
    x, out = torch.arange(16.0), torch.zeros(16)
    copy_kernel[(1,)](x, out, first, last, 16)
    assert torch.equal(out[last : 16 - first], x[first : 16 - last])


@pytest.mark.parametrize("x, out", [(12, 16), (16, 12)], ids=["read", "written"])
def test_beside_a_tensor(x, out):
    with pytest.raises(OutOfBounds, match="copy_kernel touches"):
        copy_kernel[(1,)](torch.zeros(x), torch.zeros(out), 0, 0, 16)
