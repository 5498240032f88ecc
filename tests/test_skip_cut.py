"""What Skip Blocks leaves out: the middle of a recorded forward is found, and without it the rest is right. CPU.

Every model of the table, with five blocks in each list of blocks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import architectures, embed
from tools.skip_driving import BLOCKS, FIRST_RUNS

embed.bare_pack()

from anyshape.accel.tape import cut, middle  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread")

# What no middle is found in, and why.
WHOLE = {
    "CosmosT2V": "not one part per picture",  # its pictures lie behind their frames
    # Tiny as they are here, it is other layers that take the time.
    "WAN21_I2V": "of its work",
    "WAN21_Camera": "of its work",
    "WAN22_Animate": "of its work",
    "WAN22_WanDancer": "of its work",
    "WAN_Animate2": "of its work",
    "ACEStep": "of its work",
    "PixelDiTT2I": "it has no repeated blocks",
    "PiD": "it has no repeated blocks",
}
LARGER = ("WAN21_SCAIL", "WAN21_SCAIL2")  # of a smaller picture, too
# What is not recorded (see test_tape_families), and what cannot be made with other numbers of blocks.
LEFT_OUT = {
    "HunyuanDiT", "HiDream", "HiDreamO1", "SeedVR2", "HunyuanVideo15_SR_Distilled", "Hunyuan3Dv2_1", "MiniMaxH3",
    "WAN21_Vace", "MiniMaxMusic3",
}  # fmt: skip
NAMES = [
    entry.name
    for entry in architectures.present()
    if not architectures.is_twin(entry) and entry.name not in LEFT_OUT
]  # fmt: skip
# Shaped like a U: a value takes its own place, however many blocks there are. See test_skip_deep.
DEEP = ("SD15", "SDXL", "SVD_img2vid", "Stable_Cascade_B", "Stable_Cascade_C")


@pytest.mark.parametrize("name", NAMES)
def test_without_its_middle_and_with_what_it_adds_a_forward_is_the_same(name: str):
    """On the input that was recorded and on another one: whole to the bit, without the middle but for rounding."""
    from tools.architectures.taped import Studied, far

    recording = Studied(architectures.TABLE[name], blocks=BLOCKS).record(3 if name in LARGER else 1, skipping=True)
    assert recording.tape is not None, recording.refusal
    if name in WHOLE:
        with pytest.raises(middle.NotCut, match=WHOLE[name]):
            recording.cut()
        return
    halves = recording.cut()
    assert halves.features >= 1 and 0 < halves.share < 1
    assert name not in DEEP or (halves.features == 1 and halves.share < 0.6)
    # of so few blocks each has more of the work than a skipped step may keep
    assert halves.depth == (name in FIRST_RUNS) or halves.share <= cut.MAX_SHARE
    whole, rest = (recording.program(fuse=False, tape=tape) for tape in (halves.full, halves.skipped))
    generator = torch.Generator().manual_seed(1)
    for inputs in (recording.inputs, [other(tensor, generator) for tensor in recording.inputs]):
        out = whole.run(inputs)
        own, added = out[: -halves.features], out[-halves.features :]
        assert all(tensor.is_contiguous() for tensor in added)  # kernels of the rest read them so
        assert far(rest.run(recording.with_features(added, inputs)), own) <= (0.0 if name in DEEP else 1e-5)
        if inputs is recording.inputs:
            nothing = [torch.zeros_like(tensor) for tensor in added]
            assert far(own, recording.out) == 0.0 and far(rest.run(recording.with_features(nothing)), own) > 0.01


@pytest.mark.parametrize(("name", "by_picture"), [("CosmosT2V", False), ("WAN21_T2V", True)])
def test_as_many_frames_as_pictures_are_not_taken_for_them(name: str, by_picture: bool):
    """Features are kept by picture: those by frame would be another prompt's where prompts change their places."""
    from tools.architectures.taped import Studied

    recording = Studied(architectures.TABLE[name], blocks=BLOCKS).record(6, skipping=True)
    pictures, _, frames, *_ = recording.inputs[0].shape
    assert pictures == frames == 3
    if by_picture:
        assert recording.cut().features >= 1
        return
    with pytest.raises(middle.NotCut, match="not one part per picture"):
        recording.cut()


@pytest.mark.parametrize("name", [name for name in ("Flux", "QwenImage", "WAN21_T2V") if name in NAMES])
def test_fused_halves_share_their_kernels_and_need_none_for_another_size(name: str):
    """In Triton's interpreter: right, and of both halves at two sizes none but the first needs a kernel."""
    from tools.architectures.taped import Studied, far, kernels_of

    studied, known, new = Studied(architectures.TABLE[name], blocks=BLOCKS), set(), []
    small = studied.smallest_of(studied.architecture)
    for k in (small, 0 if small else 3):
        recording = studied.record(k, skipping=True)
        halves = recording.cut()
        if k == small:
            plain = [recording.program(fuse=False, tape=tape) for tape in (halves.full, halves.skipped)]
        fused = [recording.program(fuse=True, tape=tape) for tape in (halves.full, halves.skipped)]
        for program in fused:
            new.append(len(kernels_of(program) - known))
            known |= kernels_of(program)
        if k == small:
            whole = plain[0].run(recording.inputs)
            rest = recording.with_features(whole[-halves.features :])
            assert far(fused[0].run(recording.inputs), whole) < 1e-5
            assert far(fused[1].run(rest), plain[1].run(rest)) < 1e-5
    assert new[0] > 5 and new[1] <= 2 and set(new[2:]) == {0}


def other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh numbers of the same kind, in the place of latents and prompts; times and masks stay."""
    if not tensor.is_floating_point() or tensor.ndim < 3:
        return tensor
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.std()


class TwoStreams(nn.Module):
    """A block with one method for each of its streams. whole: called by ``forward``, which calls one of them itself."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.read, self.up, self.down = whole, nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, options: dict) -> Tensor:
        """As a model calls a block, usually."""
        assert self.whole, "nobody calls it"
        return self.forward_picture(x, keys, values, options)

    def forward_prompt(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a prompt."""
        return self.read(prompt).chunk(2, dim=-1)

    def forward_picture(self, x: Tensor, keys: Tensor, values: Tensor, options: dict) -> Tensor:
        """x [B, N, 32], with a prompt's keys and values."""
        x = x + F.scaled_dot_product_attention(x, torch.cat((keys, x), 1), torch.cat((values, x), 1))
        return x + self.down(F.silu(self.up(x)))


class Network(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(4, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList([TwoStreams(whole) for _ in range(BLOCKS)])
        self.requires_grad_(False)

    def forward(self, x: Tensor, context: Tensor, transformer_options: dict) -> Tensor:
        tokens = self.enter(x)
        for block in self.blocks:
            keys, values = block.forward_prompt(context)
            call = block if block.whole else block.forward_picture
            tokens = call(tokens, keys, values, transformer_options)
        return self.leave(tokens)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_that_are_called_by_methods(whole: bool):
    """As SenseNova U1.5 and Wan Animate 2 do. What a block calls itself is a part of it; nothing stays on the block."""
    from tools.architectures.taped import Recording, far

    model, draw = Network(whole), torch.Generator().manual_seed(0)
    given = {"x": torch.randn(2, 40, 4, generator=draw), "context": torch.randn(2, 7, 32, generator=draw)}
    before = [dict(vars(block)) for block in model.blocks]
    recording = Recording(model, (), given | {"transformer_options": {}}, skipping=True)
    assert [dict(vars(block)) for block in model.blocks] == before
    halves = recording.cut(1)
    assert halves.features == 1 and halves.depth == 1 and halves.share < 0.5
    full, rest = (recording.program(fuse=False, tape=tape) for tape in (halves.full, halves.skipped))
    out, added = full.run(recording.inputs)
    assert far(out, recording.out) == 0.0 and far(rest.run(recording.with_features([added])), out) < 1e-5
    assert far(rest.run(recording.with_features([torch.zeros_like(added)])), out) > 0.01
