"""Devices that the pack does not know: a plain message and eager. torch says what they are; none of them is here."""

import pytest
import torch

from tools import embed
from tools.driving import SMALL_RUN, compile_with_message, compiled, compiled_vae, skip_with_message
from tools.oracles import fallbacks, shapes

embed.bare_pack()

from anyshape.accel import devices, kernels  # noqa: E402 - the package exists from the line above on
from anyshape.accel.errors import Unavailable  # noqa: E402
from anyshape.accel.tape import triton_start  # noqa: E402

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
KINDS = {"rocm": (CUDA, "AMD"), "mps": (torch.device("mps"), "Apple"), "xpu": (torch.device("xpu", 0), "Intel")}
KINDS |= {"directml": (torch.device("privateuseone", 0), "DirectML"), "other": (torch.device("hpu"), "hpu devices")}


@pytest.fixture(params=KINDS)
def other(request, monkeypatch):
    """(a device that the pack does not know, the word that names it)."""
    monkeypatch.setattr(torch.version, "hip", "7.1" if request.param == "rocm" else None)
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def nothing_remembered():
    kernels.load.cache_clear()
    yield
    kernels.load.cache_clear()


def test_nvidia_and_cpus_are_known(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.obstacle(CUDA) == devices.obstacle(CPU) == ""
    assert devices.is_nvidia(CUDA) and not devices.is_nvidia(CPU)


def test_others_are_named(other):
    device, word = other
    reason = devices.obstacle(device)
    assert word in reason and "not supported yet" in reason and "eager" in reason
    assert not devices.is_nvidia(device)


def test_no_kernels_and_no_thread_at_the_start(other, monkeypatch):
    device, word = other
    monkeypatch.setattr(triton_start, "_start_triton", lambda device: pytest.fail("started"))
    triton_start.prepare(device)
    assert not kernels.available(device) and kernels.too_old(device) == ""
    with pytest.raises(Unavailable, match=word):
        kernels.load(device)


def test_a_cpu_has_no_kernels_and_runs_the_tape(models, fresh, clean_stats):
    """ComfyUI's own operations, to the bit, and its weights as they lie."""
    fast = compiled(fresh)
    assert torch.equal(models.sample(fast, **SMALL_RUN), models.sample(fresh, **SMALL_RUN))
    (shape,) = shapes()
    assert shape["state"] == "tape" and shape["reason"] == ""
    assert fallbacks() == []


def test_a_vae_on_a_cpu_runs_the_tape_too(models, clean_stats):
    """To the bit."""
    vae, latent = models.vae(torch.float32, ch=32, num_res_blocks=1), torch.randn(1, 4, 8, 9)
    with torch.inference_mode():
        assert torch.equal(compiled_vae(vae).decode(latent), vae.decode(latent))
    assert [(s["state"], s["reason"]) for s in shapes()] == [("tape", "")] and fallbacks() == []


def test_the_nodes_say_so_and_pass_the_model_through(models, fresh, other, clean_stats):
    from anyshape.accel.comfy.vae import compile_vae

    device, word = other
    fresh.load_device = device
    out, message = compile_with_message(fresh)
    assert word in message and not any(out.wrappers.values())
    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    vae.device = device
    same, message = compile_vae(vae)
    assert same is vae and word in message


def test_skip_blocks_needs_no_kernels(models, fresh, monkeypatch, clean_stats):
    """It is plain torch: on any device blocks are skipped, in eager."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    fresh_device, fresh.load_device = fresh.load_device, CUDA
    out, message = skip_with_message(fresh)
    assert message == "" and any(out.wrappers.values())
    fresh.load_device = out.load_device = fresh_device
    assert torch.isfinite(models.sample(out, **SMALL_RUN | {"steps": 12})).all()
