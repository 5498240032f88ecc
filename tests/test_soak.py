"""A short soak (bench/soak.py) on the demo model, and that it finds what it is there to find."""

import contextlib
import json
import logging
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tools.oracles import FUSED

SEED, PROMPTS = 5696, range(2, 26)  # these have what 40 others have but for three kinds of patch, in half of the work
SIDES = [64 + side // 2 * 8 for side in range(13)]  # in image pixels; as many as the soak draws from on a CPU
PLAIN = {
    "loras": (), "hook": None, "masked": False, "control": None, "patch": "", "skip": None, "conds": "one",
    "stop": None, "unload": "", "rebuild": False, "denoise": 1.0, "twice": False, "mode": "auto", "vae": False,
    "width": 72, "height": 64, "images": 1, "frames": 1, "steps": 2, "sampler": "euler", "cfg": 2.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(pack: ModuleType, demo_pack: ModuleType) -> ModuleType:
    """``bench.soak``."""
    from bench import soak

    return soak


@pytest.fixture(scope="module")
def scope(bench: ModuleType) -> "Scope":  # noqa: F821
    """Small pictures; their latents have odd sides too."""
    sizes = tuple((width, height) for width in SIDES for height in SIDES)
    every = len(PROMPTS) // 2
    return replace(bench.scope("demo", cuda=False), sizes=sizes, most_pixels=4 * 72 * 72, every=every)


@pytest.fixture(scope="module")
def soak(bench: ModuleType, scope: "Scope") -> "Soak":  # noqa: F821
    return bench.Soak("demo", SEED, scope)


@pytest.fixture(autouse=True)
def _unlogged(monkeypatch):
    """pytest keeps every log record, with a traceback whose frames hold the models."""
    monkeypatch.setattr(logging.getLogger("anyshape.accel.engine"), "disabled", True)


@pytest.fixture
def attempt(bench, soak):
    """What is wrong with a plain prompt, after changes to it. The report of the long run is left alone."""
    own, soak.report = soak.report, bench.Report()
    plain = replace(bench.draw(SEED, 0, soak.scope), **PLAIN)
    yield lambda look=False, **changes: soak.attempt(replace(plain, **changes), look)
    soak.report = own


def test_prompts_that_differ_in_everything(soak):
    report = soak.run(PROMPTS)
    assert report.failed == []
    assert report.prompts == len(PROMPTS) and report.steps > 150 and len(report.memory) == 2
    assert min(report.broken_off, report.unloads, report.rebuilds, report.skipped, report.calls["vae"]) > 1
    assert report.worst_share < 1 and report.states[FUSED] > len(PROMPTS)
    assert any("another pack's patch failed" in reason for reason in report.fallbacks)


def test_which_models_there_are(bench):
    """Transformers also with quantised weights, whose layers round what they read."""
    known = ("demo", "sdxl", "zimage", "zimage-int8", "wan-fp8")
    assert all(map(bench.known, known)) and not any(map(bench.known, ("", "flux", "sdxl-int8", "zimage-int9")))


def test_a_prompt_is_drawn_again_from_its_number(bench, scope):
    lines = [bench.draw(SEED, index, scope).line() for index in PROMPTS]
    assert len(set(lines)) == len(PROMPTS) and bench.draw(SEED, PROMPTS[7], scope).line() == lines[7]
    assert bench.draw(SEED + 1, PROMPTS[7], scope).line() != lines[7]
    words = "LoRA 0,control,skip,interrupt,failure,unload,rebuild,mode off,area,late,masked,on the prompt"
    for word in words.split(","):
        assert any(word in line for line in lines), word


def test_with_dynamic_vram_some_prompts_find_little_room(bench):
    """All else is drawn as without it; LoRAs of one prompt only where all weights fit."""
    from bench import soak_checks

    scopes = [bench.scope("sdxl", True, dynamic) for dynamic in (False, True)]
    pairs = [[bench.draw(SEED, index, each) for each in scopes] for index in range(40)]
    short = [mapped for _, mapped in pairs if mapped.share < 1]
    for plain, mapped in pairs:
        assert replace(mapped, share=1.0) == replace(plain, hook=plain.hook if mapped.share == 1 else None)
    assert any(plain.hook and mapped.hook for plain, mapped in pairs)
    assert 5 < len(short) < 20 and {prompt.share for prompt in short} == {0.0, 0.3, 0.7}
    assert all("of the weights fit" in each.line() and soak_checks.expected(each) for each in short)


def test_sizes_of_latents_are_odd_too(bench, scope):
    scopes = [scope, bench.scope("demo", cuda=False), bench.scope("demo", cuda=True)]
    prompts = [bench.draw(SEED, index, each) for index in PROMPTS for each in scopes]
    assert all(p.width % 8 == p.height % 8 == 0 for p in prompts)
    assert all(sum(p.width // 8 % 2 for p in prompts[first::3]) > 2 for first in range(3))


# What it finds ----------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_plain_prompt(attempt):
    assert attempt() == attempt(vae=True) == []


def test_a_latent_that_is_not_eagers(attempt, monkeypatch):
    from anyshape.accel.tape.program import Program

    assert attempt() == []
    own = Program.run
    monkeypatch.setattr(Program, "run", lambda self, *args: own(self, *args) * 1.01)
    (problem,) = attempt()
    assert "from eager's" in problem


def test_a_latent_of_other_steps_is_not_compared(bench, attempt, soak, monkeypatch):
    """Where weights do not fit. If as many steps were full in eager, it is."""
    from bench import soak_prompts

    monkeypatch.setattr(soak.parts, "room", lambda share: contextlib.nullcontext())
    skipping = {"skip": soak_prompts.Skip(3, "0"), "steps": 9, "share": 0.7, "eager_first": True}
    assert attempt(**skipping) == [] and soak.report.other_steps == 0
    sample = bench.sample
    scales, full = iter((1.0, 1.01, 1.0, 1.0, 1.01)), iter((3, 3, 3, 4))  # eager, ours, eager's bound; eager, ours
    monkeypatch.setattr(bench, "sample", lambda *args: sample(*args) * next(scales))
    monkeypatch.setattr(bench, "stats", SimpleNamespace(snapshot=lambda: {"skip": [{"full": next(full)}]}))
    assert ["from eager's" in problem for problem in attempt(**skipping)] == [True]
    assert attempt(**skipping) == [] and soak.report.other_steps == 1


def test_a_picture_that_is_not_eagers(attempt, monkeypatch):
    from anyshape.accel.tape.program import Program

    own = Program.run

    def off(self, *args):
        out = own(self, *args)
        return out * 1.001 if out.shape[1] == 3 else out  # a picture

    monkeypatch.setattr(Program, "run", off)
    (problem,) = attempt(vae=True)
    assert problem.startswith("the VAE's result is")


def test_a_step_down(attempt, monkeypatch):
    from anyshape.accel.tape.program import Program

    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(Program, "run", out_of_memory)
        (problem,) = attempt()
    assert "unexpected fallbacks: out of memory" in problem and attempt() == []


def test_a_compilation(attempt, monkeypatch):
    """Of what a model that has run before already had."""
    from anyshape.accel.maker import Maker

    assert attempt() == []
    own = Maker.made

    def made(*args):
        program = own(*args)
        program.report.compiled = 1
        return program

    monkeypatch.setattr(Maker, "made", made)
    (problem,) = attempt(width=200)
    assert "recompiles" in problem


def test_an_interrupt_that_is_swallowed(attempt, bench, monkeypatch):
    from bench.soak_prompts import Stop

    stopped = Stop("interrupt", 1)
    assert attempt(stop=stopped) == []
    monkeypatch.setattr(bench, "sample", lambda way, prompt, latent, callback=None: torch.ones(1))
    assert any("did not end the run" in problem for problem in attempt(stop=stopped))


def test_what_is_left_on_the_shared_models(attempt, soak):
    conv = soak.parts.patcher.model.diffusion_model.input_blocks[0][0]
    hook = conv.register_forward_hook(lambda *args: None)
    problems = attempt()
    hook.remove()
    assert any("has a hook" in problem for problem in problems)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    problems = attempt()
    conv.weight.data = conv.weight.data.contiguous()
    assert any("not contiguous" in problem for problem in problems) and attempt() == []


def test_memory_that_is_not_given_back(attempt, soak):
    assert attempt(look=True) == []
    leak = torch.zeros(1 << 18)
    problems = attempt(look=True)
    assert any("tensors memory grew" in problem for problem in problems), leak.nbytes


def test_memory_that_grows_while_models_run():
    from bench import soak_checks as checks

    first = dict.fromkeys(("running", "process", "device", "tensors", "programs"), 1 << 30)
    limit = checks.RUNNING_GROWTH
    assert list(checks.grown(first, first | {"running": first["running"] + limit}, 1 << 30)) == []
    (problem,) = checks.grown(first, first | {"running": first["running"] + limit + 1}, 1 << 30)
    assert problem.startswith("running memory grew from 1024 to")
    more = first | {"process": first["process"] + (100 << 20)}  # plans of new sizes, as in eager; there are none
    assert list(checks.grown(first, more, 1 << 30)) == []
    assert next(checks.grown(first, more, 1 << 30, settled=True)).startswith("process memory grew from 1024 to")


def test_prompts_that_run_again_meet_no_new_size(bench, soak, monkeypatch):
    """From the second round on, memory is held against that round's first look."""
    looks = []
    monkeypatch.setattr(soak, "report", bench.Report())
    monkeypatch.setattr(soak, "first", {})
    monkeypatch.setattr(soak, "settled", False)
    monkeypatch.setattr(soak, "scope", replace(soak.scope, every=2))

    def attempt(prompt, look):
        looks.append((prompt.index, look, soak.settled, bool(soak.first)))
        soak.first = soak.first or ({"process": 1} if look else {})
        return []

    monkeypatch.setattr(soak, "attempt", attempt)
    assert soak.run(range(4, 6), rounds=2).prompts == 4
    assert looks == [(4, False, False, False), (5, True, False, False), (4, False, True, False), (5, True, True, False)]


def test_models_that_are_held(attempt, soak):
    held = soak.parts.vae.first_stage_model
    assert any("AutoencoderKL is still held" in problem for problem in attempt(rebuild=True)), held
    del held
    assert attempt(rebuild=True) == []


def test_a_picture_in_eager_that_has_changed(attempt, soak):
    assert attempt(look=True) == []
    weight = soak.parts.patcher.model.diffusion_model.out[2].weight
    own = weight.data.clone()
    weight.data.mul_(1.001)
    problems = attempt(look=True)
    weight.data.copy_(own)
    assert any("no longer what it was" in problem for problem in problems)


def test_a_failure_is_told_and_the_run_goes_on(bench, soak, monkeypatch, capsys, tmp_path):
    """From the command line: its line, the exit code, and a JSON with the conditions."""
    drawn: list[tuple[str, int]] = []

    def attempt(prompt, look):
        drawn.append((prompt.mode, prompt.budget_mb))
        return ["broken"] if prompt.index == 1 else []

    def made(*args, **fixed):
        monkeypatch.setattr(soak, "fixed", fixed)
        return soak

    monkeypatch.setattr(bench, "Soak", made)
    monkeypatch.setattr(soak, "report", bench.Report())
    monkeypatch.setattr(soak, "attempt", attempt)
    path = tmp_path / "soak.json"
    options = ["--model", "demo", "--prompts", "3", "--mode", "off", "--budget", "7", "--json", str(path)]
    monkeypatch.setattr(bench.sys, "argv", ["soak", *options])
    monkeypatch.setattr(bench.measure, "conditions", lambda: {"machine": "x"})
    assert bench.main() == 1
    found = json.loads(path.read_text())
    assert found["prompts"] == 3 and [entry["index"] for entry in found["failed"]] == [1] and found["machine"] == "x"
    assert "FAILED 1: seed" in capsys.readouterr().out and drawn == [("off", 7)] * 3


# Transformers: last, for what pytest keeps of their models would be memory that grew ----------------------------------


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        ("zimage", {"dim": 256, "n_heads": 2, "n_kv_heads": 2}),
        ("wan", {"dim": 128, "num_heads": 1, "ffn_dim": 128}),
    ],
)
def test_transformers(bench, monkeypatch, name, narrow):
    """What no prompt of a UNet has: other heads, their own patch, frames of a video through the VAE."""
    from bench import soak_parts, soak_prompts

    monkeypatch.setitem(soak_parts.TRANSFORMERS, name, soak_parts.TRANSFORMERS[name] | narrow)
    scope = soak_parts.scope(name, cuda=False)
    soak = bench.Soak(name, SEED, replace(scope, rebuild=0.0))
    plain = PLAIN | {"frames": 5 if name == "wan" else 1}
    for changes in (
        {"vae": True, "denoise": 0.6, "loras": ((0, 0.7),)},
        {"stop": soak_prompts.Stop("failure", 1), "patch": "attention_values", "conds": "late"},
        {"skip": soak_prompts.Skip(3, "0"), "steps": 9, "images": 2},
    ):
        assert soak.attempt(replace(bench.draw(SEED, 0, soak.scope), **plain | changes)) == []
    assert soak.report.broken_off == 1 and soak.report.skipped > 0 and soak.report.calls["vae"] > 1
    assert any("another pack's patch failed" in reason for reason in soak.report.fallbacks)


def test_quantised_weights(bench, monkeypatch):
    """Such layers round what they read: a latent may be as far as eager's own moves when its input does, no more."""
    from anyshape.accel.tape.program import Program

    from bench import soak_parts

    monkeypatch.setitem(soak_parts.TRANSFORMERS, "zimage", {"dim": 256, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2})
    soak = bench.Soak("zimage-fp8", SEED, replace(soak_parts.scope("zimage-fp8", cuda=False), rebuild=0.0))
    prompt = replace(bench.draw(SEED, 0, soak.scope), **PLAIN | {"loras": ((0, 0.7),), "eager_first": True})
    assert soak.attempt(prompt) == [] and soak.report.states == {"tape": 1} and soak.parts.rounding > 0
    own = Program.run
    monkeypatch.setattr(Program, "run", lambda self, *args: own(self, *args) * 1.2)
    (problem,) = soak.attempt(prompt)
    assert "from eager's" in problem and soak.report.beyond_floor == 1
