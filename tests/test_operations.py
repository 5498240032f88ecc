"""Fused operations by hand as operations of torch: what they compute, and what their fakes say of it. CPU and GPU."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tools import embed

CUDA = embed.has_cuda()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

embed.bare_pack()

from anyshape.accel.kernels import operations, reference  # noqa: E402
from anyshape.accel.tape.program import _calls  # noqa: E402
from anyshape.accel.tape.rules.epilogue import linear_gelu  # noqa: E402
from anyshape.accel.tape.values import Operation  # noqa: E402

pytestmark = [pytest.mark.gpu] if CUDA else []
DEVICE = "cuda" if CUDA else "cpu"
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def layers(count: int, depth: int) -> tuple[list[Tensor], list[Tensor]]:
    return [randn(40 + 8 * i, depth) for i in range(count)], [randn(40 + 8 * i) for i in range(count)]


def video_cases() -> dict[str, tuple]:
    """Those of videos [N, C, T, H, W], and what torch's own kernels put channels first for."""
    x, one, norm, bias = randn(2, 64, 3, 5, 4), randn(1, 64, 1, 5, 4), randn(64), randn(64)
    conv, pixel, added = randn(32, 64, 3, 3, 3), randn(32, 64, 1, 1, 1), randn(32)
    turned = one[:, :, 0].permute(0, 2, 3, 1).contiguous()[:, None].movedim(-1, 1)  # strides of ones as they come
    exact = [each.double() for each in (x, norm, bias)]
    around, mirrored = [1, 1, 0, 2, 2, 0], [1, 2, 2, 1]
    found: dict[str, tuple] = {
        "video": (
            operations.conv3d_last, (x, conv, added, [1, 2, 2], [1, 1, 0], [1, 1, 1], 1, False),
            F.conv3d(x.double(), conv.double(), added.double(), (1, 2, 2), (1, 1, 0)),
        ),
        "video of a pixel": (
            operations.conv3d_last, (x, pixel, added, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1, False),
            F.conv3d(x.double(), pixel.double(), added.double()),
        ),
        "norm of a video": (
            operations.group_norm_last, (x, norm, bias, 8, 1e-5, None, True, []),
            F.silu(F.group_norm(exact[0], 8, *exact[1:])),
        ),
        "repeated pixels": (operations.pad_last, (x, around, "replicate"), F.pad(exact[0], around, "replicate")),
        "mirrored pixels": (
            operations.pad_last, (x[:, :, 0], mirrored, "reflect"), F.pad(exact[0][:, :, 0], mirrored, "reflect"),
        ),
    }  # fmt: skip
    for name, frame in (("one frame", one), ("one frame with channels last", turned)):
        found[name] = (
            operations.conv3d_last, (frame, conv, None, [1, 1, 1], [1, 1, 1], [1, 1, 1], 1, False),
            F.conv3d(frame.double(), conv.double(), None, padding=1),
        )  # fmt: skip
    return found


def cases() -> dict[str, tuple]:
    """Operation, arguments, and what it must give, by name."""
    x, norm, bias = randn(2, 64, 5, 3), randn(64), randn(64)
    shift, pending = randn(2, 64, 1, 1), [randn(64), randn(64)]
    conv, pixel, added_last = randn(32, 64, 3, 3), randn(32, 64, 1, 1), randn(32)
    tokens, wide, offset = randn(2, 7, 64), randn(96, 64), randn(96)
    q, k, v = randn(2, 9, 64), randn(2, 5, 64), randn(2, 5, 64)
    (weights, biases), several = layers(9, 64), [randn(2, 7, 64) for _ in range(9)]
    exact = [each.double() for each in (x, norm, bias, shift[:, :, 0, 0])]
    added = tuple(each.double() for each in pending)
    table, bare = operations.table_of(9, False, *weights, *biases), operations.table_of(9, False, *weights)
    return {
        "convolution": (
            operations.conv2d_last, (x, conv, added_last, [2, 2], [1, 1], [1, 1], 1),
            F.conv2d(x.double(), conv.double(), added_last.double(), 2, 1),
        ),
        "convolution of a pixel": (
            operations.conv2d_last, (x, pixel, added_last, [1, 1], [0, 0], [1, 1], 1),
            F.conv2d(x.double(), pixel.double(), added_last.double()),
        ),
        "every other pixel": (
            operations.conv2d_last, (x, pixel, None, [2, 2], [0, 0], [1, 1], 1),
            F.conv2d(x.double(), pixel.double(), None, 2),
        ),
        **video_cases(),
        "norm": (
            operations.group_norm_last, (x, norm, bias, 8, 1e-5, shift, True, pending),
            reference.group_norm(*exact[:3], 8, 1e-5, exact[3], True, added),
        ),
        "bare norm": (
            operations.group_norm_last, (x.to(memory_format=LAST), None, None, 8, 1e-6, None, False, []),
            reference.group_norm(exact[0], None, None, 8, 1e-6, silu=False),
        ),
        "geglu": (
            operations.linear_geglu, (tokens, wide, offset),
            reference.linear_geglu(tokens.double(), wide.double(), offset.double()),
        ),
        "attention": (
            operations.flash_attention, (q, k, v, 4), reference.flash_attention(q.double(), k.double(), v.double(), 4)
        ),
        "layers": (
            operations.grouped_linear, ([tokens], weights, biases, table),
            [F.linear(tokens.double(), w.double(), b.double()) for w, b in zip(weights, biases, strict=True)],
        ),
        "layers without biases": (
            operations.grouped_linear, ([tokens], weights, [None] * 9, bare),
            [F.linear(tokens.double(), w.double()) for w in weights],
        ),
        "layers of one input each": (
            operations.grouped_linear, (several, weights, biases, operations.table_of(9, True, *weights, *biases)),
            [F.linear(x.double(), w.double(), b.double()) for x, w, b in zip(several, weights, biases, strict=True)],
        ),
        "layers of one input each that fit no table": (
            operations.grouped_linear, (several, weights, biases, table[:0]),
            [F.linear(x.double(), w.double(), b.double()) for x, w, b in zip(several, weights, biases, strict=True)],
        ),
        "layers that fit no table": (
            operations.grouped_linear, ([tokens], weights, biases, table[:0]),
            [F.linear(tokens.double(), w.double(), b.double()) for w, b in zip(weights, biases, strict=True)],
        ),
        "upsampling": (operations.upsample_last, (x, 9, 6), F.interpolate(x.double(), size=(9, 6))),
    }  # fmt: skip


NAMES = list(cases())


@pytest.mark.parametrize("name", NAMES)
def test_operation_computes_what_the_reference_says(name):
    operation, args, expected = cases()[name]
    with torch.inference_mode():
        out = operation(*args)
    outs, wanted = (list(each) if isinstance(each, (list, tuple)) else [each] for each in (out, expected))
    assert len(outs) == len(wanted)
    for each, exact in zip(outs, wanted, strict=True):
        assert each.shape == exact.shape and each.dtype == torch.float16
        assert (each.double() - exact).norm() / exact.norm() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_fake_says_the_form_of_the_result(name):
    """Shapes, dtypes, strides: on tensors without memory as on others."""
    operation, args, _ = cases()[name]
    torch.library.opcheck(operation, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["convolution", "norm", "bare norm", "upsampling", *video_cases()])
def test_pictures_come_out_in_channels_last(name):
    """By each stride, of what there is one of, too: torch's convolutions go by them."""
    operation, args, _ = cases()[name]
    last = operations.LASTS[args[0].ndim]
    with torch.inference_mode():
        rows = operation(*args).movedim(1, -1)
        assert rows.stride() == torch.empty(rows.shape).stride()
        turned = args[0].contiguous(), args[0].to(memory_format=last)
        first, second = (operation(each, *args[1:]) for each in turned)
    convolved = operation in operations.CONVOLUTIONS  # by another algorithm of a CPU's, perhaps
    assert torch.equal(first, second) or (convolved and torch.allclose(first, second, rtol=1e-2, atol=1e-2))


def test_attention_to_many_keys_is_the_librarys():
    q, k, v = randn(1, 4, 32), randn(1, 300, 32), randn(1, 300, 32)
    with torch.inference_mode():
        out = operations.flash_attention(q, k, v, 2)
    exact = reference.flash_attention(q.double(), k.double(), v.double(), 2)
    assert (out.double() - exact).norm() / exact.norm() < 1e-3


def test_layers_that_are_not_aligned_have_no_table():
    weights, biases = layers(2, 64)
    assert len(operations.table_of(2, False, *weights, *biases)) and len(operations.table_of(2, False, *weights))
    odd = randn(64 * 64 + 1)[1:].view(64, 64)
    assert not len(operations.table_of(2, False, weights[0], odd))
    assert not len(operations.table_of(2, False, *[weight.float() for weight in weights]))
    assert not len(operations.table_of(2, False, *weights, biases[0], biases[1].float()))


def test_what_a_program_calls_is_known_for_torch_and_ours_alone() -> None:
    """Of another library's functions nobody knows what they do at their first call with larger tensors."""
    linear, gelu = torch.ops.aten.linear.default, torch.ops.aten.gelu.default
    of_torch = [Operation(func, (), {}, [], opaque=opaque) for func, opaque in ((linear, False), (linear_gelu, True))]
    assert _calls([*of_torch, Operation(operations.conv2d_last, (), {}, [])]) == {
        (linear, ""), (linear_gelu, ""), (operations.conv2d_last, "")
    }  # fmt: skip
    assert _calls(of_torch) != _calls([Operation(gelu, (), {}, [])])
    assert _calls([*of_torch, Operation(len, (), {}, [], opaque=True)]) == frozenset()
