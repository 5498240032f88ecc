"""Patches of other nodes on transformers: they take dicts of arguments, and may stand in for whole blocks. CPU."""

import pytest
import torch
from torch import nn

from tools.driving import compiled, randn, sample_tiny
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a patch must show, so that a test can tell


@pytest.fixture
def tiny(pack):
    from tools.architectures import patchers

    return patchers.make


def patched(patcher, set_patch):
    patcher = patcher.clone()
    set_patch(patcher)
    return patcher


def assert_equal(name, plain, fast, **run):
    wanted = sample_tiny(plain, name, **run)
    assert error(sample_tiny(fast, name, **run), wanted) < CLOSE
    return wanted


def level(options):
    return float(options["sigmas"][0])


@pytest.mark.parametrize("by_level", [False, True])
def test_a_patch_behind_each_block(tiny, recordings, by_level):
    """As the ControlNets of Qwen-Image: it gives its own dict of arguments back. Written down, or called."""

    def behind(args):
        if not by_level or level(args["transformer_options"]) > 0.5:
            args["img"] = args["img"] + 0.5 * args["img"].roll(1, -1)
        return args

    patcher = tiny("QwenImage")
    plain, fast = (
        patched(each, lambda p: p.set_model_double_block_patch(behind)) for each in (patcher, compiled(patcher))
    )
    for seed in range(2):
        wanted = assert_equal("QwenImage", plain, fast, seed=seed, steps=4)
    assert error(wanted, sample_tiny(patcher, "QwenImage", seed=1, steps=4)) > CHANGED
    assert len(recordings) == 1 + by_level and {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()


def test_layers_and_tokens_of_a_patch(tiny, recordings):
    """It keeps layers of its own and something made at its first call, as a model patch does."""
    patcher = tiny("QwenImage")
    width = patcher.model.diffusion_model.inner_dim

    class Patch:
        def __init__(self):
            self.layer, self.hint = nn.Linear(8, width), None
            for number, weight in enumerate(self.layer.parameters()):
                weight.data = randn(*weight.shape, seed=number) * 0.3

        def __call__(self, args):
            if self.hint is None:
                self.hint = randn(1, 1, 8, seed=5)
            return args | {"img": args["img"] + self.layer(self.hint)}

        def to(self, *_):
            return self

    plain, fast = (patched(p, lambda p: p.set_model_double_block_patch(Patch())) for p in (patcher, compiled(patcher)))
    for seed in range(3):
        assert_equal("QwenImage", plain, fast, seed=seed)
    assert len(recordings) <= 2 and shapes()[-1]["state"] == "tape"


@pytest.mark.parametrize("name", ["Flux", "SD3", "WAN21_T2V"])
def test_a_block_that_is_left_out(tiny, recordings, name):
    """As guidance by skipped layers: the patch has no state, so it is written down."""
    patcher = tiny(name)

    def skip(args, extra):
        return args

    plain, fast = (
        patched(p, lambda p: p.set_model_patch_replace(skip, "dit", "double_block", 0))
        for p in (patcher, compiled(patcher))
    )
    for seed in range(2):
        wanted = assert_equal(name, plain, fast, seed=seed)
    assert error(wanted, sample_tiny(patcher, name, seed=1)) > CHANGED
    assert len(recordings) == 1 and {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
    assert_equal(name, patcher, compiled(patcher))  # which ran patched


@pytest.mark.parametrize("name", ["Flux", "SD3", "WAN21_T2V"])
def test_a_patch_around_a_block(tiny, recordings, name):
    patcher, strength = tiny(name), [1.2]

    def around(args, extra):
        out = extra["original_block"](args)
        return out | {"img": out["img"] * strength[0]}

    plain, fast = (
        patched(p, lambda p: p.set_model_patch_replace(around, "dit", "double_block", 0))
        for p in (patcher, compiled(patcher))
    )
    before = assert_equal(name, plain, fast)
    strength[0] = 0.7
    after = assert_equal(name, plain, fast)
    assert_equal(name, plain, fast)
    assert error(after, before) > CHANGED and len(recordings) == 2 and not fallbacks()


@pytest.mark.parametrize("name", ["Flux", "SD3", "WAN21_T2V"])
def test_a_patch_around_a_block_at_some_steps(tiny, recordings, fusing, block_programs, name):
    """A replay has no block to give it: the whole is not recorded, and says so. Its blocks are."""
    patcher = tiny(name)

    def around(args, extra):
        out = extra["original_block"](args)
        return out | {"img": out["img"] * (1.2 if level(args["transformer_options"]) > 0.6 else 0.8)}

    plain, fast = (
        patched(p, lambda p: p.set_model_patch_replace(around, "dit", "double_block", 0))
        for p in (patcher, compiled(patcher))
    )
    for seed in range(3):
        wanted = assert_equal(name, plain, fast, seed=seed, steps=4)
    assert error(wanted, sample_tiny(patcher, name, seed=2, steps=4)) > CHANGED
    assert len(recordings) == 2
    reasons = [shape["reason"] + shape["note"] for shape in shapes()]
    assert all("takes a function" in reason for reason in reasons), reasons


def test_a_patch_of_the_input(tiny, recordings):
    """Flux calls it before its blocks; it changes the number of tokens at some steps, and counts."""
    patcher = tiny("Flux")

    def set_patch(p):
        calls = []

        def more(args):
            calls.append(1)
            if len(calls) % 4 < 2:
                return args
            one, ids = args["img"][:, :1] * 0.5, args["img_ids"]
            return args | {"img": torch.cat([args["img"], one], 1), "img_ids": torch.cat([ids, ids[:, :1]], 1)}

        p.set_model_post_input_patch(more)

    plain, fast = (patched(p, set_patch) for p in (patcher, compiled(patcher)))
    if "post_input" not in plain.model_options["transformer_options"]["patches"]:
        pytest.skip("this ComfyUI has no such patch")
    for seed in range(3):
        assert_equal("Flux", plain, fast, seed=seed, steps=5)
