"""Every Triton kernel against its float64 reference on fresh random input.

On a GPU compiled; elsewhere by Triton's interpreter, on smaller tensors.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from tools import embed
from tools.group_norm_rounding import cancels, loses

CUDA = embed.has_cuda()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

from anyshape.accel.errors import Unavailable  # noqa: E402
from anyshape.accel.kernels import flash_attention, linear_geglu, reference  # noqa: E402
from anyshape.accel.kernels.geglu_upsample import geglu, upsample2x  # noqa: E402
from anyshape.accel.kernels.group_norm import group_norm  # noqa: E402
from anyshape.accel.kernels.grouped_linear import fits, grouped_linear, make_table  # noqa: E402
from anyshape.accel.kernels.triton_ops import KERNELS  # noqa: E402

pytestmark = [pytest.mark.gpu] if CUDA else []
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32]
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # Triton's interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = [(2, 96, 9, 11), (1, 320, 12, 9), (1, 64, 5, 29), (1, 32, 2, 1)]  # the third in two blocks of rows
LARGE = [(1, 320, 128, 128), (8, 640, 45, 33), (2, 1280, 23, 45), (1, 128, 544, 408), (2, 1920, 17, 17)]
LAST = torch.channels_last
JOINED = (1280, 640) if CUDA else (320, 160)
LENGTHS, HEADS = [(1, 1), (70, 77), (33, 154), (128, 231), (65, 128)], [(2, 128), (3, 120), (1, 128), (4, 64)]
LARGE_GEGLU = [(1024, 1280, 5120), (345, 640, 2560)] if CUDA else []
SIZES = SMALL + (LARGE if CUDA else [])


def crossed(one, other):
    """On a GPU each with each. The interpreter takes its time: all of the longer ``one``, each with the next other."""
    return [*(itertools.product(one, other) if CUDA else zip(one, itertools.cycle(other), strict=False))]


@pytest.fixture(autouse=True)
def _fresh_input():
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    print("seed", seed)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def assert_close(out, expected, dtype, at_least=0.0):
    error = relative_error(out, expected)
    assert torch.isfinite(out).all() and error <= max(TOLERANCE[dtype], at_least), f"relative error {error:.2e}"


def to_float64(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("variant", "size"), crossed(["shift", "plain", "no silu", "bare", "strided"], SIZES), ids=str)
def test_group_norm(size, dtype, variant):
    n, c, h, w = size
    x = randn(n, c, h, w, dtype=dtype)
    if variant == "strided":
        x = randn(n, c, w, 2 * h, dtype=dtype).transpose(2, 3)[:, :, ::2]
    weight, bias = (None, None) if variant == "bare" else (randn(c, dtype=dtype), randn(c, dtype=dtype))
    shift = randn(n, c, dtype=dtype) if variant == "shift" else None
    out = group_norm(x, weight, bias, 32, 1e-5, shift, silu=variant != "no silu")
    exact = to_float64(x, weight, bias, shift)
    expected = reference.group_norm(*exact[:3], 32, 1e-5, exact[3], variant != "no silu")
    assert_close(out, expected, dtype, at_least=loses(exact[0], exact[3], exact[1], expected))
    assert out.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("widths", "layout"),
    [*((widths, LAST) for widths in ((32, 64), (40, 24), JOINED, (20, 12))), ((40, 24), torch.contiguous_format)],
    ids=str,
)
def test_group_norm_of_a_joined_skip_connection(widths, layout, dtype):
    """Joined in channels_last it needs no copy; a patch may have left one of the two in another layout."""
    h, skip = (randn(2, width, 7, 9, dtype=dtype).to(memory_format=LAST) for width in widths)
    x, c = torch.cat([h, skip.contiguous(memory_format=layout)], dim=1), sum(widths)
    assert x.is_contiguous(memory_format=layout)
    weight, bias, shift = randn(c, dtype=dtype), randn(c, dtype=dtype), randn(2, c, dtype=dtype)
    exact = to_float64(x, weight, bias, shift)
    expected = reference.group_norm(*exact[:3], 32, 1e-5, exact[3])
    out = group_norm(x, weight, bias, 32, 1e-5, shift)
    assert_close(out, expected, dtype, at_least=loses(exact[0], exact[3], exact[1], expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_group_norm_adds_pending_biases(count, shifted, dtype):
    x, weight, bias = randn(2, 96, 7, 9, dtype=dtype), randn(96, dtype=dtype), randn(96, dtype=dtype)
    shift = randn(2, 96, dtype=dtype) if shifted else None
    pending = tuple(randn(96, dtype=dtype) for _ in range(count))
    exact, more = to_float64(x, weight, bias, shift), to_float64(*pending)
    expected = reference.group_norm(*exact[:3], 32, 1e-5, exact[3], pending=more)
    assert torch.equal(expected, reference.group_norm(*exact[:3], 32, 1e-5, _sum(exact[3], more)))
    out = group_norm(x, weight, bias, 32, 1e-5, shift, pending=pending)
    assert_close(out, expected, dtype, at_least=loses(exact[0], _sum(exact[3], more), exact[1], expected))


def _sum(shift, pending):
    return (sum(pending) if shift is None else sum(pending, shift)).expand(2, -1)


def test_group_norm_names_its_limit():
    x = randn(1, 32, 2, 2)
    with pytest.raises(ValueError, match="at most 2 pending biases, got 3"):
        group_norm(x, None, None, 32, 1e-5, pending=(x[0, :, 0, 0],) * 3)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_group_norm_does_not_cancel(size):
    """A mean far above the spread: E[x^2] - E[x]^2 would lose every digit in float32."""
    x, c = randn(*size) + 1000.0, size[1]
    weight, bias = randn(c), randn(c)
    out, exact = group_norm(x, weight, bias, 32, 1e-5, silu=False), to_float64(x, weight, bias)
    expected = reference.group_norm(*exact, 32, 1e-5, silu=False)
    each = cancels(exact[0]).repeat_interleave(c // 32, 1) * weight.abs()  # [N, C]
    allowed = 4 * torch.finfo(torch.float32).eps * each[:, :, None, None] + 1e-5 * (1 + expected.abs())
    assert ((out - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, inner", [(1, 64), (7, 1280), (13, 300), (6, 5120)])
def test_geglu(rows, inner, dtype):
    p = randn(2, rows, 2 * inner, dtype=dtype)
    assert_close(geglu(p), reference.geglu(p.double()), dtype)


HOPPER = CUDA and torch.cuda.get_device_capability() == linear_geglu.CAPABILITY


@pytest.mark.skipif(CUDA and not HOPPER, reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows, depth, inner", [(1, 64, 64), (77, 96, 200), (33, 320, 136)] + LARGE_GEGLU)
def test_linear_geglu(rows, depth, inner, with_bias, dtype):
    x, weight = randn(2, rows, depth, dtype=dtype), randn(2 * inner, depth, dtype=dtype)
    bias = randn(2 * inner, dtype=dtype) if with_bias else None
    assert linear_geglu.fits(x, weight)
    out = linear_geglu.linear_geglu(x, weight, bias)
    assert_close(out, reference.linear_geglu(*to_float64(x, weight, bias)), dtype)


def test_linear_geglu_refuses_what_it_cannot_describe():
    x, weight = randn(4, 64, dtype=torch.float16), randn(32, 64, dtype=torch.float16)
    assert linear_geglu.fits(x, weight)
    assert not linear_geglu.fits(x.float(), weight)
    assert not linear_geglu.fits(x.float(), weight.float())
    assert not linear_geglu.fits(x[:, :60], weight[:, :60])
    assert not linear_geglu.fits(x, randn(64 * 32 + 1, dtype=torch.float16)[1:].view(32, 64))
    assert not linear_geglu.fits(x, weight[:24])


def test_linear_geglu_is_for_tiles_that_fill_the_card():
    assert linear_geglu.is_faster(2048, 1280, 5120, processors=132)  # SDXL at 1024x1024
    assert not linear_geglu.is_faster(512, 1280, 5120, processors=132)  # at 512x512


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths, sizes", crossed(LENGTHS, HEADS), ids=str)
def test_flash_attention(lengths, sizes, dtype):
    (queries, keys), (heads, channels) = lengths, sizes
    q = randn(2, queries, channels, dtype=dtype)
    k, v = (randn(2, keys, 2 * channels, dtype=dtype)[:, :, ::2] for _ in range(2))
    assert flash_attention.fits(q, k, heads)
    out = flash_attention.flash_attention(q, k, v, heads)
    assert_close(out, reference.flash_attention(*to_float64(q, k, v), heads), dtype)


def test_flash_attention_leaves_the_rest_to_the_library():
    q, k = randn(1, 4, 320, dtype=torch.float16), randn(1, 77, 320, dtype=torch.float16)
    assert flash_attention.fits(q, k, 8)
    assert not flash_attention.fits(q, k, 2)
    assert not flash_attention.fits(q.float(), k.float(), 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_upsample(size, dtype):
    x = randn(*size, dtype=dtype)
    h, w = 2 * size[2], 2 * size[3]
    for out in ((h, w), (h - 1, w), (h, w - 1), (h - 1, w - 1)):
        assert torch.equal(upsample2x(x, out), reference.upsample2x(x, out))


@pytest.mark.parametrize("rows, depth, widths", [(1, 64, [64]), (35, 96, [320, 64, 130]), (77, 200, [128, 256])])
def test_grouped_linear(rows, depth, widths):
    x = randn(2, rows, depth, dtype=torch.float16)
    weights = [randn(width, depth, dtype=torch.float16) for width in widths]
    assert fits(weights)
    for out, weight in zip(grouped_linear(x, weights, make_table(weights)), weights, strict=True):
        assert out.is_contiguous()
        assert_close(out, x.double() @ weight.double().t(), torch.float16)


def test_grouped_linear_refuses_what_the_table_cannot_hold():
    weight = randn(64, 64, dtype=torch.float16)
    assert fits([weight, weight])
    assert not fits([weight.float()])
    assert not fits([weight, weight.to(torch.bfloat16)])
    assert not fits([weight, randn(64, 32, dtype=torch.float16)])
    assert not fits([weight.t()[:32]])
    assert not fits([randn(64 * 64 + 1, dtype=torch.float16)[1:].view(64, 64)])


class Broken:
    """In the place of a kernel that does not compile."""

    __name__ = "broken_kernel"
    params = ()

    def __getitem__(self, grid):
        raise RuntimeError("PassManager::run failed\nand more")


def _exactly(value):
    """In float64."""
    value = [each.double() for each in value] if isinstance(value, list) else value
    return value.double() if isinstance(value, torch.Tensor) else value


def _all(out):
    return out if isinstance(out, list) else [out]


@pytest.mark.parametrize(
    "module, kernel, operation",
    [
        ("geglu_upsample", "geglu_kernel", "geglu"),
        ("group_norm", "apply_kernel", "group_norm"),
        ("geglu_upsample", "upsample_kernel", "upsample2x"),
        ("grouped_linear", "grouped_linear_kernel", "grouped_linear"),
        ("flash_attention", "flash_attention_kernel", "flash_attention"),
        ("linear_geglu", "linear_geglu_kernel", "geglu_of_product"),
    ],
)
def test_an_operation_whose_kernel_fails_runs_in_plain_torch(monkeypatch, module, kernel, operation):
    """Only that one, counted once, and right from the first call on."""
    from anyshape.accel import kernels, stats
    from anyshape.accel.kernels.triton_ops import TritonOps

    stats.STATS.clear()
    monkeypatch.setattr(getattr(kernels, module), kernel, Broken())
    ops = TritonOps(torch.device(DEVICE))
    ops._takes_products = HOPPER or not CUDA
    ops._processors = ops._processors or 132
    image, weight, bias = randn(1, 32, 4, 3), randn(32), randn(32)
    x, up, added = (randn(*shape, dtype=torch.float16) for shape in ((1, 5, 32), (128, 32), (128,)))
    table = make_table([up, up], [added, added])
    calls = {
        "group_norm": (image, weight, bias, 8, 1e-5, None, True, ()),
        "linear_geglu": (x, up, added),
        "upsample2x": (image, (8, 6)),
        "grouped_linear": (x, [up, up], [added, added], table),
        "flash_attention": (x, x, x, 2),
    }
    for _ in range(2):
        for name, args in calls.items():
            known = args[:-1] if name == "grouped_linear" else args
            exact = getattr(reference, name)(*(_exactly(each) for each in known))
            for each, wanted in zip(_all(getattr(ops, name)(*args)), _all(exact), strict=True):
                assert relative_error(each, wanted) < 1e-3, name
    (fallback,) = stats.snapshot()["fallbacks"]
    assert fallback["count"] == 1 and operation in fallback["reason"] and "PassManager" in fallback["reason"]
    assert "and more" not in fallback["reason"]


def test_what_did_not_run_at_the_first_size_runs_at_the_next(monkeypatch):
    """A first call that was broken off has not compiled the kernel that only other sizes choose."""
    from anyshape.accel.kernels.triton_ops import TritonOps

    ops, long = TritonOps(torch.device(DEVICE)), flash_attention.MAX_KEYS + 1
    q, k = (randn(1, length, 64, dtype=torch.float16) for length in (5, long))
    real, calls = flash_attention.flash_attention, []

    def attention(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("broken off")
        return real(*args)

    monkeypatch.setattr(flash_attention, "flash_attention", attention)
    with pytest.raises(RuntimeError, match="broken off"):
        ops.flash_attention(q, k, k, 2)
    for _ in range(2):
        assert torch.equal(ops.flash_attention(q, k, k, 2), reference.flash_attention(q, k, k, 2))
    assert len(calls) == 2


# All for the card that one is for; for the oldest, those with products and one without. It has no instructions for
# whole products, so what is compiled for it grows with its tiles: small ones do here. A release compiles everything.
CARDS = """
from tools import compile_kernels
small = dict.fromkeys(("BM", "BN", "BK", "BT", "BL"), 32)
for card, tiles, words in ((90, {}, ""), (75, small, ("coefficients", "grouped_linear", "flash"))):
    compile_kernels.FLAGS |= tiles
    for kernel in compile_kernels.KERNELS:
        if kernel.__name__.startswith(words):
            compile_kernels.compile_for(kernel, card)
            print("ok")
"""


@pytest.mark.skipif(CUDA, reason="a GPU compiles the kernels anyway")
def test_every_kernel_compiles_for_other_cards():
    """Needs no GPU. In a process of its own: here the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CARDS]
    done = subprocess.run(command, cwd=embed.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ok") == len(KERNELS) + 3


def test_a_card_that_is_too_old_has_no_kernels(monkeypatch):
    from anyshape.accel import kernels

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "6.1" in kernels.too_old(torch.device("cuda", 7)) and "eager" in kernels.too_old(torch.device("cuda", 7))
    with pytest.raises(Unavailable, match=r"6\.1.*no kernels, so"):
        kernels.load(torch.device("cuda", 7))
    assert kernels.too_old(torch.device("cpu")) == ""


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    import triton
    from anyshape.accel import kernels

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.0.0")
    with pytest.raises(Unavailable, match=r"3\.0\.0 is too old: install the triton"):
        kernels.load(torch.device("cuda", 7))
