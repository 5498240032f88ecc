"""Skip Blocks on networks that are shaped like a U: their tape is cut at a value, and both halves are the forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools import embed
from tools.driving import (
    NARROW_UNET,
    TINY_UNET,
    compiled,
    residuals,
    sample_prompts,
    skipping,
    unet_inputs,
)
from tools.oracles import counted, error, expect, fallbacks, shapes
from tools.skip_driving import PLANNED, STEPS

embed.bare_pack()

from anyshape.accel.tape import deep, middle  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("pack", "one_thread", "clean_stats")

SIZES = [(104, 72), (72, 136)]  # with odd latent sides
KINDS = ["controlnet", "with gaps", "short", "t2i adapter"]


def recorded(model, **inputs):
    from tools.architectures.taped import Recording

    return Recording(model, (), inputs, skipping=True)


def halves_of(recording, depth=None):
    """(the cut, what the whole gives: its own result and the feature, what the rest gives of that feature)."""
    halves = recording.cut(depth)
    assert halves.features == 1
    with torch.inference_mode():
        whole, rest = (recording.program(fuse=False, tape=tape) for tape in (halves.full, halves.skipped))
        out, feature = whole.run(recording.inputs)
        kept = feature.clone()
        skipped = rest.run(recording.with_features([feature]))
    assert torch.equal(feature, kept)  # it is another step's, too
    return halves, out, feature, skipped


# What has such a shape --------------------------------------------------------------------------------------------


class U(nn.Module):
    """Three levels, joined by ``join`` on the way up."""

    def __init__(self, join=None, upsampled=False):
        super().__init__()
        self.join, self.upsampled = join or (lambda h, skip: torch.cat([h, skip], 1)), upsampled
        self.first, self.time = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(1, 8)
        self.down = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        self.joined = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)])
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, timesteps):
        time = self.time(timesteps[:, None])[:, :, None, None]
        h, skips = self.first(x), []
        for down in self.down:
            skips.append(h)
            h = torch.tanh(down(h) + time)
        h = self.middle(h)
        for up, joined in zip(self.up, self.joined, strict=True):
            skip = skips.pop()
            h = up(F.interpolate(torch.tanh(h), size=skip.shape[2:], mode="nearest"))
            h = joined(self.join(h, skip)) + time
        return self.last(h)


def on_a_picture(model, side=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, side, side, generator=generator)
    return recorded(model, x=x, timesteps=torch.rand(2, generator=generator))


@pytest.mark.parametrize(
    "join",
    [
        lambda h, skip: torch.cat([h, skip], 1),
        lambda h, skip: torch.cat([skip, h], 1),
        lambda h, skip: torch.cat([h, skip * 2 + 1], 1),  # a residual is added, a patch weights it
        lambda h, skip: torch.cat([h.mul_(1.5), skip], 1),
    ],
    ids=["second", "first", "changed", "in place"],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_u_is_cut_before_its_joins(join, depth):
    """And before the upsampling that comes before a join."""
    halves, out, feature, skipped = halves_of(recording := on_a_picture(U(join)), depth)
    assert feature.shape == ((2, 8, 6, 6), (2, 8, 3, 3))[depth] and halves.depth == depth
    assert torch.equal(out, recording.out) and torch.equal(skipped, recording.out)


def test_what_is_written_into_a_feature_later_is_not_in_it():
    """As FreeU does, through a view of half of it."""

    class Written(U):
        def __init__(self):
            super().__init__(self.half)
            self.up = nn.ModuleList([nn.Identity(), nn.Identity()])

        @staticmethod
        def half(h, skip):
            h[:, :4] = h[:, :4] * 3
            return torch.cat([h, skip], 1)

        def forward(self, x, timesteps):
            h = self.first(x)
            skip, h = h, self.joined[0](torch.cat([self.middle(self.middle(h)), h], 1))
            h = self.half(h, skip)
            return self.last(self.joined[1](h))

    halves, out, _, skipped = halves_of(recording := on_a_picture(Written()), 0)
    assert any(operation.writes is not None for operation in halves.skipped.operations)
    assert torch.equal(out, recording.out) and torch.equal(skipped, recording.out)


def test_a_feature_lies_straight_in_memory_and_takes_its_place_as_it_lay():
    """As in a UNet whose weights lie channels last."""
    model = U().to(memory_format=torch.channels_last)
    halves, out, feature, skipped = halves_of(recording := on_a_picture(model), 0)
    assert feature.is_contiguous() and not recording.out.is_contiguous()
    assert torch.equal(out, recording.out) and skipped.stride() == recording.out.stride()
    assert torch.equal(skipped, recording.out)


def test_joins_that_lie_behind_one_another_are_none():
    """Each layer joins what it makes with what it is given: the work in each of the joins is little."""

    class Dense(U):
        def forward(self, x, timesteps):
            h = self.first(x)
            for joined in (*self.joined, *self.joined, *self.joined):
                h = joined(torch.cat([self.middle(h), h], 1))
            return self.last(h)

    recording = on_a_picture(Dense())
    assert len(deep.find(recording.tape)) == 1
    with pytest.raises(middle.NotCut, match="no repeated blocks"):
        recording.cut()


def test_a_second_way_out_of_the_deep_part_leaves_nothing_out():
    """What is read of it besides the feature has to be made."""

    class Leaky(U):
        def forward(self, x, timesteps):
            h = self.first(x)
            low, others = F.avg_pool2d(h, 2), 0.0
            for _ in range(8):
                low = self.middle(torch.tanh(low))
                others = others + self.up[0](low).mean()
            h = self.joined[0](torch.cat([F.interpolate(low, scale_factor=2.0), h], 1))
            return self.last(h) + others

    recording = on_a_picture(Leaky())
    with pytest.raises(middle.NotCut):
        recording.cut()


# ComfyUI's --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("sdxl", SIZES[0]), ("sd15", SIZES[1])], ids=str)
def test_both_halves_are_the_forward(unets, name, size):
    model, inputs = unets[name].model.diffusion_model, unet_inputs(unets[name], *size)
    depths = range(len(model.output_blocks) - 1)
    for depth in depths if name == "sd15" else depths[1::3]:
        halves, out, _, skipped = halves_of(recording := recorded(model, **inputs, transformer_options={}), depth)
        assert halves.depth == depth
        assert torch.equal(out, recording.out) and torch.equal(skipped, recording.out)
        deeper = [value.leaf for value in halves.skipped.leaves()]
        read = {int(leaf.module.split(".")[1]) for leaf in deeper if getattr(leaf, "module", "").startswith("input_bl")}
        assert read == set(range(depth + 1))


@pytest.mark.parametrize(("depth", "kind"), [*((0, kind) for kind in KINDS), *zip((2, 4, 7), KINDS[1:], strict=True)])
def test_every_residual_reaches_its_own_block(unets, kind, depth):
    """The ports give the shallow blocks the deepest residuals, whose shapes do not fit: ControlNet is lost."""
    model, inputs = unets["sd15"].model.diffusion_model, unet_inputs(unets["sd15"], *SIZES[0])
    control = residuals(unets["sd15"], tuple(inputs["x"].shape), kind)
    recording = recorded(model, **inputs, control=control, transformer_options={})
    with torch.inference_mode():
        wanted, plain = (model(**inputs, control=given, transformer_options={}) for given in (control, None))
    assert error(wanted, plain) > 1e-3
    _, out, _, skipped = halves_of(recording, depth)
    assert torch.equal(out, wanted) and torch.equal(skipped, wanted)


def test_sampling_a_network_that_is_not_sds():
    """Stable Cascade: the same with Compile Model and without, and no reason that anything ran in full."""
    from tools import architectures
    from tools.architectures import patchers

    patcher = patchers.make("Stable_Cascade_B")
    given = architectures.TABLE["Stable_Cascade_B"].request(0)["conditions"]
    extra = {"pooled_output": given["clip"][0], "stable_cascade_prior": given["effnet"]}
    prompts, latent = [[[given["clip"] * scale, extra]] for scale in (1.0, 0.5)], torch.zeros(1, 4, 44, 40)
    wanted = sample_prompts(patcher, *prompts, latent=latent, steps=STEPS)
    ways = skipping(patcher), compiled(skipping(patcher))
    outs = [sample_prompts(ours, *prompts, latent=latent, steps=STEPS) for ours in ways]
    assert counted() == PLANNED and fallbacks() == []
    assert torch.equal(*outs) and 0 < error(outs[0], wanted) < 0.7


def first_steps(models, patcher, width, last):
    """What a run's step ``last`` gives: the second is skipped, the fifth full, behind a full one and three skipped."""
    from comfy.model_management import InterruptProcessingException

    denoised = []

    def stop(step, found, *_):
        denoised.append(found)
        if step == last:
            raise InterruptProcessingException

    with pytest.raises(InterruptProcessingException):
        models.sample(patcher, width=width, height=64, steps=STEPS, cfg=1.0, callback=stop)
    return denoised[-1]


def test_fused_halves_share_their_kernels(models, plain_kernels, monkeypatch):
    """Through Compile Model in Triton's interpreter: right, and no kernel for another size. The third is short."""
    from anyshape.accel import tape_tier, tapes
    from anyshape.accel.tape import kernels

    left_out, record = [], tapes.Tapes.record

    def noted(self, key, fuse, *args, **named):
        found = record(self, key, fuse, *args, **named)
        if fuse:
            left_out.append(found[1].left_out > 0)
        return found

    monkeypatch.setattr(tapes.Tapes, "record", noted)
    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(kernels, "_COMPILED", {})  # whatever other tests have compiled
    patchers = [models.unet("sd15", torch.float16, **NARROW_UNET | TINY_UNET) for _ in range(2)]
    ways = skipping(patchers[0]), compiled(skipping(patchers[1]))
    with expect(recompiles=0, fallbacks=0):
        for width, last, full, skipped in ((64, 4, 2, 3), (72, 1, 1, 1), (56, 1, 1, 1)):
            eager, out = (first_steps(models, each, width, last) for each in ways)
            assert error(out, eager) < 2e-2
            assert counted() == {"full": full, "skipped": skipped, "resets": {}}
    assert {shape["state"] for shape in shapes()} == {"tape"} and left_out == [False, False, True]


# Depths -----------------------------------------------------------------------------------------------------------


def full_size(models, name, **changes):
    """A full-size UNet without memory for its weights."""
    family, config = models.UNETS[name]
    settings = family(models.SPATIAL | config | changes)
    settings.unet_config.update({k: v for k, v in config.items() if k in ("num_heads", "num_head_channels")})
    settings.set_inference_dtype(torch.float16, None)
    return settings.get_model({}, "", device="meta").diffusion_model


def full_size_recording(models, name, side, **changes):
    """A recording of it, on tensors without memory."""
    width, y = (2048, 2816) if name == "sdxl" else (768, None)
    meta = {"device": "meta", "dtype": torch.float16}
    inputs = {"x": torch.empty(2, 4, side, side, **meta), "timesteps": torch.empty(2, device="meta")}
    inputs |= {"context": torch.empty(2, 77, width, **meta), "y": None if y is None else torch.empty(2, y, **meta)}
    return recorded(full_size(models, name, **changes), **inputs, transformer_options={})


def test_depth_auto_is_the_deepest_cheap_one(models):
    assert full_size_recording(models, "sdxl", 128).cut().depth == 2


FEWER_BLOCKS = {  # than SDXL's 70, each of which torch counts alone
    "sd15": {},
    "sdxl": {
        "transformer_depth": [0, 0, 1, 1, 3, 3], "transformer_depth_output": [0, 0, 0, 1, 1, 1, 3, 3, 3],
        "transformer_depth_middle": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "depth", "chosen"), [("sd15", None, 0), ("sdxl", 20, 1)])
def test_shares_are_those_that_torch_counts(models, name, depth, chosen):
    """By torch's own counter of FLOPs, on tensors without memory. A depth that there is not is auto."""
    from torch.utils.flop_counter import FlopCounterMode

    recording = full_size_recording(models, name, 64, **FEWER_BLOCKS[name])
    halves = recording.cut(depth)
    assert halves.depth == chosen

    def count(tape, inputs):
        program = recording.program(fuse=False, tape=tape)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            out = program.run(inputs)
        return counter.get_total_flops(), out

    whole, (_, feature) = count(halves.full, recording.inputs)
    less, _ = count(halves.skipped, recording.with_features([feature]))
    assert halves.share == pytest.approx(less / whole, abs=0.005)
