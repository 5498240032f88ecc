"""Forwards that another pack puts in place of a part's own, and that leave something in the part: on the CPU."""

import types

import pytest
import torch

from tools.driving import SMALL_RUN, compiled, randn, skipping
from tools.oracles import counted, error, fallbacks, shapes
from tools.skip_driving import RUN

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-5
PART = "diffusion_model.middle_block.1.transformer_blocks.0.attn2"
ONE_STEP_LATER = {"full": 4, "skipped": 5}


def replaced(patcher, make):
    """A clone whose part runs ``make(part, its own forward)``, bound to it as packs do it."""
    patched = patcher.clone()
    part = patched.get_model_object(PART)
    patched.add_object_patch(f"{PART}.forward", types.MethodType(make(type(part).forward), part))
    return patched


def guided(tokens):
    """As KJNodes' WanVideoNAG: the part gets a prompt of the node's own, and its forward reads it there."""

    def make(own):
        def forward(self, x, context=None, *args, **kwargs):
            self.more = tokens
            out = own(self, x, context, *args, **kwargs)
            return out + 0.5 * own(self, x, self.more.expand(len(x), -1, -1), *args, **kwargs)

        return forward

    return make


def test_a_tensor_that_a_forward_puts_into_its_part(models, fresh, recordings):
    """The node runs again with another one: one forward without a tape, then it is recorded, at a known size too."""
    run = SMALL_RUN | {"steps": 3}
    for edit in range(3):
        wanted = models.sample(replaced(fresh, guided(randn(1, 5, 64, seed=edit))), **run)
        fast = compiled(replaced(fresh, guided(randn(1, 5, 64, seed=edit))))
        for again in range(2):
            recordings.clear()
            assert torch.equal(models.sample(fast, **run), wanted)
            assert shapes()[-1]["state"] == "tape" and len(recordings) == (0 if again else 2), (edit, again)
    assert error(models.sample(fresh, **run), wanted) > 1e-3


def test_a_part_that_changes_at_each_call_costs_one_recording_in_a_later_run(models, fresh, recordings):
    """TeaCache and MagCache count their steps on the model."""

    def make(own):
        def forward(self, *args, **kwargs):
            self.steps = getattr(self, "steps", 0) + 1
            return own(self, *args, **kwargs) * (1 + self.steps % 5 / 10)

        return forward

    part, run = fresh.get_model_object(PART), SMALL_RUN | {"steps": 8}
    patched, fast = replaced(fresh, make), compiled(replaced(fresh, make))
    for later in (False, True, True):
        outs = []
        for each in (patched, fast):
            part.__dict__.pop("steps", None)
            recordings.clear()
            outs.append(models.sample(each, **run))
        assert torch.equal(*outs) and shapes()[-1]["state"] == "eager"
        assert len(recordings) == 1 if later else 1 < len(recordings) <= 4
    part.__dict__.pop("steps", None)
    assert error(models.sample(compiled(fresh), **run), models.sample(fresh, **run)) < CLOSE
    assert shapes()[-1]["state"] == "tape"


def test_blocks_are_skipped_in_the_first_run_too(models, fresh):
    """As KJNodes' EnhanceAVideo: the first forward notes its settings in the part."""

    def make(own):
        def forward(self, *args, **kwargs):
            self.frames = 3
            return own(self, *args, **kwargs) * (1 + 1 / self.frames)

        return forward

    fast = compiled(skipping(replaced(fresh, make), depth="2"))
    models.sample(fast, **RUN)
    assert {name: counted()[name] for name in ONE_STEP_LATER} == ONE_STEP_LATER
    models.sample(fast, **RUN)
    assert {name: counted()[name] for name in ONE_STEP_LATER} == {"full": 3, "skipped": 6}


def test_a_patch_that_was_taken_off_leaves_alike_blocks_alike(models, fresh):
    """ComfyUI leaves the class's own method at the part."""
    from anyshape.accel.block_forwards import Blocks
    from anyshape.accel.tape.blocks import likeness

    models.sample(fresh, **SMALL_RUN)  # loaded
    block = fresh.get_model_object(PART.removesuffix(".attn2"))
    before = likeness(block)
    for place in (PART, PART.removesuffix(".attn2")):
        part = fresh.get_model_object(place)
        patched = fresh.clone()
        patched.add_object_patch(f"{place}.forward", types.MethodType(lambda self, x, *_, **__: x, part))
        models.sample(patched, **SMALL_RUN)
        assert place != PART or likeness(block) is None
        models.sample(fresh, **SMALL_RUN)
        assert "forward" in vars(part) and likeness(block) == before is not None
    found, calls, model = Blocks(stages=True), [], fresh.model.diffusion_model
    found.look(model, 1)
    with found.ours(model, lambda path, each, own, args, kwargs: calls.append(path) or own(*args)):
        block.forward(torch.ones(1, 4, 64), torch.ones(1, 3, 64))
    assert calls == ["middle_block.1.transformer_blocks.0"]
    assert block.forward.__func__ is type(block).forward


@pytest.mark.parametrize("skips", [False, True], ids=["compiled", "skipping"])
def test_a_forward_that_a_run_puts_into_a_model_whose_own_calls_no_wrappers(models, skips):
    """As ComfyUI-NAG does around its runs. It acts with our node, and nothing of it stays."""
    from comfy.patcher_extension import WrappersMP

    from tools.architectures import patchers

    run = RUN | {"width": 128, "height": 128, "tokens": 24}
    plain, ours = patchers.make("SD3", blocks=4), patchers.make("SD3", blocks=4)

    def with_run(patcher):
        def sampling(executor, *args, **kwargs):
            network = executor.class_obj.model_patcher.model.diffusion_model
            own = type(network).forward
            network.forward = types.MethodType(lambda self, *a, **k: own(self, *a, **k) * 1.25, network)
            try:
                return executor(*args, **kwargs)
            finally:
                network.forward = types.MethodType(own, network)

        patcher = patcher.clone()
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "a pack", sampling)
        return patcher

    node = (lambda patcher: skipping(compiled(patcher))) if skips else compiled
    eager, ways = skipping(plain) if skips else plain, (with_run, lambda patcher: patcher)
    wanted = {way: models.sample(way(eager), **run) for way in ways}
    assert error(*wanted.values()) > 0.01
    for way in (*ways, *ways):
        assert error(models.sample(way(node(ours)), **run), wanted[way]) < CLOSE
    # and without our node it is the model's own again
    assert error(models.sample(ours, **run), models.sample(plain, **run)) == 0.0


def without_wrappers(own):
    """As ComfyUI-Fluxtapoz's and ComfyUI-HunyuanLoom's models."""

    class Other(own):
        def forward(self, *args, **kwargs):
            return self._forward(*args, **kwargs) * 1.25

    return Other


def with_wrappers(own):
    class Other(own):
        def forward(self, *args, transformer_options, **kwargs):
            from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

            wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
            call = WrapperExecutor.new_class_executor(super().forward, self, wrappers).execute
            return call(*args, transformer_options=transformer_options, **kwargs) * 1.25

    return Other


@pytest.mark.parametrize("skips", [False, True], ids=["compiled", "skipping"])
@pytest.mark.parametrize("name, make", [("Flux", without_wrappers), ("SD3", with_wrappers)], ids=["Flux", "SD3"])
def test_a_class_that_a_node_gives_the_model(models, name, make, skips):
    """After our node, and it takes it away again: whether the forward calls wrappers is another thing each time."""
    from tools.architectures import patchers

    run = RUN | {"width": 128, "height": 128, "tokens": 24} | ({} if skips else {"steps": 3})
    plain, ours = patchers.make(name, blocks=4), patchers.make(name, blocks=4)
    eager, fast = (skipping(plain), skipping(compiled(ours))) if skips else (plain, compiled(ours))
    networks = [patcher.model.diffusion_model for patcher in (plain, ours)]
    own, results = type(networks[0]), []
    other = make(own)
    for kind in (own, other, own, other):
        for network in networks:
            network.__class__ = kind
        results.append(models.sample(eager, **run))
        assert error(models.sample(fast, **run), results[-1]) < CLOSE
        assert not fallbacks() and {shape["state"] for shape in shapes()} == {"tape"}
    assert error(*results[:2]) > 0.01


def test_a_node_that_runs_again_records_nothing_again(models, fusing, recordings):
    """Also of a model around whose forward ours is."""
    from tools.architectures import patchers

    patcher = patchers.make("SD3")
    for seed in range(3):
        models.sample(compiled(patcher), width=128, height=128, steps=2, tokens=24, seed=seed)
    assert len(recordings) == 1
