"""Patches of other nodes on recorded models: written down with their state as a guard, or called in each forward.

On the CPU; whatever a patch does and whenever it changes its mind, the picture is eager's.
"""

import functools
import importlib

import pytest
import torch
from torch import nn

from tools.driving import compiled, randn
from tools.oracles import error, fallbacks, shapes
from tools.patching import PATCHES

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a patch must show, so that a test can tell
SIZE = {"width": 72, "height": 64}


def takes_of(patcher):
    from anyshape.accel.families.attach import engine_of

    takes = engine_of(patcher)(patcher.model.diffusion_model)._tape._tapes._takes
    return [take for group in takes.values() for take in group]


def with_patch(patcher, set_patch):
    patched = patcher.clone()
    set_patch(patched)
    return patched


def run(models, patcher, **changes):
    return models.sample(patcher, **SIZE | {"steps": 4} | changes)


def assert_equal(models, plain, fast, **changes):
    """Both give the same picture; the second is the compiled one."""
    wanted = run(models, plain, **changes)
    assert error(run(models, fast, **changes), wanted) < CLOSE
    return wanted


# Written down -----------------------------------------------------------------------------------------------------


def scaling(patcher, strength):
    """A patch without a state of its own."""
    patcher.set_model_attn2_output_patch(lambda n, options: n * strength)


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_a_patch_without_state_is_written_down(models, fresh, recordings, mode):
    plain = run(models, fresh)
    patched, fast = (with_patch(each, lambda p: scaling(p, 1.5)) for each in (fresh, compiled(fresh, mode=mode)))
    for seed in range(2):
        wanted = assert_equal(models, patched, fast, seed=seed)
    assert error(wanted, run(models, fresh, seed=1)) > CHANGED and plain.shape == wanted.shape
    assert len(recordings) == 1 and not fallbacks()
    (take,) = takes_of(fast)
    assert not take.live and not take.graph_obstacle and take.used


class Strength:
    """As packs have it: an object whose numbers are its settings."""

    def __init__(self, value):
        self.value, self.more = value, {"list": [1.0]}

    def __call__(self, n, options):
        return n * self.value * self.more["list"][0]


def changed_value(patch):
    patch.value = 0.5


def changed_item(patch):
    patch.more["list"][0] = 1.25


def changed_list(patch):
    patch.more["list"].insert(0, 0.8)


def changed_class(patch):
    type(patch).__call__ = lambda self, n, options: n * 3.0


@pytest.mark.parametrize("change", [changed_value, changed_item, changed_list, changed_class])
def test_the_same_object_with_another_setting(models, fresh, recordings, change):
    """Between two pictures."""
    kind = type("Strength", (Strength,), {})
    patch = kind(1.5)
    patched, fast = (
        with_patch(each, lambda p: p.set_model_attn2_output_patch(patch)) for each in (fresh, compiled(fresh))
    )
    # older ComfyUI copies an object with the options, so that each clone has its own
    set_ = [each.model_options["transformer_options"]["patches"]["attn2_output_patch"] for each in (patched, fast)]
    patches = {id(one): one for each in set_ for one in each}
    before = assert_equal(models, patched, fast)
    assert_equal(models, patched, fast)
    assert len(recordings) == 1
    kinds = {type(each) for each in patches.values()}
    for each in patches.values() if change is not changed_class else [kind(1.0)]:
        change(each)
    assert len(kinds) == 1
    after = assert_equal(models, patched, fast)
    assert_equal(models, patched, fast)
    assert error(after, before) > CHANGED and len(recordings) == 2 and not fallbacks()


LOUDNESS = 1.5
TABLE = {"loud": [1.5]}


def helper(n):
    return n * TABLE["loud"][0]


@pytest.mark.parametrize("how", ["a global", "a table", "a default", "a cell", "an attribute", "a partial"])
def test_what_a_function_reads(models, fresh, recordings, monkeypatch, how):
    cell = [1.5]

    def by_global(n, options):
        return n * LOUDNESS

    def by_table(n, options):
        return helper(n)

    def by_default(n, options, scale=1.5):
        return n * scale

    def by_cell(n, options):
        return n * cell[0]

    def by_attribute(n, options):
        return n * by_attribute.scale

    def by_partial(scale, n, options):
        return n * scale["of"]

    by_attribute.scale, settings = 1.5, {"of": 1.5}
    patch = {
        "a global": by_global, "a table": by_table, "a default": by_default, "a cell": by_cell,
        "an attribute": by_attribute, "a partial": functools.partial(by_partial, settings),
    }[how]  # fmt: skip
    patched, fast = (with_patch(e, lambda p: p.set_model_attn2_output_patch(patch)) for e in (fresh, compiled(fresh)))
    before = assert_equal(models, patched, fast)
    if how == "a partial":  # of which older ComfyUI makes a copy in each clone
        for each in (patched, fast):
            each.model_options["transformer_options"]["patches"]["attn2_output_patch"][0].args[0]["of"] = 0.5
    monkeypatch.setitem(globals(), "LOUDNESS", 0.5)
    monkeypatch.setitem(TABLE, "loud", [0.5])
    by_default.__defaults__, by_attribute.scale, cell[0] = (0.5,), 0.5, 0.5
    after = assert_equal(models, patched, fast)
    assert error(after, before) > CHANGED and len(recordings) == 2 and not fallbacks()


def test_two_patches_take_turns(models, fresh, recordings):
    """As guidance by a second pass does in each step."""
    patched, fast = {}, compiled(fresh)
    for strength in (1.5, 0.5):
        patched[strength] = [with_patch(e, lambda p, s=strength: scaling(p, s)) for e in (fresh, fast)]
    for strength in (1.5, 0.5, 1.5, 0.5):
        assert_equal(models, *patched[strength])
    assert len(recordings) == 2 and not fallbacks()


def test_a_patch_that_reads_which_rows_are_which(models, fresh):
    """``cond_or_uncond`` may be another order at the same size."""

    def patch(n, options):
        rows = [[1.5] if kind == 0 else [0.5] for kind in options["cond_or_uncond"]]
        return n * torch.tensor(rows, dtype=n.dtype).repeat_interleave(n.shape[0] // len(rows), 0)[:, :, None]

    fast = compiled(fresh)
    for each in (fresh, fast):
        each.set_model_attn2_output_patch(patch)

    def forward(patcher, order):
        from tools.driving import options_of, unet_inputs

        options = options_of(patcher) | {"cond_or_uncond": list(order)}
        with torch.inference_mode():
            return patcher.model.diffusion_model(**unet_inputs(patcher, 128, 64), transformer_options=options)

    outs = {}
    for order in ((1, 0), (0, 1), (1, 0), (0, 1)):
        outs[order] = forward(fresh, order)
        assert error(forward(fast, order), outs[order]) < CLOSE
    assert error(outs[1, 0], outs[0, 1]) > CHANGED
    assert not any(take.live for take in takes_of(fast))


def test_sigma_as_a_tensor_is_an_input(models, fresh, recordings):
    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn2_output_patch(lambda n, o: n / (1 + o["sigmas"][:1, None, None])))
        for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=3)
    assert len(recordings) == 1 and not takes_of(fast)[0].live


# Called in each forward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_that_counts_is_called_as_in_eager(models, fresh, recordings, patch):
    """It sees the same places in the same order, once in each forward, and what is around it is recorded."""
    outs, logs = [], []
    for each in (fresh, compiled(fresh)):
        log = []
        patched = with_patch(each, lambda p, log=log: patch(p, log))
        outs.append([run(models, patched, seed=seed) for seed in range(2)])
        logs.append(log)
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert logs[0] == logs[1] and len(logs[0]) >= 8
    assert len(recordings) <= 2 and [shape["state"] for shape in shapes()] == ["tape"] and not fallbacks()


def sigma_of(options):
    return float(options["sigmas"][0])


def test_a_patch_for_some_steps_alone(models, fresh, recordings):
    """It decides by the noise level, read as a number."""

    def patch(h, options):
        return h * 1.3 if sigma_of(options) < 2.0 else h

    patched, fast = (with_patch(e, lambda p: p.set_model_input_block_patch(patch)) for e in (fresh, compiled(fresh)))
    for seed in range(2):
        wanted = assert_equal(models, patched, fast, seed=seed, steps=6)
    assert error(wanted, run(models, fresh, seed=1, steps=6)) > CHANGED
    assert len(recordings) == 2 and not fallbacks()
    (take,) = takes_of(fast)
    assert take.live and take.used and "no graph" in take.graph_obstacle


def test_a_step_counter(models, fresh, recordings):
    def patch_of():
        steps = [0]

        def patch(h, options):
            steps[0] += options["block"] == ("input", 0)
            return h * (1 + 0.1 * steps[0])

        return patch

    patched, fast = (
        with_patch(e, lambda p: p.set_model_input_block_patch(patch_of())) for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast, steps=6)
    assert_equal(models, patched, fast, steps=6)
    assert len(recordings) == 2


def test_a_number_that_others_change_between_steps(models, fresh, recordings):
    """No forward changes it, but each finds another one: it is not recorded again for ever."""

    def patched(patcher):
        patcher, scale = patcher.clone(), [1.0]

        def between(apply, args):
            scale[0] += 0.05
            return apply(args["input"], args["timestep"], **args["c"])

        patcher.set_model_unet_function_wrapper(between)
        patcher.set_model_attn2_output_patch(lambda n, options: n * scale[0])
        return patcher

    assert_equal(models, patched(fresh), patched(compiled(fresh)), steps=12)
    assert len(recordings) == 5  # four in vain, and the one with the patch as a call
    assert takes_of(compiled(fresh))[-1].live


def test_random_numbers(models, fresh):
    def patch(n, options):
        return n + 0.1 * torch.randn(n.shape)

    patched, fast = (with_patch(e, lambda p: p.set_model_attn1_output_patch(patch)) for e in (fresh, compiled(fresh)))
    outs, states = [], []
    for each in (patched, fast):
        torch.manual_seed(11)
        outs.append([run(models, each) for _ in range(3)])
        states.append(torch.get_rng_state())
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert torch.equal(*states) and error(outs[0][0], run(models, fresh)) > CHANGED


class Adapter(nn.Module):
    """As IPAdapter: layers of its own, attention to its own tokens, strength by step."""

    def __init__(self, width):
        super().__init__()
        self.to_k, self.to_v = nn.Linear(16, width, bias=False), nn.Linear(16, width, bias=False)
        for number, weight in enumerate(self.parameters()):
            weight.data = randn(*weight.shape, seed=number) * 0.5


def test_layers_of_a_patch_and_its_own_tokens(models, fresh, recordings):
    width = fresh.model.diffusion_model.input_blocks[1][1].transformer_blocks[0].attn2.to_q.out_features
    adapter, tokens = Adapter(width), randn(1, 4, 16, seed=8)

    def replace(q, k, v, extra_options):
        from comfy.ldm.modules.attention import optimized_attention

        out = optimized_attention(q, k, v, extra_options["n_heads"])
        if sigma_of(extra_options) > 1.0:
            rows = [tokens if kind == 0 else torch.zeros_like(tokens) for kind in extra_options["cond_or_uncond"]]
            own = torch.cat(rows).repeat_interleave(len(q) // len(rows), 0)
            out = out + optimized_attention(q, adapter.to_k(own), adapter.to_v(own), extra_options["n_heads"])
        return out

    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn2_replace(replace, "input", 1)) for e in (fresh, compiled(fresh))
    )
    before = assert_equal(models, patched, fast, steps=6)
    assert_equal(models, patched, fast, seed=2, steps=6)
    with torch.no_grad():
        adapter.to_v.weight.mul_(2.0)  # in place: nothing tells us
        tokens.add_(0.5)
    after = assert_equal(models, patched, fast, steps=6)
    assert error(after, before) > CHANGED and len(recordings) <= 2 and not fallbacks()


def test_a_patch_that_keeps_features_for_the_next_step(models, fresh):
    """What it keeps is its own: a program's memory is used again."""

    def patch_of():
        kept = {}

        def patch(n, options):
            place = options["block"], options["block_index"]
            out = n + 0.3 * kept.get(place, torch.zeros_like(n))
            kept[place] = n
            return out

        return patch

    patched, fast = (
        with_patch(e, lambda p: p.set_model_attn1_output_patch(patch_of())) for e in (fresh, compiled(fresh))
    )
    assert_equal(models, patched, fast, steps=6)
    assert_equal(models, patched, fast, steps=6, seed=2)


def test_results_of_several_forms(models, fresh, recordings):
    """It shrinks the picture for some steps: a recording of each form, found again in the next picture."""

    def shrink(h, options):
        return h[..., ::2, ::2] if options["block"][1] == 1 and sigma_of(options) > 2.0 else h

    def grow(h, skip, options):
        if h.shape[-1] != skip.shape[-1] or h.shape[-2] != skip.shape[-2]:
            h = nn.functional.interpolate(h, skip.shape[-2:])
        return h, skip

    def set_patches(patcher):
        patcher.set_model_input_block_patch_after_skip(shrink)
        patcher.set_model_output_block_patch(grow)

    patched, fast = (with_patch(each, set_patches) for each in (fresh, compiled(fresh)))
    for seed in range(3):
        assert_equal(models, patched, fast, seed=seed, steps=6)
    assert len(recordings) == 3 and not fallbacks()


def test_forms_and_a_count(models, fresh, recordings, fusing, block_programs):
    """A forward that is broken off must not call it twice. Then only its blocks are recorded."""

    def set_patches(patcher):
        calls, log = [0], []

        def shrink(h, options):
            calls[0] += 1
            log.append((options["block"], tuple(h.shape)))
            return h[..., ::2, ::2] if options["block"][1] == 1 and calls[0] % 20 > 8 else h * (1 + calls[0] / 100)

        def grow(h, skip, options):
            return (nn.functional.interpolate(h, skip.shape[-2:]) if h.shape[-1] != skip.shape[-1] else h), skip

        patcher.set_model_input_block_patch_after_skip(shrink)
        patcher.set_model_output_block_patch(grow)
        return log

    outs, logs = [], []
    for each in (fresh, compiled(fresh)):
        patched = each.clone()
        logs.append(set_patches(patched))
        outs.append([run(models, patched, seed=seed, steps=6) for seed in range(2)])
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert logs[0] == logs[1]
    assert len(recordings) <= 4 and any("several forms" in each["reason"] for each in fallbacks())
    assert any("transformer_blocks" in path for path in block_programs) and any(
        path.endswith(".0") for path in block_programs
    )


def test_a_patch_that_writes_options(models, fresh):
    """For a later patch, and for the model: what a tape cannot follow runs in eager."""

    def set_patches(patcher):
        calls = []

        def write(h, options):
            calls.append(1)
            options["mine"] = 1.0 + len(calls) / 50
            return h

        patcher.set_model_input_block_patch(write)
        patcher.set_model_output_block_patch(lambda h, skip, options: (h * options["mine"], skip))

    patched, fast = (with_patch(each, set_patches) for each in (fresh, compiled(fresh)))
    assert_equal(models, patched, fast)
    assert_equal(models, patched, fast, seed=2)


def test_an_error_of_a_patch_at_a_replay(models, fresh):
    """It is the user's to see, and costs nothing later."""
    calls, broken = [], []

    def patch(h, options):
        calls.append(1)
        if broken:
            raise ValueError("the patch's own error")
        return h * 1.1

    patched, fast = (with_patch(e, lambda p: p.set_model_input_block_patch(patch)) for e in (fresh, compiled(fresh)))
    assert_equal(models, patched, fast)
    broken.append(1)
    with pytest.raises(ValueError, match="the patch's own error"):
        run(models, fast)
    broken.clear()
    assert_equal(models, patched, fast)
    assert shapes()[-1]["state"] == "tape"


# ComfyUI's own nodes ----------------------------------------------------------------------------------------------


def node(module, name, *settings):
    """What ComfyUI's node makes of a model."""

    def patched(patcher):
        kind = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        if hasattr(kind, "execute"):
            return kind.execute(patcher, *settings)[0]
        return getattr(kind(), kind.FUNCTION)(patcher, *settings)[0]

    return patched


NODES = {  # and how many recordings there are at most
    "FreeU": (node("nodes_freelunch", "FreeU", 1.3, 1.4, 0.9, 0.2), 1),
    "FreeU_V2": (node("nodes_freelunch", "FreeU_V2", 1.3, 1.4, 0.9, 0.2), 1),
    "PAG": (node("nodes_pag", "PerturbedAttentionGuidance", 3.0), 2),
    "SAG": (node("nodes_sag", "SelfAttentionGuidance", 0.5, 2.0), 4),
    "HyperTile": (node("nodes_hypertile", "HyperTile", 128, 2, 3, False), 8),
    "Deep Shrink": (
        node("nodes_model_downscale", "PatchModelAddDownscale", 1, 2.0, 0.0, 0.35, True, "bicubic", "bicubic"), 3,
    ),
    "ToMe": (node("nodes_tomesd", "TomePatchModel", 0.3), 6),
}  # fmt: skip


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", NODES)
def test_nodes_of_comfyui(models, fresh, recordings, request, name, fuse):
    if fuse:
        request.getfixturevalue("fusing")
    patched, most = NODES[name]
    wide = {"width": 256, "height": 192} if name == "HyperTile" else SIZE  # two tiles wide: else it cuts nothing
    plain, fast = patched(fresh), patched(compiled(fresh))
    for seed in range(3):
        outs = []
        for each in (plain, fast):
            torch.manual_seed(seed)
            outs.append(models.sample(each, **wide | {"steps": 6, "seed": seed}))
        assert error(outs[1], outs[0]) < CLOSE, (seed, fallbacks())
    assert error(outs[0], models.sample(fresh, **wide | {"steps": 6, "seed": 2})) > CHANGED
    assert len(recordings) <= most, fallbacks()
    print(name, fuse, len(recordings), [(s["state"], s["reason"], s["note"]) for s in shapes()], fallbacks())


@pytest.mark.parametrize("name", ["FreeU_V2", "counting"])
def test_kernels_around_patches(fresh, plain_kernels, monkeypatch, name):
    """As on a GPU: fused, in Triton's interpreter, with other inputs than those that were recorded."""
    from anyshape.accel import maker, tape_tier

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(maker.KEEPER, "watch", lambda *_: None)

    def counting(patcher):
        log, patcher = [], patcher.clone()

        def mean(q, k, v, options):
            log.append(options["block"])
            return v.mean(1, keepdim=True).expand_as(q)

        patcher.set_model_attn2_replace(mean, "input", 1)
        patcher.set_model_output_block_patch(lambda h, skip, options: (log.append(1) or h, skip.mul_(0.9)))
        return patcher

    patched = counting if name == "counting" else NODES[name][0]
    plain, fast = patched(fresh), patched(compiled(fresh))
    from tools.driving import unet_forward

    for seed in range(3):
        wanted = unet_forward(plain, 64, 64, seed=seed)
        assert error(unet_forward(fast, 64, 64, seed=seed), wanted) < CLOSE
    (take,) = takes_of(fast)
    assert take.program.report.kernels and bool(take.live) == (name == "counting") and not fallbacks()
