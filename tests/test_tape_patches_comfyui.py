"""Patches of ComfyUI's own nodes on recorded models, and kernels around patches. On the CPU."""

import importlib

import pytest
import torch

from tools.driving import compiled, unet_forward
from tools.oracles import error, fallbacks
from tools.patching import CHANGED, CLOSE, SIZE, takes_of

pytestmark = pytest.mark.usefixtures("clean_stats")


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


# Fused, what cannot be recorded as a whole runs in blocks; unfused, as ComfyUI's own.
CASES = [*((name, True) for name in NODES), ("SAG", False), ("Deep Shrink", False)]


@pytest.mark.parametrize(("name", "fuse"), CASES)
def test_nodes_of_comfyui(models, fresh, recordings, request, name, fuse):
    if fuse:
        request.getfixturevalue("fusing")
    patched, most = NODES[name]
    run = SIZE | {"steps": 6}
    if name == "HyperTile":
        run["width"] = 256  # two tiles wide: else it cuts nothing
    plain, fast = patched(fresh), patched(compiled(fresh))
    for seed in range(2):
        outs = []
        for each in (plain, fast):
            torch.manual_seed(seed)
            outs.append(models.sample(each, **run | {"seed": seed}))
        assert error(outs[1], outs[0]) < CLOSE, (seed, fallbacks())
    assert error(outs[0], models.sample(fresh, **run | {"seed": 1})) > CHANGED
    assert len(recordings) <= most, fallbacks()


@pytest.fixture
def fused(plain_kernels, monkeypatch):
    """As on a GPU: fused, in Triton's interpreter."""
    from anyshape.accel import maker, tape_tier
    from anyshape.accel.tape import kernels

    monkeypatch.setattr(kernels, "_COMPILED", {})  # whatever other tests have compiled
    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(maker.KEEPER, "watch", lambda *_: None)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["FreeU_V2", "counting"])
def test_kernels_around_patches(fresh, name):
    """With other inputs than those that were recorded."""

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
    for seed in range(2):
        wanted = unet_forward(plain, 64, 64, seed=seed)
        assert error(unet_forward(fast, 64, 64, seed=seed), wanted) < CLOSE
    (take,) = takes_of(fast)
    assert take.program.report.kernels and bool(take.live) == (name == "counting") and not fallbacks()


@pytest.mark.usefixtures("fused")
def test_kernels_of_each_part_of_a_range_are_its_first(fresh):
    """They are no recompiles: nothing of that kind has run before."""
    from anyshape.accel import stats

    def late(h, options):
        return h * 1.5 + h.sin() if options["sigmas"][0].item() < 3.0 else h

    fast, made = compiled(fresh), []
    for seed, sigma in enumerate((5.0, 1.0, 4.0, 2.0)):
        outs = []
        for patcher in (fast.clone(), fresh.clone()):
            patcher.set_model_input_block_patch(late)
            patcher.model_options["transformer_options"]["sigmas"] = torch.tensor([sigma])
            outs.append(unet_forward(patcher, 64, 64, seed=seed))
        assert error(*outs) < CLOSE
        (entry,) = [entry for entry in stats.snapshot()["models"] if entry["shapes"]]
        made.append(entry["kernels"])
    assert 0 < made[0] < made[1] == made[3] and not entry["recompiles"], fallbacks()
