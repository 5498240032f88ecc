"""Weights that change under a compiled model: LoRAs, merges, hooks; eager's image, nothing compiled."""

import pytest
import torch
from safetensors.torch import save_file

from tools.driving import ONE_LEVEL_UNET, SMALL_RUN, SMALL_UNET, compiled, sample_prompts, skipping
from tools.loras import LAYERS, family, lora, stacked, with_lora
from tools.oracles import FUSED, assert_fast, error, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
CHANGED = 1e-2  # by how much a LoRA must change the image, so that a test can tell
RUNS = {"sd15": SMALL_RUN}
NAMES = ("sd15",)
LATENT = torch.zeros(1, 4, 8, 8)


@pytest.fixture(scope="module")
def patchers(models):
    return {"sd15": models.unet("sd15", torch.float32, **SMALL_UNET)}


@pytest.fixture(scope="module")
def others(models):
    """Other weights of the same models."""
    found = {"sd15": models.unet("sd15", torch.float32, **SMALL_UNET)}
    for patcher in found.values():
        models.randomise(patcher.model.diffusion_model, 5)
    return found


@pytest.fixture(scope="module")
def plain(models, patchers):
    """Eager's image without any LoRA."""
    return {name: models.sample(patcher, **RUNS[name]) for name, patcher in patchers.items()}


@pytest.fixture(scope="module")
def warm(models, patchers, counting):
    """Compiled, after the first prompt at batch 1 and the first above: from here on nothing may compile.

    That is also after what makes another forward of it, at another size: a wrapper of weights, and patches.
    """
    fast = {name: compiled(patcher) for name, patcher in patchers.items()}
    for name, each in fast.items():
        models.sample(each, **RUNS[name])
        models.sample(each, **RUNS[name] | {"batch": 2})
        models.sample(wrapped(each), **RUNS[name] | {"width": 72})
    sample_prompts(
        fast["sd15"], *hooked(models, patchers["sd15"], patched_and_wrapped()), latent=torch.zeros(1, 4, 9, 8)
    )
    return fast


@pytest.fixture(autouse=True)
def _nothing_compiles(nothing_compiles):
    """Of every test of this file."""


# LoRAs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["set_weight", "norm"])  # ComfyUI makes plain weights of each kind; others follow
def test_a_lora_comes_and_goes(models, patchers, warm, plain, name, kind):
    """Loaded after Compile Model and before it, and gone again."""
    state, run = lora(patchers[name], kind), RUNS[name]
    wanted = models.sample(with_lora(patchers[name], state, 0.7), **run)
    assert error(wanted, plain[name]) > CHANGED
    assert error(models.sample(with_lora(warm[name], state, 0.7), **run), wanted) < CLOSE
    assert error(models.sample(compiled(with_lora(patchers[name], state, 0.7)), **run), wanted) < CLOSE
    assert error(models.sample(warm[name], **run), plain[name]) < CLOSE
    assert_fast()


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_of_the_kinds_matters(models, patchers, plain, name):
    """A layer whose LoRA did nothing would hide a stale weight."""
    state, own = lora(patchers[name], "diff"), LAYERS[name.replace("sd15", "unet")]
    for layer in own:
        part = {key: tensor for key, tensor in state.items() if f".{layer}." in key}
        assert len(part) == 2
        assert error(models.sample(with_lora(patchers[name], part), **RUNS[name]), plain[name]) > 1e-3, layer


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_one_afternoon(models, patchers, warm, plain, monkeypatch, name, in_place):
    """LoRAs come, change strength, stack and go, from prompt to prompt."""
    first, second = (lora(patchers[name], kind, seed) for kind, seed in (("lora", 1), ("loha", 99)))
    stacks = [[(first, 0.5)], [(first, -0.5)], [(first, 0.5), (second, 1.0)], [], [(first, 0.5)]]

    def loaded(patcher, stack):
        patcher = stacked(patcher, stack)
        monkeypatch.setattr(patcher, "weight_inplace_update", in_place)
        return patcher

    for index, stack in enumerate(stacks):
        run = RUNS[name] | {"width": 64 + 8 * (index % 2)}
        wanted = models.sample(loaded(patchers[name].clone(), stack), **run)
        assert error(models.sample(loaded(warm[name].clone(), stack), **run), wanted) < CLOSE, index
    assert error(models.sample(warm[name], **RUNS[name]), plain[name]) < CLOSE
    assert_fast()


@pytest.mark.parametrize("name", NAMES)
def test_other_weights_in_mid_run(models, patchers, warm, name):
    """Another pack puts its parameters in their places between two steps, and the model's back."""
    layers = [patchers[name].model.diffusion_model.get_submodule(layer) for layer in LAYERS[family(patchers[name])]]
    own, run = [layer.weight for layer in layers], RUNS[name] | {"steps": 5}
    other = [torch.nn.Parameter(weight * 1.5, requires_grad=False) for weight in own]

    def callback(step, *_):
        for layer, weight in zip(layers, other if step in (1, 2) else own, strict=True):
            layer.weight = weight

    wanted, out = (models.sample(each[name], callback=callback, **run) for each in (patchers, warm))
    assert error(wanted, models.sample(patchers[name], **run)) > CHANGED
    assert error(out, wanted) < CLOSE
    assert_fast()


def wrapped(patcher):
    """What a pack has ComfyUI do to one weight at each call."""
    patcher = patcher.clone()
    for layer in LAYERS[family(patcher)]:
        patcher.add_weight_wrapper(f"diffusion_model.{layer}.weight", lambda weight: weight * 0.8)
    return patcher


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_wrapper(models, patchers, warm, plain, name):
    wanted = models.sample(wrapped(patchers[name]), **RUNS[name])
    assert error(wanted, plain[name]) > CHANGED
    for each in (wrapped(warm[name]), compiled(wrapped(patchers[name]))):
        assert error(models.sample(each, **RUNS[name]), wanted) < CLOSE
    assert error(models.sample(warm[name], **RUNS[name]), plain[name]) < CLOSE
    assert_fast()


@pytest.mark.parametrize("skips", [False, True])
def test_weights_of_a_lora_do_not_outlive_it(models, patchers, warm, skips):
    """The next prompt has no LoRA, and no node of ours that could notice: ComfyUI puts other weights in their place."""
    import gc
    import weakref

    from anyshape.accel.comfy import attach

    model = patchers["sd15"].model.diffusion_model
    fast = skipping(patchers["sd15"]) if skips else warm["sd15"]  # by itself it has programs too
    run = SMALL_RUN | {"steps": 9 if skips else 1}
    models.sample(with_lora(fast, lora(patchers["sd15"], "lora")), **run)
    changed = [f"{name}.weight" for name in LAYERS[family(patchers["sd15"])]]
    weights = [weakref.ref(model.get_parameter(name)) for name in changed]
    recorded = len(attach.engines_of(model)[0]._tape._tapes._takes)
    models.sample(patchers["sd15"], **SMALL_RUN)
    gc.collect()
    assert [name for name, weight in zip(changed, weights, strict=True) if weight() is not None] == []
    assert recorded and len(attach.engines_of(model)[0]._tape._tapes._takes) == recorded
    models.sample(fast, **run)
    assert skips or {shape["state"] for shape in shapes()} == {FUSED}


# Merges -----------------------------------------------------------------------------------------------------------


RATIOS = {"input": 0.7, "input_blocks.1": 0.4, "middle": 0.2, "out": 0.9}


@pytest.fixture(scope="module")
def few(models):
    """Two models of few weights, for ComfyUI's merging takes its time for each, and the first one compiled."""
    pair = [models.unet("sd15", torch.float32, **ONE_LEVEL_UNET) for _ in range(2)]
    models.randomise(pair[1].model.diffusion_model, 5)
    fast = compiled(pair[0])
    models.sample(fast, **SMALL_RUN)
    return *pair, fast


def test_merges(models, few):
    """ComfyUI's merging nodes on two models that have been compiled, and compiled after."""
    from comfy_extras import nodes_model_merging as merging
    from comfy_extras import nodes_model_merging_model_specific as specific

    assert {specific.ModelMergeSD1.merge} == {merging.ModelMergeBlocks.merge}
    one, two, fast_one = few
    plain = models.sample(one, **SMALL_RUN)
    (eager,) = merging.ModelMergeBlocks().merge(one, two, **RATIOS)
    (fast,) = merging.ModelMergeBlocks().merge(fast_one, compiled(two), **RATIOS)
    wanted = models.sample(eager, **SMALL_RUN)
    assert error(wanted, plain) > CHANGED
    assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE
    assert error(models.sample(compiled(eager), **SMALL_RUN), wanted) < CLOSE
    assert error(models.sample(fast_one, **SMALL_RUN), plain) < CLOSE
    assert_fast()


def test_a_lora_on_a_merge(models, patchers, others, warm):
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    state = lora(patchers["sd15"], "lokr")
    outs = [
        models.sample(with_lora(ModelMergeSimple().merge(each, others["sd15"], 0.6)[0], state), **SMALL_RUN)
        for each in (patchers["sd15"], warm["sd15"])
    ]
    assert error(outs[1], outs[0]) < CLOSE
    assert_fast()


@pytest.mark.parametrize("node", ["UNetSelfAttentionMultiply", "UNetCrossAttentionMultiply"])
def test_attention_multiply(models, patchers, warm, plain, node):
    """Nodes that scale the weights of every attention."""
    from comfy_extras import nodes_attention_multiply

    outs = [
        models.sample(getattr(nodes_attention_multiply, node).execute(each, 0.3, 0.5, 3.0, 3.0).args[0], **SMALL_RUN)
        for each in (patchers["sd15"], warm["sd15"])
    ]
    assert error(outs[0], plain["sd15"]) > CHANGED / 2 and error(outs[1], outs[0]) < CLOSE
    assert_fast()


# Hooks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lora_file(tmp_path):
    """Writes a LoRA where ComfyUI's nodes look for it; gives its name."""
    import folder_paths

    folder_paths.add_model_folder_path("loras", str(tmp_path))

    def write(state, name):
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / name)
        return name

    yield write
    folder_paths.folder_names_and_paths["loras"][0].remove(str(tmp_path))


def keyframes():
    """A strength that falls to nothing and rises again, by ComfyUI's nodes."""
    from comfy_extras.nodes_hooks import CreateHookKeyframe, CreateHookKeyframesInterpolated

    (frames,) = CreateHookKeyframesInterpolated().create_hook_keyframes(1.0, 0.2, "linear", 0.0, 0.5, 3)
    (frames,) = CreateHookKeyframe().create_hook_keyframe(0.0, 0.6, frames)
    return CreateHookKeyframe().create_hook_keyframe(1.5, 0.85, frames)[0]


def lora_hooks(patcher, lora_file, kind, seed, frames=None):
    from comfy_extras.nodes_hooks import CreateHookLora, SetHookKeyframes

    name = lora_file(lora(patcher, kind, seed), f"{kind}{seed}.safetensors")
    (hooks,) = CreateHookLora().create_hook(name, 0.8, 0.0)
    return SetHookKeyframes().set_hook_keyframes(hooks, frames)[0]


def model_hooks(patcher):
    """What CreateHookModelAsLora makes of a checkpoint, once it is loaded; of the layers that tests change."""
    import comfy.hooks

    weights = comfy.hooks.get_patch_weights_from_model(patcher)
    weights = {key: weights[key] for key in (f"diffusion_model.{name}.weight" for name in LAYERS[family(patcher)])}
    return comfy.hooks.create_hook_model_as_lora(weights, None, 0.5, 0.0)


def hooked(models, patcher, groups):
    """A positive prompt a group of hooks, side by side, and a negative one without any."""
    from comfy_extras.nodes_hooks import ConditioningSetProperties, ConditioningSetPropertiesAndCombine

    tokens, prompt = 77, None
    for index, hooks in enumerate(groups):
        cond = models.conditioning(patcher, tokens, 10 + index)
        if prompt is None:
            (prompt,) = ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)
        else:
            (prompt,) = ConditioningSetPropertiesAndCombine().set_properties(prompt, cond, 1.0, "default", hooks=hooks)
    return prompt, models.conditioning(patcher, tokens, 2)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_that_change_in_mid_run(models, patchers, others, warm, plain, lora_file, name):
    """Two prompts with other LoRAs, one of them with keyframes, and a third that borrows another model's weights."""
    patcher = patchers[name]
    groups = [
        lora_hooks(patcher, lora_file, "lora", 1, keyframes()), lora_hooks(patcher, lora_file, "loha", 99),
        model_hooks(others[name]),
    ]  # fmt: skip
    prompts, run = hooked(models, patcher, groups), {"steps": 5, "latent": LATENT}  # a step for each strength
    wanted = sample_prompts(patcher, *prompts, **run)
    assert error(wanted, sample_prompts(patcher, *hooked(models, patcher, [None] * 3), **run)) > CHANGED
    assert error(sample_prompts(warm[name], *prompts, **run), wanted) < CLOSE
    state = lora(patcher, "dora")  # a LoRA of the whole model beside the hooks'
    wanted = sample_prompts(with_lora(patcher, state, 0.5), *prompts, **run)
    assert error(sample_prompts(with_lora(warm[name], state, 0.5), *prompts, **run), wanted) < CLOSE
    assert error(models.sample(warm[name], **RUNS[name]), plain[name]) < CLOSE
    assert_fast()


def patched_and_wrapped():
    """Hooks that give one prompt patches, and one a wrapper, instead of weights."""
    import comfy.hooks
    from comfy.patcher_extension import WrappersMP

    def group(transformer_options):
        hooks = comfy.hooks.HookGroup()
        scope = comfy.hooks.EnumHookScope.HookedOnly
        hooks.add(comfy.hooks.TransformerOptionsHook(transformer_options, hook_scope=scope))
        return hooks

    def wrapper(executor, x, *args, **kwargs):
        return executor(x * 0.8, *args, **kwargs) * 1.1

    patched = group({"patches": {"attn1_patch": [lambda n, k, v, options: (n * 1.3, k, v)]}})
    return [patched, group({"wrappers": {WrappersMP.DIFFUSION_MODEL: {"another pack": [wrapper]}}})]


def test_hooks_that_are_patches_and_wrappers(models, patchers, warm):
    patched, wrapping = patched_and_wrapped()
    prompts = hooked(models, patchers["sd15"], [patched, wrapping])
    wanted = sample_prompts(patchers["sd15"], *prompts, LATENT)
    for groups in ([None, wrapping], [patched, None]):
        assert error(sample_prompts(patchers["sd15"], *hooked(models, patchers["sd15"], groups), LATENT), wanted) > 1e-3
    assert error(sample_prompts(warm["sd15"], *prompts, LATENT), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {FUSED}
