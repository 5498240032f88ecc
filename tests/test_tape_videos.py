"""Rules for networks of videos (VAEs), on a small decoder of plain torch. CPU, in Triton's interpreter.

Its idioms are those of video VAEs: norms over channels, frames padded before the first one alone, frames that an
earlier piece left, stacked frames, upsampling, layers of one pixel.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.kernels import operations  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape import hand_kernels, rules, static_sizes  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.rules import edits, pads  # noqa: E402
from anyshape.accel.tape.values import Tape  # noqa: E402

CPU, WIDTH = torch.device("cpu"), 16
SIZES = ((1, 2, 4, 3), (2, 3, 3, 5), (1, 1, 5, 4), (3, 1, 2, 2))  # videos, frames, height, width
BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
PADS = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect"}


class Videos(nn.Module):
    """A residual block with the frames of an earlier piece, twice the frames, and a picture twice as large of each.

    norm: length | mean | group: what it is divided by. mode: what is around pictures.
    """

    def __init__(self, dtype: torch.dtype, norm: str = "length", mode: str = "zeros") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mode = norm, PADS[mode]
        self.gamma = nn.Parameter(torch.rand(WIDTH, 1, 1, 1) + 0.5)
        self.first, self.second, self.time, self.out, self.last = (
            nn.Conv3d(WIDTH if number else 4, width, kernel)
            for number, (width, kernel) in enumerate(
                ((WIDTH, 3), (WIDTH, 3), (2 * WIDTH, (3, 1, 1)), (WIDTH, 1), (3, 3))
            )
        )
        self.groups, self.picture = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.to(dtype).requires_grad_(False)

    def normed(self, x: Tensor) -> Tensor:
        if self.norm == "group":
            return F.silu(self.groups(x))
        if self.norm == "mean":
            return F.silu(x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-6))
        return F.silu(F.normalize(x, dim=1) * WIDTH**0.5 * self.gamma + 0)

    def around(self, conv: nn.Conv3d, x: Tensor, before: Tensor | None = None) -> Tensor:
        """The convolution of as many frames and pixels as ``x`` has. before: two frames, or zeros."""
        x = x if before is None else torch.cat([before, x], dim=2)
        frames = 0 if before is not None else 2
        if self.mode == "reflect":
            return conv(F.pad(F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect"), (0, 0, 0, 0, frames, 0)))
        return conv(F.pad(x, (1, 1, 1, 1, frames, 0), mode=self.mode))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        x = self.around(self.first, x)
        h = self.around(self.second, self.normed(x), before)
        x = self.out(x) + self.around(self.second, self.normed(h))
        n, c, t, height, width = x.shape
        h = self.time(F.pad(x, (0, 0, 0, 0, 2, 0))).reshape(n, 2, c, t, height, width)
        x = torch.stack((h[:, 0], h[:, 1]), 3).reshape(n, c, 2 * t, height, width)
        x = x.transpose(1, 2).reshape(n * 2 * t, c, height, width)
        x = self.picture(F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
        x = x.reshape(n, 2 * t, c, 2 * height, 2 * width).transpose(1, 2)
        return self.around(self.last, self.normed(x))


def inputs(size: Sequence[int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    n, frames, height, width = size
    shapes = (n, 4, frames, height, width), (n, WIDTH, 2, height, width)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def taped(model: nn.Module, given: tuple[Tensor, ...]) -> Tape:
    recorder = Recorder(list(given), model, CPU)
    with torch.backends.mkldnn.flags(enabled=False):  # as on a GPU: results lie as their arguments do
        _, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    return tape


def programmed(model: nn.Module, given: tuple[Tensor, ...]) -> Program:
    tape = taped(model, given)
    tape.lean = True
    rules.apply(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    return program


@pytest.mark.parametrize(
    "dtype, norm, mode",
    [
        (torch.float32, "length", "zeros"), (torch.bfloat16, "length", "zeros"), (torch.float32, "mean", "reflect"),
        (torch.bfloat16, "group", "replicate"),
    ],
    ids=str,
)  # fmt: skip
def test_right_at_every_size_with_the_kernels_of_the_first(dtype: torch.dtype, norm: str, mode: str):
    """Nothing is turned on the way: what the forward gives is the only copy."""
    model, known = Videos(dtype, norm, mode), set[str]()
    with torch.inference_mode():
        for size in SIZES:
            program = programmed(model, inputs(size, dtype))
            given = inputs(size, dtype, seed=1)
            wanted, found = model(*given), program.run(list(given))
            assert ((found - wanted).norm() / wanted.norm()).item() < BOUND[dtype], size
            assert found.stride() == wanted.stride()
            sources = {launch.source.text for launch in program.launches}
            single = size[:2] == (1, 1)  # what is stacked of one frame seems to be two of the model's
            assert not known or len(sources - known) <= single, size
            known |= sources


def test_everything_between_convolutions_is_a_kernel_or_a_view():
    with torch.inference_mode():
        tape = taped(Videos(torch.bfloat16), inputs((1, 3, 4, 5), torch.bfloat16))
        rules.apply(tape)
        report = Program(tape, fuse=True).report
    names = [str(operation.func) for operation in tape.operations]
    convolutions = [name for name in names if "conv3d_last" in name or "conv2d_last" in name]
    padded = [name for name in names if "constant_pad_nd" in name]  # frames before the first
    assert len(convolutions) == 7 and len(padded) == 4
    others = 2  # the upsampling, and a copy of the result as it was recorded
    assert report.calls == len(convolutions) + len(padded) + others


@pytest.fixture
def cudnn() -> Iterator[list[int]]:
    """cuDNN's convolution on a CPU, by torch's own; the ranks of what it was called with."""

    def convolved(x, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        called.append(x.ndim)
        none = [0] * (x.ndim - 2)
        return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, none, groups)

    called: list[int] = []
    library = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "Meta"):
        library.impl("cudnn_convolution", convolved, key)
    yield called
    library._destroy()


def test_cudnn_is_called_itself_where_comfyui_does(cudnn: list[int], monkeypatch: pytest.MonkeyPatch):
    """With some versions of PyTorch, whose own convolution of videos in 16 bits takes other memory and time."""

    def conv_forward(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # as in comfy.ops
        settings = self.padding, self.stride, self.dilation, self.groups
        out = torch.cudnn_convolution(x, weight, *settings, benchmark=False, deterministic=False, allow_tf32=True)
        out += bias.reshape((1, -1, 1, 1, 1))
        return out

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", conv_forward)
    model, dtype = Videos(torch.bfloat16), torch.bfloat16
    with torch.inference_mode():
        program = programmed(model, inputs(SIZES[0], dtype))
        given = inputs(SIZES[0], dtype, seed=1)
        wanted = model(*given)
        cudnn.clear()
        found = program.run(list(given))
    assert ((found - wanted).norm() / wanted.norm()).item() < BOUND[dtype]
    assert cudnn == [5] * 5  # all but the one of single pixels, which is a product


@pytest.mark.parametrize("norm, mode, names", [("group", "replicate", {"group_norm_last"}), ("mean", "reflect", set())])
def test_only_kernels_by_hand_are_compiled_ahead_and_on_one_pixel(norm: str, mode: str, names: set[str]):
    """A video's channels stay, and what gathers pixels is never called with one: mirrored, it has no other."""
    with torch.inference_mode():
        tape = taped(Videos(torch.bfloat16, norm, mode), inputs((1, 3, 4, 5), torch.bfloat16))
        rules.apply(tape)
        assert any(operation.func is operations.pad_last for operation in tape.operations)
        static_sizes.annotate(tape)
        found = hand_kernels.distinct(tape.operations)
        for operation in found:
            x, *others = hand_kernels.small(operation, torch.device("meta"))
            assert x.shape.numel() in (1, x.shape[1]) and operation.func(x, *others).shape[:2] == x.shape[:2]
    assert {operation.traits.name for operation in found} == {"upsample_last", *names}


@pytest.mark.parametrize("rank", [4, 5])
def test_zeros_around_a_picture_become_the_convolutions_own(rank: int):
    """As wide on both sides, of one convolution alone; the same numbers."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = (nn.Conv2d if rank == 4 else nn.Conv3d)(4, 4, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> list[Tensor]:
            front = [0, 0, 0, 0, 2, 0] if rank == 5 else [0, 0, 2, 0]
            plain, uneven, shared = F.pad(x, [1, 1, 1, 1]), F.pad(x, [1, 1, *front[2:]]), F.pad(x, [1] * 4)
            ones, none = F.pad(x, [1] * 4, value=1.0), F.pad(x, [0] * 4)
            return [
                self.conv(plain),
                self.conv(uneven),
                self.conv(shared) + shared.mean(),
                self.conv(none),
                self.conv(ones),
            ]

    model, x = Padded(), torch.randn((2, 4, 5, 6, 7)[:rank] if rank == 4 else (2, 4, 5, 6, 7))
    with torch.inference_mode():
        tape = taped(model, (x,))
        before = [operation for operation in tape.operations if operation.traits.name in pads.PADS]
        pads.fold(tape)
        edits.settle(tape)
        left = [operation for operation in tape.operations if operation.traits.name in pads.PADS]
        widths = [list(operation.args[1]) for operation in left]
        program = Program(tape, fuse=False)
        program.bind(model)
        for mine, own in zip(program.run([x]), model(x), strict=True):
            assert torch.allclose(mine, own, atol=1e-6)
    assert len(before) - len(left) == 2 and [0] * (2 * rank - 4 - 2) + [2, 0] in widths


@pytest.mark.parametrize("sides, same", [((6, 8), True), ((7, 9), False)])
def test_the_nearest_pixels_are_taken_where_there_are_exactly_twice_as_many(sides: tuple[int, int], same: bool):
    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.interpolate(x, size=sides, mode="nearest-exact")

    with torch.inference_mode():
        model, x = Larger(), torch.randn(1, 8, 3, 4)
        tape = taped(model, (x,))
        rules.apply(tape)
        assert any(operation.func is operations.upsample_last for operation in tape.operations) == same
        program = Program(tape, fuse=False)
        program.bind(model)
        assert torch.allclose(program.run([x]), model(x), atol=1e-5)


@pytest.mark.parametrize("kernel", [3, (3, 1, 1)])
def test_weights_of_videos_are_laid_out_in_their_own_memory_and_back(kernel: int | tuple[int, int, int]):
    from anyshape.accel.weights import ChannelsLastWeights, WeightWatch

    model = nn.Sequential(nn.Conv3d(8, 16, kernel), nn.Conv3d(16, 4, 1)).requires_grad_(False)
    weight, layout, watch = model[0].weight, ChannelsLastWeights(), WeightWatch(model)
    before, address, known = weight.clone(), weight.data_ptr(), watch.fingerprint()
    layout.permute(each.weight for each in model)
    assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()
    assert weight.data_ptr() == address and torch.equal(weight, before) and watch.fingerprint() != known
    layout.restore()
    assert weight.is_contiguous() and torch.equal(weight, before) and watch.fingerprint() == known


@pytest.mark.parametrize("frames", [1, 2])
def test_what_is_only_looked_at_for_its_shape_is_no_view(frames: int):
    """``normalize`` behind a reshape that is a view by chance, where one picture has one frame."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv3d(8, 8, 1).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:  # [N, 8, T, H, W]
            return F.normalize(self.layer(x).transpose(1, 2).reshape(-1, 8, *x.shape[3:]), dim=1)

    model, x = Normed(), torch.randn(1, 8, frames, 2, 3)
    with torch.inference_mode():
        program = programmed(model, (x,))
        assert torch.allclose(program.run([x]), model(x), atol=1e-6)


@pytest.mark.parametrize("read", [True, False])
def test_a_video_of_more_pieces_needs_no_further_kernel(read: bool):
    """Pieces that are joined one after another are one join, which a later operation reads or the caller gets."""

    class InPieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Conv3d(8, 8, 1).requires_grad_(False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:  # [N, 8, T, H, W]
            out = None
            for piece in x.split(1, dim=2):
                new = F.silu(self.first(piece)) + 1
                out = new if out is None else torch.cat([out, new], dim=2)
            return self.last(F.silu(out) * 2) if read else out

    model, compiled = InPieces(), {}
    with torch.inference_mode():
        for pieces in range(1, 12):
            x = torch.randn(1, 8, pieces, 3, 2)
            program = programmed(model, (x,))
            assert torch.allclose(program.run([x]), model(x), atol=1e-6)
            compiled[pieces] = program.report.compiled
    assert compiled[1] > 0 and not any(compiled[pieces] for pieces in range(6, 12)), compiled
