"""A model that keeps what it computes of a prompt during a run: its blocks are fast, and forget earlier runs."""

import pytest
import torch

from tools import embed
from tools.driving import calls_of, compiled
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")
CLOSE = 1e-5

RUN = {"width": 128, "height": 128, "steps": 4, "tokens": 20, "cfg": 3.0}
OTHERS = ({"width": 144}, {"seed": 1}, {"tokens": 27}, {}, {"batch": 2}, {"cfg": 1.0}, {"width": 176, "height": 96})


@pytest.fixture
def model(models):
    """As if it were a model of ComfyUI's."""
    return embed.as_comfyuis("prompt_cache").make()


@pytest.fixture
def replays(monkeypatch):
    """The blocks that ran on a program."""
    from anyshape.accel.block_tier import BlockTier

    return calls_of(monkeypatch, BlockTier, "_replay", lambda self, take, path, *_: path)


@pytest.fixture
def block_recordings(monkeypatch):
    from anyshape.accel import block_tier

    return calls_of(monkeypatch, block_tier, "record_block", lambda visit, book, block, *_: id(block))


def reasons():
    """Why calls ran in eager."""
    return {" ".join(each["reason"].split()[:4]) for each in fallbacks()}


def shorter(positive, negative):
    """The two prompts are not of one length, so that each is a call."""
    return positive, [[negative[0][0][:, :9], negative[0][1]]]


def test_blocks_that_are_given_their_attention(models, model, fusing, replays, recordings, block_recordings):
    """The first step of a run keeps, in eager. Nothing is recorded again in later runs, nor whole ones in vain."""
    fast = compiled(model)
    for other in ({}, *OTHERS):
        run = RUN | other
        assert error(models.sample(fast, **run), models.sample(model, **run)) < CLOSE
    assert len(replays) > 5 * 3 * len(OTHERS) and reasons() == {"the model is changed"}
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert all("blocks recorded one by one" in shape["note"] for shape in shapes())
    whole, of_blocks = len(recordings), len(block_recordings)
    for other in ({"width": 160}, {"width": 112, "tokens": 31}):  # sizes after the first few
        assert error(models.sample(fast, **RUN | other), models.sample(model, **RUN | other)) < CLOSE
    assert len(recordings) == whole and len(block_recordings) == of_blocks + 2
    for other in ({}, *OTHERS):
        run = RUN | other | {"seed": 7}
        assert error(models.sample(fast, **run), models.sample(model, **run)) < CLOSE
    assert len(recordings) == whole and len(block_recordings) == of_blocks + 2


def test_prompts_of_two_lengths(models, model, fusing, replays, block_recordings):
    fast, run = compiled(model), RUN | {"steer": shorter}
    for seed in range(3):
        wanted = models.sample(model, **run, seed=seed)
        assert error(models.sample(fast, **run, seed=seed), wanted) < CLOSE
        assert error(wanted, models.sample(model, **RUN, seed=seed)) > CLOSE
    assert len(replays) >= 3 * 5 * 6 - 2 and len(block_recordings) == 3
    assert reasons() <= {"the model is changed", "it reads a tensor"}


def test_many_prompts(models, model, fusing, replays):
    """Each of another length, so that each is a call: what is kept grows with each of them in the first step."""

    def many(positive, negative):
        tokens, rest = positive[0]
        return [[tokens[:, :count], rest] for count in (5, 9, 13, 17, 20)], negative

    fast, run = compiled(model), RUN | {"steer": many, "steps": 6}
    for seed in range(3):
        replays.clear()
        wanted = models.sample(model, **run, seed=seed)
        assert error(models.sample(fast, **run, seed=seed), wanted) < CLOSE
        assert len(replays) > 4 * 5 * 5  # of five steps, five blocks and six prompts


def test_without_what_is_kept_the_whole_is_recorded(models, model, fusing, recordings, replays):
    plain, fast = model.clone(), compiled(model)
    for each in (plain, fast):
        each.model_options["transformer_options"]["no_prompt_cache"] = True
    for other in ({}, *OTHERS):
        assert error(models.sample(fast, **RUN | other), models.sample(plain, **RUN | other)) < CLOSE
    assert not replays and {shape["note"] for shape in shapes()} == {""} and not fallbacks()
    kept = compiled(model)  # and again with it
    assert error(models.sample(kept, **RUN), models.sample(model, **RUN)) < CLOSE
    assert replays


def test_a_patch_that_gets_a_copy_of_all_options(models, model, fusing, recordings):
    """Among them tensors that nobody reads: the forward is recorded, though one block in place of all."""
    patched, fast = model.clone(), compiled(model)
    for each in (patched, fast):
        each.set_model_patch(lambda q, k, v, extra_options: {"q": q * 1.5}, "attn1_patch")
    for other in ({}, {"seed": 1}, {"width": 144}):
        wanted = models.sample(patched, **RUN | other)
        assert error(models.sample(fast, **RUN | other), wanted) < CLOSE
        assert error(wanted, models.sample(model, **RUN | other)) > CLOSE
    assert len(recordings) == 2 and {(shape["state"], shape["note"]) for shape in shapes()} == {("tape", "")}


def test_other_weights_between_runs(models, model, fusing, replays):
    fast = compiled(model)
    for scale in (1.0, 1.5, 0.5, 1.0):
        weight = model.model.diffusion_model.blocks[2].down.weight
        with torch.inference_mode():
            weight.data = weight.data * scale
        replays.clear()
        assert error(models.sample(fast, **RUN), models.sample(model, **RUN)) < CLOSE
        assert replays


def test_a_block_that_begins_to_differ(models, model, fusing):
    """What another node does to one block between two runs."""
    fast = compiled(model)
    assert error(models.sample(fast, **RUN), models.sample(model, **RUN)) < CLOSE
    block = model.model.diffusion_model.blocks[1]
    handle = block.register_forward_hook(lambda module, args, out: out * 1.5)
    wanted = models.sample(model, **RUN)
    assert error(models.sample(fast, **RUN), wanted) < CLOSE
    handle.remove()
    assert (
        error(models.sample(fast, **RUN), models.sample(model, **RUN))
        < CLOSE
        < error(models.sample(model, **RUN), wanted)
    )
