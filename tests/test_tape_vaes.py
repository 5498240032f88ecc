"""Every VAE on a tape, without a GPU: recorded, right, no kernel of one size, no more memory than eager."""

import operator
from dataclasses import asdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tools import architectures, compatibility_table
from tools.architectures import autoencoders
from tools.oracles import FUSED, fallbacks, shapes
from tools.peak import peak

pytestmark = pytest.mark.usefixtures("pack", "one_thread")
IS_OLDER = architectures.is_older()
ENTRIES = [
    pytest.param(entry, way, id=f"{entry.name}, {way}") for entry in autoencoders.present() for way in entry.ways
]
# What only ComfyUI's own forward can run, and the reason that the recorder gives.
REFUSED = {
    "LTX 0.9.5, decode": "it draws random numbers",  # noise on the latent, and in some blocks
    "Stable Audio, encode": "it draws random numbers",  # a sample of the distribution
}
# How many kernels the variants after the first may add: the second has two videos, the third other sides and another
# number of frames, the fourth one frame. What is one lies in memory as it likes: the attention of two pictures gives
# channels last, where that of a single one may not, and what comes after reads it so. Newer versions of ComfyUI work
# on a video in pieces: a third piece brings operations that two do not have.
LATER = {
    "HunyuanImage 2.1 refiner": (0, 0, 8), "HunyuanVideo": (14, 0, 1), "HunyuanVideo 1.5": (20, 1, 3),
    "Wan 2.1, Qwen-Image": (2, 0, 1), "Wan 2.2": (2, 1, 6), "Mochi": (0, 0, 3), "LTX": (0, 0, 20),
    "LTX 0.9.5": (0, 0, 5), "MiniMax H3": (1, 0, 3), "Cosmos": (1, 0, 3), "TAEHV": (3, 1, 1), "CogVideoX": (3, 4, 4),
    "SeedVR2": (5, 1, 4),
}  # fmt: skip
OTHERS = (1, 0, 0)
TOLERANCE = 1e-4  # of fused programs in float32
# What kernels by hand are interpreted for: pictures, and frames, whose norms have a single group. Of other VAEs they
# are in plain torch, as of most UNets (``plain_kernels``).
INTERPRETED = ("SD, encode", "Cosmos, decode", "Cosmos, encode")
EXTRA_MEMORY = 1.05  # of a fused program: what eager changes in place, a kernel writes beside it


def check(found: dict) -> None:
    """What must be true of a VAE's record."""
    name = found["name"]
    if name in REFUSED:
        assert REFUSED[name] in found["refusal"]
        return
    assert not found["refusal"]
    assert found["operations"] > 20 and len(found["new_kernels"]) == (1 if IS_OLDER else autoencoders.VARIANTS)
    allowed = LATER.get(name.rpartition(", ")[0], OTHERS)
    assert all(map(operator.le, found["new_kernels"][1:], allowed)), found["new_kernels"]
    assert found["unfused_error"] == (None if IS_OLDER else 0.0)
    assert found["fused_error"] is None or found["fused_error"] <= TOLERANCE


@pytest.fixture(scope="module")
def records() -> dict[str, dict]:
    """What was found of each VAE, for the test of the table."""
    return {}


@pytest.mark.parametrize("entry, way", ENTRIES)
def test_recorded_right_and_no_kernel_of_one_size(entry, way, records, request):
    from tools.architectures import taped_vaes

    if f"{entry.name}, {way}" not in INTERPRETED:
        request.getfixturevalue("plain_kernels")
    older = {"variants": 1, "run": False} if IS_OLDER else {}
    found = asdict(taped_vaes.study(entry, way, **older))
    records[found["name"]] = found
    check(found)


def test_table_of_vaes_is_current(records):
    """The older ComfyUI's part of it is looked at in the process of test_older_comfyui."""
    if len(records) < len(ENTRIES) or not compatibility_table.is_about_this():
        pytest.skip("not every VAE was looked at in this run, or COMFYUI_PATH names another")
    names, kind = [param.id for param in ENTRIES], compatibility_table.VAES
    assert compatibility_table.outdated(records.values(), names, kind) == [], "run python -m tools.compatibility_table"


@pytest.mark.parametrize("way", autoencoders.WAYS)
def test_norms_of_a_few_frames_each_are_one(way):
    """Mochi's VAE writes them into one tensor, piece by piece, and SiLU over that: nothing of it stays in place.

    So its channels lie last, and SiLU is part of the norm, whether there are several pieces or one.
    """
    from anyshape.accel.kernels import operations as ours
    from anyshape.accel.tape import rules

    from tools.architectures import taped_vaes

    for k in (0, 1, 2):
        model = autoencoders.model("Mochi")
        with taped_vaes.as_on_gpu():
            tape = taped_vaes.recording(model, way, autoencoders.TABLE["Mochi"].inputs(way, k)).tape
        assert sum(operation.writes is not None for operation in tape.operations) >= 24
        rules.apply(tape)
        assert not any(operation.writes is not None for operation in tape.operations)
        norms = [operation for operation in tape.operations if operation.func is ours.group_norm_last]
        assert sum(operation.args[6] for operation in norms) >= 10
        assert sum("silu" in str(operation.func) for operation in tape.operations) <= 1  # behind the last convolution


# Memory -----------------------------------------------------------------------------------------------------------


class MemoryOfGpu(TorchDispatchMode):
    """Convolutions and GroupNorms take the memory that they take on a GPU, and compute nothing.

    With channels first cuDNN turns a convolution's argument and its result (torch's profiler, H200); with channels last
    it makes the result alone. A CPU's convolutions turn them the other way round.
    """

    TURNING = frozenset(("conv2d", "conv3d"))
    NAMES = TURNING | frozenset("group_norm conv2d_last conv3d_last group_norm_last upsample_last".split())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in self.NAMES:
            return func(*args, **(kwargs or {}))
        onto = lambda item: item.to("meta") if isinstance(item, torch.Tensor) else item  # noqa: E731
        there, named = tree_map(onto, (args, kwargs or {}))
        out = torch.empty_like(func(*there, **named), device="cpu")
        turned = [torch.empty_like(each) for each in (args[0], out)] if name in self.TURNING else []
        del turned
        return out


@pytest.mark.parametrize("way", autoencoders.WAYS)
@pytest.mark.parametrize("name", ["Wan 2.1, Qwen-Image", "Mochi", "SVD", "LTX", "MiniMax H3"])
def test_no_more_memory_than_eager(name, way, monkeypatch):
    """Neither while it is recorded nor when it is replayed, and nothing is kept from one call to the next."""
    from anyshape.accel.tape.kernels import Launch

    from tools.architectures import taped_vaes

    model, arguments = autoencoders.model(name), autoencoders.TABLE[name].inputs(way, 0)
    eager = getattr(model, way)
    with MemoryOfGpu():
        eager_peak = max(peak(lambda: eager(*arguments)) for _ in range(2))
        recordings = []
        assert peak(lambda: recordings.append(taped_vaes.recording(model, way, arguments))) <= eager_peak * 1.01
        (recording,) = recordings
        monkeypatch.setattr(Launch, "__call__", lambda *args: None)  # only where results lie matters here
        for fuse, limit in ((False, 1.0), (True, EXTRA_MEMORY)):
            program = recording.program(fuse)
            assert sum(tensor.nbytes for tensor in program.constants()) < 1024
            assert peak(lambda program=program: program.run(recording.inputs)) <= eager_peak * limit


# Through the node -------------------------------------------------------------------------------------------------


def decoded(vae, name, k):
    with torch.inference_mode():
        return vae.decode(*autoencoders.TABLE[name].inputs("decode", k))


@pytest.mark.usefixtures("clean_stats")
@pytest.mark.parametrize("name", ["Wan 2.1, Qwen-Image", "Mochi", "TAEHV", "Cascade stage A", "Stable Audio", "SVD"])
def test_decoded_and_encoded_as_by_eager(name):
    """By ComfyUI's own VAE object: bit-equal, with every size in the stats, and the loaded VAE untouched."""
    from tools.driving import compiled_vae

    vae, entry = autoencoders.make(name), autoencoders.TABLE[name]
    fast, before = compiled_vae(vae), sorted(vae.first_stage_model.__dict__)
    for k in (0, 1, 3, 0):
        out = decoded(fast, name, k)
        assert torch.equal(out, decoded(vae, name, k))
    if f"{name}, encode" not in REFUSED:
        with torch.inference_mode():
            pictures = out[0] if entry.dimensions == 3 else out
            assert torch.equal(fast.encode(pictures), vae.encode(pictures))
        assert fallbacks() == []
    assert {s["state"] for s in shapes()} == {FUSED}
    if entry.dimensions > 1:
        height, width = out.shape[-3:-1]
        frames = {out.shape[1]} if entry.dimensions == 3 else {1}
        assert {s["frames"] for s in shapes() if (s["width"], s["height"]) == (width, height)} >= frames
    assert sorted(vae.first_stage_model.__dict__) == before and vae.patcher.model is vae.first_stage_model


@pytest.mark.usefixtures("clean_stats")
def test_tiles_of_a_video():
    from tools.driving import compiled_vae

    name = "Wan 2.1, Qwen-Image"
    vae = autoencoders.make(name)
    latent, tiles = torch.randn(1, 16, 4, 5, 5), {"tile_x": 3, "tile_y": 3, "overlap": 1, "tile_t": 3, "overlap_t": 1}
    with torch.inference_mode():
        wanted = vae.decode_tiled(latent, **tiles)
        assert torch.equal(compiled_vae(vae).decode_tiled(latent, **tiles), wanted)
        assert not torch.equal(wanted, vae.decode(latent))  # it was tiled
    assert {s["state"] for s in shapes()} == {FUSED} and sum(s["calls"] for s in shapes()) > 4


@pytest.mark.usefixtures("clean_stats")
def test_what_draws_random_numbers_runs_in_eager():
    from tools.driving import compiled_vae

    vae = autoencoders.make("Stable Audio")
    sound, fast = torch.randn(1, 4096, 2), compiled_vae(vae)
    for _ in range(2):
        with torch.inference_mode():
            torch.manual_seed(7)
            wanted = vae.encode(sound)
            torch.manual_seed(7)
            assert torch.equal(fast.encode(sound), wanted)
    assert [(s["state"], s["calls"]) for s in shapes()] == [("eager", 2)]
    assert all("it draws random numbers" in f["reason"] for f in fallbacks()) and fallbacks()


@pytest.mark.usefixtures("clean_stats")
def test_weights_that_change_and_go():
    """Other weights count at once; nothing of ours keeps them, or the VAE, alive."""
    import gc
    import weakref

    import comfy.model_management as mm

    from tools.driving import compiled_vae

    name = "TAESD"
    vae = autoencoders.make(name)
    fast, first = compiled_vae(vae), decoded(vae, name, 0)
    assert torch.equal(decoded(fast, name, 0), first)
    layer = vae.first_stage_model.taesd_decoder[1]
    layer.weight = torch.nn.Parameter(layer.weight * 1.5, requires_grad=False)
    assert torch.equal(decoded(fast, name, 0), decoded(vae, name, 0)) and not torch.equal(decoded(vae, name, 0), first)
    handle = layer.register_forward_hook(lambda module, args, out: out * 2)  # recorded again, with what it does
    hooked = decoded(fast, name, 0)
    assert torch.equal(hooked, decoded(vae, name, 0)) and not torch.equal(hooked, first)
    handle.remove()
    model, weight = weakref.ref(vae.first_stage_model), weakref.ref(layer.weight)
    del vae, fast, layer
    mm.unload_all_models()
    gc.collect()
    assert model() is None and weight() is None


@pytest.mark.usefixtures("clean_stats")
def test_unloaded_and_loaded_again_nothing_is_recorded_again():
    import comfy.model_management as mm
    from anyshape.accel.comfy import attach

    from tools.driving import compiled_vae

    vae = autoencoders.make("TAESD")
    fast = compiled_vae(vae)
    for _ in range(3):
        assert torch.equal(decoded(fast, "TAESD", 0), decoded(vae, "TAESD", 0))
        mm.unload_all_models()
    (takes,) = attach._ENGINES[vae.first_stage_model]["VAE decoder"]._tape._tapes._takes.values()
    assert len(takes) == 1 and takes[0].program is not None and takes[0].program._bound is None


@pytest.mark.usefixtures("clean_stats")
def test_warm_up_of_a_video_vae(patcher):
    """Without a compiled model: the VAE's sizes and frames alone. Sound has none."""
    from anyshape.accel.comfy.warming import warm_up
    from anyshape.accel.reasons import say

    from tools.driving import compiled_vae

    fast = compiled_vae(autoencoders.make("Wan 2.1, Qwen-Image"))
    report = warm_up(patcher, "48x32x9\n32x32", fast).report
    assert {(s["width"], s["height"], s["frames"]) for s in shapes()} == {(48, 32, 9), (32, 32, 1)}
    assert {s["state"] for s in shapes()} == {FUSED} and report.count("VAE decode") == report.count("VAE encode") == 2
    with torch.inference_mode():
        fast.decode(torch.randn(1, 16, 3, 4, 6)), fast.encode(torch.rand(9, 32, 48, 3))
    assert len(shapes()) == 4  # it was warm
    report = warm_up(patcher, "64x64", compiled_vae(autoencoders.make("Stable Audio"))).report
    assert say("no_pictures") in report


@pytest.mark.usefixtures("clean_stats", "fusing")
@pytest.mark.parametrize("lengths", [(1, 5, 9, 13, 17, 25), (17, 29, 25, 21)], ids=["longer", "of any order"])
def test_longer_videos_compile_nothing(monkeypatch, lengths):
    """A piece takes other operations than the one before it, up to the fifth, and so does a shorter one at the end."""
    from anyshape.accel import stats
    from anyshape.accel.tape import kernels as generated

    from tools.driving import compiled_vae

    monkeypatch.setattr(generated, "_COMPILED", {})  # by other tests
    vae = autoencoders.make("Wan 2.1, Qwen-Image")
    fast, kernels = compiled_vae(vae), []
    with torch.inference_mode():
        for frames in lengths:
            video = torch.rand(frames, 16, 24, 3)
            latent = vae.encode(video)
            assert torch.equal(fast.encode(video), latent) and torch.equal(fast.decode(latent), vae.decode(latent))
            kernels.append(sum(model["kernels"] for model in stats.snapshot()["models"]))
    assert kernels[0] > 0 and len(set(kernels[-2:])) == 1, kernels
    assert not any(model["recompiles"] for model in stats.snapshot()["models"]) and fallbacks() == []
