"""What a launch of a kernel is looked up by: at least what Triton compiles a variant for."""

import itertools
import types

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("pack")

NUMBERS = (0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 16, 2**63, 2**63 + 1, -1, -(2**31) - 1)
VALUES = (
    *NUMBERS, None, 1.5, 2.5, True, torch.zeros(4), torch.zeros(5)[1:], torch.zeros(4, dtype=torch.float16),
    torch.zeros(4, dtype=torch.int8), torch.zeros(17, dtype=torch.int8)[1:],
)  # fmt: skip


@pytest.mark.parametrize("specialised", [True, False])
def test_what_triton_tells_apart_is_told_apart(specialised) -> None:
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from anyshape.accel.kernels.launch import _trait
    from triton.backends.compiler import BaseBackend

    parameter = types.SimpleNamespace(is_constexpr=False, do_not_specialize=not specialised)
    for one, other in itertools.combinations(VALUES, 2):
        theirs = [native(BaseBackend, value, False, specialised, True) for value in (one, other)]
        if theirs[0] != theirs[1]:
            assert _trait(parameter, one) != _trait(parameter, other), (one, other)


def test_constants_of_a_kernel_are_told_apart_by_value_and_type() -> None:
    from anyshape.accel.kernels.launch import _trait

    parameter = types.SimpleNamespace(is_constexpr=True, do_not_specialize=False)
    assert len({_trait(parameter, value) for value in (1, 2, True, False, "a", None)}) == 6


@pytest.mark.gpu
def test_the_variant_that_runs_is_the_one_that_triton_would_take():
    """Over numbers that are 1, divisible by 16 or neither, and memory that is aligned or not; each compiled once."""
    from anyshape.accel.kernels import geglu_upsample, launch

    draw = torch.Generator("cuda").manual_seed(0)
    block = geglu_upsample.GEGLU_BLOCK
    for rows, inner, shift in ((1, 16, 0), (17, 33, 1), (160, 64, 0), (161, 64, 8), (1, 1, 3)):
        memory = torch.randn(rows * inner * 2 + shift, generator=draw, device="cuda").half()
        p = memory[shift:].view(rows, 2 * inner)
        outs = [torch.empty(rows, inner, device="cuda", dtype=torch.float16) for _ in range(3)]
        grid = (-(-rows // block[0]), -(-inner // block[1]))
        geglu_upsample.geglu_kernel[grid](p, outs[0], rows, inner, *block)
        for out in outs[1:]:
            launch.launch(geglu_upsample.geglu_kernel, grid, p, out, rows, inner, *block)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        assert outs[0].isfinite().all() and outs[0].abs().sum() > 0
