"""Attention on a real GPU: which backend a program calls, that later processes call the same, and what comes of it."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]

ASKED = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ASKED["efficient"] = SDPBackend.EFFICIENT_ATTENTION
# (images, heads, queries, keys, width of a head): as in Flux and in Wan, a prompt's, odd lengths
FORMS = [
    (1, 24, 4096, 4096, 128), (2, 10, 4096, 4096, 64), (1, 12, 1567, 1567, 128), (2, 8, 1021, 77, 64),
    (1, 40, 333, 512, 128), (1, 4, 33, 33, 64),
]  # fmt: skip
NEW_SIZE = 0.2  # seconds that a length may cost that no backend has seen


class Attends(nn.Module):
    """Attention as ComfyUI asks for it, with an order of backends for that call, and a kernel of ours behind it."""

    def __init__(self, first: str, channels: int) -> None:
        super().__init__()
        others = [backend for name, backend in ASKED.items() if name != first]
        self.first, self.order = first, [ASKED[first], *others, SDPBackend.MATH]
        self.scale = nn.Parameter(torch.randn(channels, device="cuda", dtype=torch.bfloat16), requires_grad=False)

    def forward(self, q, k, v, mask=None):
        with sdpa_kernel(self.order, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.silu(out.transpose(1, 2).flatten(2) * self.scale) + 1


def tensors(form, masked, tokens_first=True):
    images, heads, queries, keys, width = form
    draw = torch.Generator("cuda").manual_seed(0)
    made = []
    for tokens in (queries, keys, keys):
        shape = (images, tokens, heads, width) if tokens_first else (images, heads, tokens, width)
        x = torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)
        made.append(x.transpose(1, 2) if tokens_first else x)
    if masked:
        seen = torch.rand(images, 1, queries, keys, generator=draw, device="cuda") > 0.3
        made.append(torch.zeros(seen.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~seen, float("-inf")))
    return made


def recorded(model, given, fuse):
    """(the forward's own result, what a replay gives, other backends that the program calls, what the rules say)."""
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record

    recorder = Recorder(given, model, given[0].device)
    out, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    said = rules.apply(tape) if fuse else []
    with torch.inference_mode():
        program = Program(tape, fuse=fuse)
        program.bind(model)
        replayed = program.run(given)
    used = [operation.func.backend for operation in tape.operations if hasattr(operation.func, "backend")]
    used = [backend for backend in used if backend != model.first]
    return out, replayed, used, said


def exact(model, q, k, v, mask=None):
    """In float64."""
    q, k, v = (x.double() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.double())
    return F.silu(out.transpose(1, 2).flatten(2) * model.scale.double()) + 1


def off(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("first", ASKED)
@pytest.mark.parametrize("masked", [False, True])
def test_exact_replays_repeat_the_backend_that_ran(first, masked):
    """ComfyUI's order of backends is in force around its own call only; a replay is bit-equal without it."""
    for form in FORMS[1:4]:
        given = tensors(form, masked)
        out, replayed, used, _ = recorded(Attends(first, form[1] * form[4]), given, fuse=False)
        assert torch.equal(out, replayed) and used == []


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("first", ASKED)
def test_a_program_is_as_exact_as_eager(first, form, masked, monkeypatch):
    """Whichever backend it calls, and however the queries lie."""
    from anyshape.accel.tape.rules import attention

    monkeypatch.setattr(attention, "PAYS", 0.0)
    for tokens_first in (True, False):
        given = tensors(form, masked, tokens_first)
        model = Attends(first, form[1] * form[4])
        out, replayed, used, said = recorded(model, given, fuse=True)
        reference = exact(model, *given)
        print(
            first, form, "masked" if masked else "", "->", used or first, off(out, reference), off(replayed, reference)
        )
        assert off(replayed, reference) < 1.5 * off(out, reference) + 1e-4
        assert bool(used) == bool(said) and "" not in used  # "": the backend refused, although torch said it could
        if not used and form[1] * form[2] > 10_000:  # nothing but attention is left, which is eager's
            assert off(replayed, out.double()) < 2e-3


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]])
def test_the_fastest_is_taken(form, monkeypatch):
    """By what was measured; on Hopper that is cuDNN's, which is not asked, if there is enough to compute."""
    from anyshape.accel.tape import attention_choice
    from anyshape.accel.tape.rules import attention

    monkeypatch.setattr(attention, "PAYS", 0.0)
    attention_choice._KNOWN.clear()
    started, given, device = time.perf_counter(), tensors(form, False), torch.device("cuda", 0)
    _, _, used, _ = recorded(Attends("flash", form[1] * form[4]), given, fuse=True)
    trusts = attention_choice.takes_plans(device)
    assert len(attention_choice._KNOWN) == (not trusts)
    best = attention_choice.fastest(attention_choice.case_of(*given[:3], False, False), "flash", device)
    (times,) = attention_choice._KNOWN.values()
    print(torch.cuda.get_device_name(), times, f"{time.perf_counter() - started:.3f} s")
    assert set(times) >= {"flash", "efficient"}
    assert used == ([] if best == "flash" else [best]) and (best == attention.TRUSTED or not trusts)


def test_measuring_draws_no_random_numbers():
    from anyshape.accel.tape import attention_choice

    case, device = (
        attention_choice.Case(torch.bfloat16, 16, 1, 1024, 1024, 64, 64, False, False),
        torch.device("cuda", 0),
    )
    attention_choice._KNOWN.clear()
    before = torch.cuda.get_rng_state()
    attention_choice.fastest(case, "flash", device)
    assert attention_choice._KNOWN and torch.equal(before, torch.cuda.get_rng_state())


def test_a_new_length_costs_little():
    """cuDNN makes a plan for each: what a program of a further size pays, where ComfyUI asked for FlashAttention."""
    from anyshape.accel.tape.attention_choice import attend

    took = []
    with torch.inference_mode():
        for length in (1024, 1111, 1112, 2345):
            q, k, v = tensors((1, 24, length, length, 128), False)
            torch.cuda.synchronize()
            started = time.perf_counter()
            attend("cudnn", q, k, v, None, False, None)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - started)
    print("cuDNN's first call at a length:", [f"{seconds * 1e3:.1f} ms" for seconds in took])
    assert max(took[1:]) < NEW_SIZE


def test_heads_of_64_channels_are_never_planned(models):
    """Attention of a UNet by cuDNN on Hopper: neither its programs nor a later size's first forward asks for a plan."""
    from anyshape.accel import stats
    from anyshape.accel.call import Settings
    from anyshape.accel.comfy.attach import compile_model
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch takes cuDNN's attention by itself on Hopper alone")
    eager = models.unet("sdxl", model_channels=64, context_dim=64, num_head_channels=64)
    compiled, _ = compile_model(eager, Settings(mode="auto"))
    for size in ((256, 256), (320, 256)):  # of the second, cuDNN is asked once what its result looks like
        models.sample(compiled, *size, steps=2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = models.sample(compiled, 264, 328, steps=2)
    ran = {event.key for event in seen.key_averages() if "attention" in event.key}
    found = [(shape["state"], shape["reason"]) for shape in stats.snapshot()["models"][-1]["shapes"]]
    assert found == [("graph", "")] * 3, (found, ran)
    assert "anyshape::flash_attention" in ran and "aten::_cudnn_attention_forward" not in ran, ran
    wanted = models.sample(eager, 264, 328, steps=2)
    assert (out - wanted).norm() / wanted.norm() < 0.05


PROCESS = """
import json
from tests import test_gpu_attention as tests
from tools import embed
embed.use_comfyui(), embed.load_pack()
from anyshape.accel.stats import snapshot
from anyshape.accel.tape import attention_choice
timed, own = [], attention_choice._milliseconds
attention_choice._milliseconds = lambda backend, *rest: timed.append(backend) or own(backend, *rest)
forms = (*tests.FORMS, (1, 8, 640, 640, 96))  # Hopper does not measure the others
used = [tests.recorded(tests.Attends("flash", form[1] * form[4]), tests.tensors(form, masked), True)[2]
        for form in forms for masked in (False, True)]
found = snapshot()["artifacts"]
print(json.dumps({"timed": len(timed), "used": used, "loaded": found["loaded"], "rejected": found["rejected"]}))
"""


def test_later_processes_take_the_same(tmp_path):
    """The second one measures nothing."""
    environment = os.environ | {"ANYSHAPE_ARTIFACTS_DIR": str(tmp_path / "store"), "ANYSHAPE_ARTIFACTS_MB": "64"}
    answers = []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", PROCESS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout.splitlines()[-1]))
    first, second = answers
    kept = len(list((tmp_path / "store").glob("*/times.json")))
    assert first["timed"] > 0 and first["loaded"] == 0 and kept > 0
    assert (second["timed"], second["loaded"], second["rejected"]) == (0, kept, [])
    assert first["used"] == second["used"]


class Shares(nn.Module):
    """Grouped-query attention, as models write it: heads of keys and values are repeated before the call."""

    def __init__(self, first, times):
        super().__init__()
        self.times, self.order = times, [ASKED[first], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def forward(self, q, k, v):
        k, v = (x.repeat_interleave(self.times, dim=1) for x in (k, v))
        with sdpa_kernel(self.order, set_priority=True):
            return F.silu(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + 1


@pytest.mark.parametrize("times", [4, 3])
@pytest.mark.parametrize("first", ["cudnn", "flash"])
def test_shared_heads_are_read_where_they_lie(first, times):
    """To the bit as with copies of them, at an odd length too."""
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record

    model = Shares(first, times)
    for length in (2048, 1567):
        q, k, v = tensors((2, 12, length, length, 128), False)
        given = [q, k[:, : 12 // times], v[:, : 12 // times]]
        recorder = Recorder(given, model, q.device)
        wanted, tape = record(lambda given=given: model(*given), recorder)
        assert tape is not None, recorder.refusal
        rules.apply(tape)
        called = [operation.func for operation in tape.operations if hasattr(operation.func, "shared")]
        with torch.inference_mode():
            program = Program(tape, fuse=True)
            program.bind(model)
            out = program.run(given)
        assert [each.shared for each in called] == [times] and not called[0]._repeats
        if called[0].backend == "":  # the one that ran: what comes of it is the same to the bit
            assert (out != wanted).float().mean() <= 1e-4
        assert ((out - wanted).float().norm() / wanted.float().norm()).item() <= 1e-2


@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_result_that_nobody_computes_lies_as_cudnns(form, cut, tokens_first):
    """cut: queries are a part of something wider, as of one product for queries, keys and values."""
    from anyshape.accel.tape.attention_choice import supports
    from anyshape.accel.tape.unplanned import ATTENTION, heard, void

    q, k, v = tensors(form, masked=False, tokens_first=tokens_first)
    if cut:
        q = torch.cat([q, q], -1)[..., : q.shape[-1]]
    if not supports("cudnn", q, k, v, None, False):
        pytest.skip("this cuDNN has no attention for that")
    given = (q, k, v, None, False, 0.0, False, False)
    wanted = ATTENTION(*given)
    heard(given, {}, wanted)
    made = void(given, {})
    assert [type(item) for item in made] == [type(item) for item in wanted]
    assert (made[0].shape, made[0].stride(), made[0].dtype) == (wanted[0].shape, wanted[0].stride(), wanted[0].dtype)
    assert void((*given[:4], True, *given[5:]), {}) is None
