"""Options that ComfyUI copies for patches along with all others: they count where code may read the copy. CPU."""

import pytest
import torch
from torch import nn

from tools.comfy_nodes import NODES
from tools.driving import compiled, sample_tiny
from tools.oracles import error, fallbacks

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")

NAME = "SD15"
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
GAINS = (1.0, 1.5, 0.5, 1.5)


class Note:
    """What a pack's wrapper puts into the options of each run."""

    def __init__(self, gain):
        self.gain = gain


def sample(patcher, gain, seed=0):
    return sample_tiny(patcher, NAME, seed=seed, steps=3, options={"packs_note": Note(gain)})


def assert_equal(patcher):
    """Runs with each of these notes are ComfyUI's."""
    fast, wanted = compiled(patcher), [sample(patcher, gain, seed) for seed, gain in enumerate(GAINS)]
    for seed, gain in enumerate(GAINS):
        assert torch.equal(sample(fast, gain, seed), wanted[seed])


def assert_follows(patcher):
    """And the note matters."""
    assert error(sample(patcher, GAINS[0]), sample(patcher, GAINS[1])) > CHANGED
    assert_equal(patcher)


@pytest.fixture
def patcher(tiny):
    return tiny(NAME, fresh=True)


def test_what_nobody_reads_is_no_guard(patcher, recordings):
    assert_equal(patcher)
    assert len(recordings) == 1


@pytest.mark.parametrize("where", ["a hook", "a function in a class"])
def test_beside_code_that_may_hold_anything_it_is_a_guard(patcher, recordings, monkeypatch, where):
    block = next(part for part in patcher.model.diffusion_model.modules() if hasattr(part, "attn1"))
    if where == "a hook":
        block.register_forward_hook(lambda module, args, out: out)
    else:
        own = type(block).forward
        monkeypatch.setattr(type(block), "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    assert_equal(patcher)
    assert len(recordings) == len(GAINS)


def plain(q, k, v, extra_options):
    return q * extra_options["packs_note"].gain, k, v


def by_another(q, k, v, extra_options):
    return q * gain_of(extra_options), k, v


def gain_of(options):
    return options["packs_" + "note"].gain


def of_all(q, k, v, extra_options):
    return q * [each for each in extra_options.values() if isinstance(each, Note)][0].gain, k, v


def that_holds(name):
    def patch(q, k, v, extra_options):
        return q * extra_options[name].gain, k, v

    return patch


class Patch:
    def __init__(self, name):
        self.name = name

    def __call__(self, q, k, v, extra_options):
        return q * extra_options[self.name].gain, k, v


PATCHES = {
    "a function": plain,
    "a function that it calls": by_another,
    "all of them": of_all,
    "a function that holds the name": that_holds("packs_note"),
    "an object": Patch("packs_note"),
}


def twice(q, k, v, extra_options):
    return q * 2, k, v


def holding(numbers):
    def patch(q, k, v, extra_options):
        return q * numbers["factor"], k, v

    return patch


class Twice:
    factor = 2.0

    def __call__(self, q, k, v, extra_options):
        return q * self.factor, k, v


class Holding(Twice):
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize("patch", [twice, holding({"factor": 2.0}), Twice()], ids=["function", "closure", "object"])
def test_a_patch_that_names_nothing_of_it(patcher, recordings, patch):
    """Each run may have another note, and is not recorded again for it."""
    patcher.set_model_attn1_patch(patch)
    assert_equal(patcher)
    assert len(recordings) == 1


@pytest.mark.parametrize("what", ["a layer", "an object of ComfyUI's", "an operation of torch's"])
def test_a_patch_that_holds_other_code(patcher, recordings, what):
    """What that reads nobody knows."""
    held = {"a layer": nn.Identity(), "an operation of torch's": torch.ops.aten.mul.Tensor}
    patcher.set_model_attn1_patch(Holding(held.get(what, patcher.model.latent_format)))
    assert_equal(patcher)
    assert len(recordings) == len(GAINS)


@pytest.mark.parametrize("reads", [False, True])
def test_a_replaced_attention(patcher, recordings, reads):
    """As PAG puts it in place of a block's own."""
    name, held = "packs_note", 1.5

    def attention(q, k, v, extra_options, mask=None):
        return v * (extra_options[name].gain if reads else held)

    patcher.set_model_attn1_replace(attention, "middle", 0)
    (assert_follows if reads else assert_equal)(patcher)
    assert (len(recordings) == 1) is not reads


def test_comfyuis_caches_beside_comfyuis_patches(patcher, recordings):
    """EasyCache puts an object into the options that is another one in each run."""
    patched = NODES["unet"]["EasyCache"][0](NODES["unet"]["FreeU_V2"][0](patcher))
    fast, run = compiled(patched), {"steps": 3, "height": 16, "width": 16}
    for seed in range(3):
        assert torch.equal(sample_tiny(fast, NAME, seed=seed, **run), sample_tiny(patched, NAME, seed=seed, **run))
    assert len(recordings) == 1


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES.keys())
def test_what_a_patch_reads_of_the_copy(patcher, patch):
    patcher.set_model_attn1_patch(patch)
    assert_follows(patcher)


class Louder(nn.Module):
    """A pack's layer around one of ComfyUI's."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args, transformer_options, **kwargs):
        copied = {key: value for key, value in transformer_options.items() if key not in ("patches",)}
        out = self.own(*args, transformer_options=transformer_options, **kwargs)
        return out * copied["packs_note"].gain


def test_what_a_layer_of_a_pack_reads(patcher):
    model = patcher.model.diffusion_model
    block = next(part for part in model.modules() if hasattr(part, "attn1"))
    block.attn1 = Louder(block.attn1)
    assert_follows(patcher)


class Copying(nn.Module):
    """A pack's layer that hands a copy of the options on."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args, transformer_options, **kwargs):
        return self.own(*args, transformer_options={**transformer_options}, **kwargs)


def louder(function, *args, transformer_options, **kwargs):
    """A pack's attention."""
    return function(*args, **kwargs) * transformer_options["packs_note"].gain


def test_attention_that_is_given_a_copy(patcher):
    block = next(part for part in patcher.model.diffusion_model.modules() if hasattr(part, "attn1"))
    block.attn1 = Copying(block.attn1)
    patcher.model_options["transformer_options"]["optimized_attention_override"] = louder
    assert_follows(patcher)
    assert not fallbacks()
