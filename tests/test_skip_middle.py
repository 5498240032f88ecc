"""Skip Blocks on transformers, as a workflow samples: the middle is left out, and what it adds is forecast. CPU.

The models are the table's, with five blocks in each list of blocks. The oracle for state is a fresh run, as in
``test_skip_runs``; that the middle is the right one is in ``test_skip_cut``.
"""

from functools import cache

import pytest
import torch
from torch import nn

from tools import architectures, embed
from tools.driving import compiled, sample_tiny, skip_with_message, skipping
from tools.oracles import counted, error, fallbacks, last_run, reasons
from tools.skip_driving import BLOCKS, FIRST_RUNS, PLANNED, STEPS

embed.bare_pack()

from anyshape.accel.skip.schedule import full_steps  # noqa: E402
from anyshape.accel.tape import cut  # noqa: E402

pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread")

# By streams and forwards: two kinds of blocks, padded prompts, frames, a forward that calls no wrappers.
SAMPLED = ("Flux", "QwenImage", "ZImage", "WAN21_T2V", "LTXV", "AuraFlow")


def sample(patcher, name, **run):
    return sample_tiny(patcher, name, **{"steps": STEPS, "width": 10} | run)


@pytest.fixture(scope="module")
def plain(tiny):
    """The latent of a model by name."""
    return cache(lambda name: sample(tiny(name), name))


@pytest.fixture(scope="module")
def skipped(tiny):
    """The same with Skip Blocks."""
    return cache(lambda name: sample(skipping(tiny(name)), name))


@pytest.mark.parametrize("name", SAMPLED)
def test_most_steps_leave_the_middle_out(tiny, plain, skipped, name):
    """It is not even read: weights of a block that are no numbers, but on full steps, change nothing in a later run."""
    patcher, out = tiny(name), skipped(name)
    assert counted() == PLANNED
    assert last_run()["depth"] == (name in FIRST_RUNS) and last_run()["bytes"] > 0
    assert 0 < error(out, plain(name)) < 0.7  # random weights: no smoothness
    full = full_steps(range(STEPS), 3, density=None)
    lists = [part for part in patcher.model.diffusion_model.children() if isinstance(part, nn.ModuleList)]
    weights = list(max(lists, key=len)[BLOCKS // 2].parameters())
    kept = [weight.clone() for weight in weights]

    def between(step, *_):
        for weight, own in zip(weights, kept, strict=True):
            weight.copy_(own if step + 1 in full or step + 1 == STEPS else own * torch.nan)

    assert torch.equal(sample(skipping(patcher), name, callback=between), out)
    assert counted() == PLANNED


@pytest.mark.parametrize("name", ["Flux", "AuraFlow", "SD3"])
def test_every_step_in_full_is_eager_to_the_bit(tiny, name):
    steps = {"steps": 7}  # too few to skip any
    wanted = sample(tiny(name), name, **steps)
    for settings in ({"interval": 1}, {}):
        assert torch.equal(sample(skipping(tiny(name), **settings), name, **steps), wanted)


@pytest.mark.parametrize(("name", "settings"), [("Flux", {}), ("Flux", {"mode": "exact"}), ("AuraFlow", {})], ids=str)
def test_compile_model_runs_the_steps(tiny, skipped, name, settings):
    """Before or behind Skip Blocks; on a CPU by the same operations."""
    for made in (skipping(compiled(tiny(name), **settings)), compiled(skipping(tiny(name)), **settings)):
        assert torch.equal(sample(made, name), skipped(name))
        assert counted() == PLANNED
    assert fallbacks() == []


# With everything else: the oracle is a fresh model's run --------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [{"cfg": 1.0}, {"batch": 2, "height": 6, "tokens": 11}, {"sampler": "heun", "width": 7, "height": 9}],
    ids=str,
)
def test_runs_after_each_other_are_as_fresh_ones(tiny, run):
    skip = skipping(tiny("Flux"))
    sample(skip, "Flux")
    assert torch.equal(sample(skip, "Flux", **run), sample(skipping(tiny("Flux", fresh=True)), "Flux", **run))
    assert last_run()["skipped"] >= 6 and last_run()["resets"] == {}  # heun looks twice per step


@pytest.mark.parametrize("name", ["Anima", "CosmosT2IPredict2"])
@pytest.mark.parametrize("around", [skipping, lambda patcher: compiled(skipping(patcher))], ids=["own", "compiled"])
def test_a_first_run_is_as_later_ones(tiny, name, around):
    """Although such a model puts something into itself at its first forward, whose recording is in vain."""
    patcher = around(tiny(name, fresh=True))
    out = sample(patcher, name)
    assert counted() == PLANNED and torch.equal(sample(patcher, name), out)


@pytest.mark.parametrize(("name", "frames"), [("Flux", ()), ("QwenImage", (1,))])
def test_reference_pictures_and_masks(tiny, plain, name, frames):
    """As Kontext and Qwen-Image-Edit have them: tokens of another picture, of a size of its own, behind the image's."""
    draw = torch.Generator().manual_seed(1)
    pictures = [[torch.randn(1, 16, *frames, 12, width, generator=draw)] for width in (10, 14)]
    mask = (torch.rand(1, 1, 8, 10, generator=draw) > 0.5).float()
    runs = [{"conditions": {"reference_latents": picture}, "mask": mask} for picture in pictures]
    skip, eager = skipping(tiny(name)), [sample(tiny(name), name, **run) for run in runs]
    for run, wanted in zip((*runs, runs[0]), (*eager, eager[0]), strict=True):
        assert error(wanted, plain(name)) > 0.01  # they matter
        out = sample(skip, name, **run)
        assert counted() == PLANNED and 0 < error(out, wanted) < 0.7
    assert torch.equal(sample(skipping(tiny(name), interval=1), name, **run), wanted)
    assert torch.equal(out, sample(skipping(tiny(name, fresh=True)), name, **run))


def test_a_prompt_that_begins_in_mid_run(tiny):
    """Its first step has nothing to go on from, so it is full, and counted; the later ones are skipped."""
    import comfy.sample
    import comfy.samplers

    patcher, kind = tiny("Flux"), architectures.TABLE["Flux"]
    parts = kind.request(0)["conditions"]
    extra = {"pooled_output": parts["y"][:1]}
    late = extra | {"start_percent": 0.5}
    positive = [[parts["context"][:1], extra], [parts["context"][:1] * 0.3, late]]
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", 12)
    noise = torch.randn((1, kind.channels, 8, 8), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        comfy.sample.sample_custom(
            skipping(patcher), noise, 1.0, comfy.samplers.ksampler("euler"), sigmas, positive, positive,
            torch.zeros_like(noise), disable_pbar=True, seed=0,
        )  # fmt: skip
    assert last_run()["skipped"] >= 6 and sum(last_run()["resets"].values()) <= 2


def test_a_lora_before_the_next_run(tiny, skipped):
    """On a block of the middle: its own weights are used, and nothing is recorded again."""
    weight = f"diffusion_model.double_blocks.{BLOCKS // 2}.img_mlp.0.weight"
    delta = torch.randn(tiny("Flux").get_model_object(weight).shape, generator=torch.Generator().manual_seed(2))

    def with_lora(patcher):
        patcher = patcher.clone()
        patcher.add_patches({weight: ("diff", (delta,))}, 0.5)
        return patcher

    before = skipped("Flux")
    changed = sample(with_lora(skipping(tiny("Flux"))), "Flux")
    assert torch.equal(changed, sample(with_lora(skipping(tiny("Flux", fresh=True))), "Flux"))
    assert not torch.equal(changed, before)
    assert torch.equal(sample(skipping(tiny("Flux")), "Flux"), before)


def test_a_run_that_is_broken_off(tiny, skipped):
    from comfy.model_management import InterruptProcessingException

    def stop(step, *_):
        if step == 5:
            raise InterruptProcessingException

    wanted = skipped("ZImage")
    with pytest.raises(InterruptProcessingException):
        sample(skipping(tiny("ZImage")), "ZImage", callback=stop)
    assert torch.equal(sample(skipping(tiny("ZImage")), "ZImage"), wanted)
    assert fallbacks() == []


@pytest.mark.parametrize("what", ["broken off", "gone"])
def test_the_program_of_skipped_steps_is_made_again(tiny, skipped, monkeypatch, what):
    """It was not made because the user cancelled, or its size is one of those that were forgotten."""
    from anyshape.accel.halves import Halves
    from anyshape.accel.tapes import Tapes
    from comfy.model_management import InterruptProcessingException

    def cancelled(*_):
        raise InterruptProcessingException

    patcher = tiny("ZImage", fresh=True)
    with monkeypatch.context() as patch:
        patch.setattr(*((Halves, "_rest", cancelled) if what == "broken off" else (Tapes, "keep", lambda *_: None)))
        if what == "broken off":
            with pytest.raises(InterruptProcessingException):
                sample(skipping(patcher), "ZImage")
        else:
            sample(skipping(patcher), "ZImage")
            assert last_run()["resets"]
    assert torch.equal(sample(skipping(patcher), "ZImage"), skipped("ZImage"))
    assert counted() == PLANNED


def test_depths(tiny, plain):
    """By number, and by the share of work: more blocks at the ends, less is forecast."""
    far = []
    for depth in ("1", "4"):
        far.append(error(sample(skipping(tiny("Flux"), depth=depth), "Flux"), plain("Flux")))
        assert last_run()["depth"] == int(depth)
    assert far[1] < far[0]
    _, message = skip_with_message(tiny("Flux"), depth="5")
    assert message == "depth is 5, but this model has 0 to 4, so auto is used"


# Models that it is not for --------------------------------------------------------------------------------------------


def check_in_full(patcher, wanted, reason):
    """Every step is ComfyUI's, and the reason is said once a step that was to be skipped."""
    assert torch.equal(sample(skipping(patcher), "Flux"), wanted)
    (why,) = last_run()["resets"]
    assert reason in why and (last_run()["full"], last_run()["skipped"]) == (STEPS, 0)


def test_a_model_without_a_middle(tiny, plain, monkeypatch):
    monkeypatch.setattr(cut, "LEAST_SHARE", 1.0)
    reason = "no block of this model is skipped: its repeated blocks are only"
    check_in_full(tiny("Flux", fresh=True), plain("Flux"), reason)


def test_a_program_that_fails_costs_one_recording(tiny, plain, recordings, monkeypatch):
    """Every step is ComfyUI's then, and none is recorded again."""
    from anyshape.accel.maker import Maker

    def broken(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Maker, "made", broken)
    check_in_full(tiny("Flux", fresh=True), plain("Flux"), "could not be recorded")
    assert len(recordings) == 1


def test_a_model_that_reads_a_value_back(tiny, plain, monkeypatch):
    """It is on no tape, which its first step finds out, and gives features all the same."""
    patcher = tiny("Flux", fresh=True)
    kind = type(patcher.model.diffusion_model)
    own = kind.forward_orig

    def reads(self, *args, **kwargs):
        assert float(args[4].sum()) >= 0  # the time step, on the host
        return own(self, *args, **kwargs)

    wanted = plain("Flux")
    monkeypatch.setattr(kind, "forward_orig", reads)
    for made in (skipping(patcher), compiled(skipping(patcher))):
        out = sample(made, "Flux")
        assert 0 < error(out, wanted) < 0.7
        assert counted() == PLANNED
    assert any("a value came back" in reason for reason in reasons()), reasons()


def test_a_model_that_also_keeps_something(tiny, plain, monkeypatch):
    """Then nobody knows what a forward without some of its blocks would leave to the next."""
    patcher = tiny("Flux", fresh=True)
    kind = type(patcher.model.diffusion_model)
    own = kind.forward_orig

    def reads(self, *args, **kwargs):
        self.latest = float(args[4].sum())
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward_orig", reads)
    wanted = plain("Flux")
    assert torch.equal(sample(skipping(patcher), "Flux"), wanted)
    assert (last_run()["full"], last_run()["skipped"]) == (STEPS, 0) and last_run()["resets"]


@pytest.mark.parametrize("counts", [False, True])
def test_a_patch_of_another_node_in_the_middle(tiny, skipped, counts):
    """It is left out with its block where it is on the tape; where it counts its calls, it is called on every step."""
    patcher, calls = tiny("Flux").clone(), []

    def louder(args, extra):
        out = extra["original_block"](args)
        return {**out, "img": out["img"] * 1.1}

    def counting(args, extra):
        calls.append(1)
        return louder(args, extra)

    patcher.set_model_patch_replace(counting if counts else louder, "dit", "double_block", 1)
    wanted = sample(patcher, "Flux")
    calls.clear()
    out = sample(skipping(patcher), "Flux")
    if counts:
        assert torch.equal(out, wanted) and len(calls) == STEPS
        assert (last_run()["full"], last_run()["skipped"]) == (STEPS, 0) and last_run()["resets"]
    else:
        assert counted() == PLANNED
        assert error(out, wanted) < error(skipped("Flux"), wanted)


def test_a_video_that_is_made_block_by_block(tiny):
    """Its model keeps keys and values from call to call (SamplerARVideo), and calls no wrappers then."""
    name = "WAN21_CausalAR_T2V"
    if name not in {entry.name for entry in architectures.present()}:
        pytest.skip("this ComfyUI has no such model")
    run = {"sampler": "ar_video", "cfg": 1.0}
    wanted = sample(tiny(name), name, **run)
    assert torch.equal(sample(skipping(compiled(tiny(name))), name, **run), wanted)
    assert counted()["skipped"] == 0
    assert any("block by block" in each["reason"] for each in fallbacks())


@pytest.mark.parametrize("nodes", [[compiled], [skipping], [skipping, compiled]], ids=["compile", "skip", "both"])
@pytest.mark.parametrize("name", ["Flux", "SD3"])  # of which one's forward calls no wrappers
def test_a_clone_that_is_of_another_model(tiny, name, nodes):
    """Prompts with hooks get one from ComfyUI under DynamicVRAM, and each further GPU has one."""
    patcher, other = tiny(name), tiny(name, fresh=True)
    if not hasattr(patcher, "get_clone_model_override"):
        pytest.skip("this ComfyUI has no such clones")
    with torch.inference_mode():
        for weight in other.model.parameters():
            weight *= 1.1

    def through(each):
        for node in nodes:
            each = node(each)
        return each

    ours = through(patcher)
    wanted = [sample(through(each) if skipping in nodes else each, name) for each in (other, patcher)]
    clone = ours.clone(model_override=other.get_clone_model_override())
    assert clone.model is other.model and not torch.equal(*wanted)
    assert torch.equal(sample(clone, name), wanted[0]) and torch.equal(sample(ours, name), wanted[1])
    assert skipping not in nodes or counted() == PLANNED


def test_another_packs_forward_stays_below_ours(tiny):
    """Ours go around it, and leave it there."""

    patcher = tiny("SD3").clone()
    own = patcher.get_model_object("diffusion_model.forward")

    def theirs(*args, **kwargs):
        return own(*args, **kwargs) * 1.1

    patcher.add_object_patch("diffusion_model.forward", theirs)
    short = {"steps": 7}  # too few to skip any
    wanted, fast = sample(patcher, "SD3", **short), compiled(skipping(patcher))
    assert not torch.equal(wanted, sample(tiny("SD3"), "SD3", **short))
    assert torch.equal(sample(fast, "SD3", **short), wanted)
    off = skip_with_message(compiled(fast, mode="off"), interval=1)[0]
    assert torch.equal(sample(off, "SD3", **short), wanted)
    assert compiled(compiled(patcher), mode="off").object_patches["diffusion_model.forward"] is theirs
