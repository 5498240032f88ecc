"""What other nodes give to ``torch.compile``, beside ours: on the CPU, with the backend ``eager``."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tools.comfy_nodes import torch_compiled
from tools.driving import (
    COMPILED_PARTS,
    ONE_LEVEL_UNET,
    SHORT_RUN,
    compiled,
    compiled_control,
    compiled_vae,
    skip_with_message,
    skipping,
)
from tools.oracles import FUSED, error, fallbacks, shapes
from tools.patching import read_back
from tools.paths import ROOT
from tools.skip_driving import BLOCKS

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")

CLOSE = 1e-5
OTHER = {"width": 72, "height": 88}  # a size that is new


@pytest.fixture(scope="module")
def tiny(models):
    """A model that torch.compile traces in seconds: of one level, with one transformer in the middle."""
    few = {"transformer_depth": [0], "transformer_depth_output": [0, 0], "transformer_depth_middle": 1}
    return models.unet("sd15", torch.float32, **ONE_LEVEL_UNET | few)


@pytest.fixture(autouse=True)
def _nothing_traced():
    from torch._dynamo.utils import clear_compilation_metrics

    clear_compilation_metrics()


def traced() -> list[str]:
    """The files of what dynamo has compiled since it was last asked. The recorder is not among them."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    files = [each.co_filename for each in get_compilation_metrics()]
    clear_compilation_metrics()
    assert not [name for name in files if name.startswith(str(ROOT / "accel" / "tape"))]
    return files


@pytest.mark.parametrize("parts", ["the whole model", "some blocks"])
def test_a_model(models, tiny, parts):
    """By ComfyUI's TorchCompileModel (the whole: ours steps aside), and by its function, as other packs use it."""

    def compiling(model):
        return torch_compiled(model, "eager", COMPILED_PARTS["unet"] if parts == "some blocks" else ())

    from anyshape.accel.comfy.entries import passed_by

    fast, plain = compiled(tiny), models.sample(tiny, **SHORT_RUN)
    for both in (compiling(fast), compiled(compiling(tiny))):
        assert error(models.sample(both, **SHORT_RUN), plain) < CLOSE
        assert ("bypasses Compile Model" in passed_by(both)()) == (
            parts == "the whole model"
        )  # the node's line says so
    if parts == "some blocks":
        assert {s["state"] for s in shapes()} == {FUSED} and shapes()[0]["reason"] == ""  # what they compute is taped
        assert traced() == []
        models.sample(compiling(tiny), **SHORT_RUN | OTHER)
        assert traced()  # what they compile is compiled where ours is not, as if it had never been recorded
    else:
        assert shapes() == [] and traced()
        assert any("bypasses Compile Model" in f["reason"] for f in fallbacks())
    assert error(models.sample(fast, **SHORT_RUN), plain) < CLOSE
    assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""
    assert passed_by(fast)() == "" == passed_by(tiny)()


def test_threads_that_record_side_by_side(pack):
    """What others have compiled runs as it was written until the last of them is done, and not longer."""
    from anyshape.accel.tape.modes import Operations
    from torch._dynamo import eval_frame

    threads, modes = [ThreadPoolExecutor(1) for _ in range(2)], [Operations() for _ in range(2)]
    stances = [eval_frame._stance.stance]
    for done in (Operations.__enter__, lambda mode: Operations.__exit__(mode, None, None, None)):
        for thread, mode in zip(threads, modes, strict=True):
            thread.submit(done, mode).result()
            stances.append(eval_frame._stance.stance)
    assert stances == ["default", "force_eager", "force_eager", "force_eager", "default"]


def test_a_model_as_an_object_patch(models, tiny):
    """The older way: the diffusion model itself is exchanged for a compiled one."""
    for order in ("before", "after"):
        model = compiled(tiny) if order == "before" else tiny.clone()
        model.add_object_patch("diffusion_model", torch.compile(model.model.diffusion_model, backend="eager"))
        model = compiled(model) if order == "after" else model
        assert error(models.sample(model, **SHORT_RUN), models.sample(tiny, **SHORT_RUN)) < CLOSE


def test_a_model_whose_blocks_should_be_skipped(models, tiny):
    """The whole is compiled, our part included: no block is skipped, and Skip Blocks says why."""
    run, lines = SHORT_RUN | {"steps": 9}, []
    skips, message = skip_with_message(torch_compiled(tiny, "eager"), tell=lines.append, interval=3)
    assert message == "" and error(models.sample(skips, **run), models.sample(tiny, **run)) < CLOSE
    (line,) = lines
    assert "bypasses Skip Blocks" in line and line in [f["reason"] for f in fallbacks()]
    models.sample(skipping(tiny, interval=3), **run)
    models.sample(skipping(compiled(torch_compiled(tiny, "eager")), interval=3), **run)  # then Compile Model says it
    bypassed = [(f["reason"].split(",")[0], f["count"]) for f in fallbacks()]
    assert bypassed == [(f"this run bypasses {name}", 1) for name in ("Skip Blocks", "Compile Model")]


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "read back"])
def test_blocks_that_are_skipped(models, recorded):
    """Their forward is torch's, and what it runs is the blocks' own."""
    from anyshape.accel import stats

    from tools.architectures import patchers

    model = patchers.make("WAN21_T2V", torch.float32, blocks=BLOCKS)
    network = model.model.diffusion_model
    if not recorded:
        read_back(network, "forward_orig", lambda x, t, *_, **__: t)
    keys = [f"diffusion_model.blocks.{number}" for number in range(len(network.blocks))]
    run = {"width": 64, "height": 72, "steps": 9, "frames": 5}
    skips = [skipping(each, interval=3, depth="1") for each in (model, compiled(torch_compiled(model, "eager", keys)))]
    plain, ours = (models.sample(each, **run) for each in skips)
    assert torch.equal(ours, plain) and error(plain, models.sample(model, **run)) > 1e-2
    assert [(run["full"], run["skipped"]) for run in stats.snapshot()["skip"]] == [(3, 6)] * 2


def test_attention(models):
    """Another node's is called and not recorded: it runs as it was compiled, in the recorded forward too."""
    from tools.architectures import patchers

    def backend(graph, _):
        return lambda *args: (ran.append(graph), graph(*args))[1]

    scaled, ran = torch.compile(lambda q: q * 1.01, backend=backend), []
    model = patchers.make("WAN21_T2V", torch.float32)
    model.model_options["transformer_options"]["optimized_attention_override"] = (
        lambda func, q, *args, **kwargs: func(scaled(q), *args, **kwargs)
    )  # fmt: skip
    plain = models.sample(model, **SHORT_RUN, frames=5)
    wanted, ran[:] = len(ran), []
    assert error(models.sample(compiled(model), **SHORT_RUN, frames=5), plain) < CLOSE
    assert len(ran) == wanted > 2 and {s["state"] for s in shapes()} == {FUSED}


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_controlnet(models, tiny, order):
    """order: of the other node, which puts what it compiled into the object that it is given."""
    import nodes

    def compiling(control):
        control.control_model = torch.compile(control.control_model, backend="eager")
        return control

    def sampled(control):
        hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(5))
        apply = nodes.ControlNetApplyAdvanced().apply_controlnet
        steer = lambda one, other: apply(one, other, control, hint, 0.8, 0.0, 1.0)  # noqa: E731
        return models.sample(tiny, **SHORT_RUN, steer=steer)

    control = models.controlnet_for(tiny)
    plain = sampled(control.copy())
    fast = compiled_control(compiling(control)) if order == "before" else compiling(compiled_control(control))
    assert error(sampled(fast), plain) < CLOSE and error(models.sample(tiny, **SHORT_RUN), plain) > 1e-3
    said = [f["count"] for f in fallbacks() if "Put Compile ControlNet after" in f["reason"]]
    assert said == ([1] if order == "after" else [])
    assert {s["state"] for s in shapes()} == ({FUSED} if order == "before" else set())
    assert (traced() == []) == (order == "before")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_vae(order):
    """order: of the other node, which compiles the decoder of the VAE that all share."""
    from tools.architectures import autoencoders

    vae, latent = autoencoders.make("TAESD"), autoencoders.TABLE["TAESD"].inputs("decode", 0)
    fast = compiled_vae(vae) if order == "after" else None
    with torch.inference_mode():
        plain = vae.decode(*latent)
        network = vae.first_stage_model
        network.taesd_decoder = torch.compile(network.taesd_decoder, backend="eager")
        assert torch.equal((fast or compiled_vae(vae)).decode(*latent), plain)
    assert {s["state"] for s in shapes()} == {FUSED} and fallbacks() == [] and traced() == []
