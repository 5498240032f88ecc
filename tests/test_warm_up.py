"""Warm Up on the CPU: its list of sizes, and the node in front of real sampling on small models."""

import random
import re

import numpy as np
import pytest
import torch

from tools.driving import compiled, compiled_control, every_progress, sample_prompts, skipping, steering
from tools.oracles import FUSED, error, expect, fallbacks, last_run, shapes

FORMS = "write 1024x1152, 896x768 batch 2, or 832x480x33 for 33 frames"
SIZES = "136x120\n64x96 batch 2\n128x128"
LISTED = {(136, 120, 1), (64, 96, 2), (128, 128, 1)}


# The list ---------------------------------------------------------------------------------------------------------


def parse(text):
    from anyshape.accel.size_list import parse

    shapes, problems = parse(text)
    return [(s.width, s.height, s.batch) for s in shapes if s.frames == 1], problems


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("1024x1152", (1024, 1152, 1)), ("896x768 batch 2", (896, 768, 2)), ("  896 X 768   Batch 02 ", (896, 768, 2)),
        ("16x16384 batch 4096", (16, 16384, 4096)), ("512×768 # tall", (512, 768, 1)), ("1023x727", (1016, 720, 1)),
    ],
)  # fmt: skip
def test_a_size(pack, line, wanted) -> None:
    assert parse(line) == ([wanted], [])


@pytest.mark.parametrize(
    "line",
    ["1024y1152", "1024", "1024x", "x1152", "1024x1152x", "1024x1152x2x2", "1024x1152 2", "1024x1152 frames",
     "1024x1152 batch 2 33 frames", "1024x1152x2 33 frames", "1024x1152 batch", "1024x1152 batch two", "1024x1152b2",
     "-1024x1152", "1024.5x1152", "1e3x1152", "1024x1152 batch -1", "a square", "1024x1152, 512", "1024*1152**2",
     "9" * 5000 + "x64", "١٠٢٤x512"],
)  # fmt: skip
def test_not_a_size(pack, line) -> None:
    found, (problem,) = parse(f"\n# sizes\n{line}\n512x512")
    assert found == [(512, 512, 1)]
    assert problem.startswith("line 3: '") and problem.endswith(FORMS)
    assert line[:40] in problem and len(problem) < 180


@pytest.mark.parametrize(
    "line",
    ["64*72 b2", "64 x 72, batch 2", "64x72 B2,", "64X72  b 2;", "６４ｘ７２　ｂａｔｃｈ２", "64×72，ｂ2"],
)  # fmt: skip
def test_a_size_as_people_write_it(pack, line) -> None:
    assert parse(line) == ([(64, 72, 2)], [])


def test_several_sizes_on_a_line(pack) -> None:
    wanted = [(64, 64, 1), (128, 128, 2), (72, 64, 1)]
    for line in ("64x64, 128x128 batch 2, 72x64", "64*64;128*128 b2 ;72*64", "６４ｘ６４，１２８ｘ１２８ b2、72x64"):
        assert parse(line) == (wanted, []), line
    found, problems = parse("512x512\n64x64, 8x8, 72x, 80x80")
    assert found == [(512, 512, 1), (64, 64, 1), (80, 80, 1)]
    assert [problem.split(" - ")[0] for problem in problems] == ["line 2: '8x8'", "line 2: '72x'"]


def test_a_bad_entry_leaves_the_others_of_its_line(pack) -> None:
    for line in ("64x64, foo", "foo, 64x64", "64x64; Foo", "６４ｘ６４、foo"):
        found, problems = parse(line)
        assert found == [(64, 64, 1)], line
        assert [problem.split(" - ")[0].lower() for problem in problems] == ["line 1: 'foo'"]
    assert parse("64x64, bar, 72x72, b2")[0] == [(64, 64, 1), (72, 72, 2)]
    for line in ("64x64, batch two", "64x64, 512"):  # what could belong to the size is no other entry
        found, (problem,) = parse(line)
        assert found == [] and f"'{line}'" in problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("8x512", "the width is 8; give 16 to 16384 pixels"), ("512x16385", "the height is 16385; give 16"),
        ("0x0", "the width is 0"), ("512x512 batch 0", "the batch is 0; give 1 to 4096 images"),
        ("512x512 batch 4097", "the batch is 4097"), ("832x480x0", "the frames are 0; give 1 to 16384"),
        ("832x480 16385 frames", "the frames are 16385"),
    ],
)  # fmt: skip
def test_a_size_that_comfyui_does_not_make(pack, line, words) -> None:
    found, (problem,) = parse(line)
    assert found == [] and problem.startswith(f"line 1: '{line}' - ") and words in problem


@pytest.mark.parametrize(
    ("line", "wanted", "shown"),
    [
        ("832x480x33", (832, 480, 1, 33), "832x480x33"), ("832 × 480 X 33 # short", (832, 480, 1, 33), "832x480x33"),
        ("832x480 33 frames", (832, 480, 1, 33), "832x480x33"), ("64x64 1 frame", (64, 64, 1, 1), "64x64"),
        ("832x480x5 batch 2", (832, 480, 2, 5), "832x480x5 batch 2"),
        ("839x480 5 Frames Batch 2", (832, 480, 2, 5), "832x480x5 batch 2"),
    ],
)  # fmt: skip
def test_frames_of_a_video(pack, line, wanted, shown) -> None:
    from anyshape.accel.size_list import parse

    ((found,), problems) = parse(line)
    assert (found.width, found.height, found.batch, found.frames) == wanted
    assert str(found) == shown and problems == []


def test_presets_add_their_sizes_to_the_list(pack) -> None:
    from anyshape.accel.size_list import PRESETS, with_preset

    assert parse(with_preset("64x64\nx", "none")) == parse("64x64\nx")
    found, problems = parse(with_preset("1024x1024 batch 2\nx", "SDXL"))
    assert len(found) == 10 and found[0] == (1024, 1024, 2) and len(problems) == 1
    assert all(0.9 < width * height / 1024**2 < 1.1 for width, height, _ in found)
    assert all(parse(sizes)[1] == [] for sizes in PRESETS.values())
    with pytest.raises(ValueError, match="preset is 'sdxl'; choose one of none, SDXL"):
        with_preset("", "sdxl")


def test_blank_lines_comments_and_repetitions(pack) -> None:
    assert parse("\n# all\n512x512\r\n\t\n512x512 batch 1\n515x519\n512x512 batch 2 # more\n") == (
        [(512, 512, 1), (512, 512, 2)], [],
    )  # fmt: skip
    assert parse("") == parse(" \n#512x512") == ([], [])


def test_comfyui_makes_the_same_size(models) -> None:
    """Of a size that is no multiple of 8; the report says so."""
    from anyshape.accel.families.latents import latents_of
    from anyshape.accel.size_list import parse
    from comfy.latent_formats import SD15

    import nodes

    ((shape,), _) = parse("1023x729 batch 3")
    latent = nodes.EmptyLatentImage().generate(1023, 729, 3)[0]["samples"]
    assert tuple(latent.shape) == latents_of(SD15()).shape(shape.width, shape.height, shape.batch)
    assert shape.note.startswith("line 1: '1023x729 batch 3' - taken as 1016x728: ")


# The node ---------------------------------------------------------------------------------------------------------


def warm(pack, model, sizes=SIZES, **inputs):
    """The node's report."""
    node = pack.nodes.WarmUp
    given = {"vae": None} | inputs
    out = node.PREPARE_CLASS_CLONE({}).execute(model, sizes, **given).args
    assert out[0] is model and out[1] is given["vae"]
    return out[2]


def ran(kind="model"):
    """(width, height, batch) -> calls, of everything of this kind."""
    from anyshape.accel import stats

    found = [s for model in stats.snapshot()["models"] if model["kind"] == kind for s in model["shapes"]]
    return {(s["width"], s["height"], s["batch"]): s["calls"] for s in found}


def first_calls():
    return {s["key"] for s in shapes()}


def nothing_new(run):
    """``run``, in which no shape is new and nothing compiles."""

    before = first_calls()
    with expect(recompiles=0, kernels=0, fallbacks=0):
        out = run()
    assert first_calls() == before
    return out


def sample_listed(models, model, **run):
    for width, height, batch in LISTED:
        models.sample(model, width, height, batch, **{"steps": 2} | run)


@pytest.fixture
def clean(clean_stats):
    return clean_stats


def test_a_preset_is_warmed_up(pack, patcher, clean, monkeypatch) -> None:
    from anyshape.accel import size_list

    monkeypatch.setitem(size_list.PRESETS, "SD1.5", "64x96, 96x64")
    report = warm(pack, compiled(patcher), "64x64", preset="SD1.5")
    assert ran().keys() == {(64, 64, 1), (64, 96, 1), (96, 64, 1)} and len(report.splitlines()) == 4


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_listed_sizes_are_known_before_their_first_prompt(pack, models, small_unets, clean, name) -> None:
    """And of others nothing compiles either."""

    model = compiled(small_unets[name])
    report = warm(pack, model)
    assert ran().keys() == LISTED and {s["state"] for s in shapes()} == {FUSED}
    assert [line.split()[:4] for line in report.splitlines()[1:]] == [
        ["128x128", "1", "model", FUSED], ["136x120", "1", "model", FUSED], ["64x96", "2", "model", FUSED],
    ]  # fmt: skip
    nothing_new(lambda: sample_listed(models, model))
    with expect(recompiles=0, kernels=0, fallbacks=0):
        models.sample(model, 200, 72, 3, steps=1)
    assert (200, 72, 3) in ran()


@pytest.mark.parametrize(("cfg", "rows"), [("auto", {2, 4}), ("off", {1, 2}), ("both", {1, 2, 4})])
def test_cfg_says_which_prompts_are_joined(pack, patcher, clean, cfg, rows) -> None:
    warm(pack, compiled(patcher), "64x64\n64x64 batch 2", cfg=cfg)
    assert {int(s["key"].split("x[")[1].split("x")[0]) for s in shapes()} == rows


def test_the_prompts_are_the_users(pack, models, patcher, clean) -> None:
    """Their length, and the ControlNet in them; one prompt stands for both."""
    control = compiled_control(models.controlnet_for(patcher))
    prompts = [models.conditioning(patcher, tokens=154, seed=seed) for seed in (1, 2)]
    positive, negative = steering(control, start_percent=0.3)(*prompts)
    model = compiled(patcher)
    warm(pack, model, "128x128", positive=positive, negative=negative)
    nothing_new(lambda: sample_prompts(model, positive, negative, steps=4))
    assert ran("controlnet") and all("154x64" in s["key"] for s in shapes() if "context" in s["key"])
    warm(pack, model, "64x64", negative=negative)
    nothing_new(lambda: sample_prompts(model, positive, negative, torch.zeros(1, 4, 8, 8), steps=4))


@pytest.mark.parametrize("interval", [1, 3, 20])
def test_every_kind_of_step_is_warmed(pack, models, patcher, clean, interval) -> None:
    model = skipping(compiled(patcher), interval=interval)
    warm(pack, model)
    assert last_run()["resets"] == {} and (last_run()["skipped"] > 0) == (interval > 1)
    kinds = {kind for kind in ("full", "skipped") for s in shapes() if f"step={kind}" in s["key"]}
    assert kinds == ({"full", "skipped"} if interval > 1 else set())
    nothing_new(lambda: sample_listed(models, model, steps=12))
    assert interval == 1 or last_run()["skipped"] > 0
    nothing_new(lambda: sample_listed(models, model, steps=8))
    assert last_run()["skipped"] == 0


def test_results_and_random_state_are_those_without_it(pack, models, patcher, clean) -> None:
    """To the bit, weights and attributes of the model included."""
    from tools.oracles import assert_untouched, footprint

    model = compiled(patcher)
    wanted = models.sample(model, 136, 120, steps=2)
    before = footprint(patcher.model.diffusion_model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    warm(pack, model)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert_untouched(patcher.model.diffusion_model, before)
    assert torch.equal(models.sample(model, 136, 120, steps=2), wanted)


def test_vae(pack, models, patcher, clean) -> None:
    from anyshape.accel.families.vae import compile_vae

    vae, message = compile_vae(models.vae(torch.float32, ch=32, num_res_blocks=1))
    assert message == ""
    report = warm(pack, compiled(patcher), "64x96 batch 2\n72x64", vae=vae)
    assert ran("vae").keys() == {(64, 96, 2), (72, 64, 1)}
    assert report.count("VAE decode") == report.count("VAE encode") == report.count("model") == 2
    with torch.inference_mode():
        nothing_new(lambda: (vae.decode(torch.randn(2, 4, 12, 8)), vae.encode(torch.rand(1, 64, 72, 3))))


def test_what_is_not_compiled_passes_through(pack, models, patcher, clean) -> None:
    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    report = warm(pack, patcher, "64x64", vae=vae)
    assert "connect Compile Model before Warm Up: nothing to warm up" in report
    assert "this VAE does not come from Compile VAE" in report and shapes() == []
    assert "connect Compile Model before Warm Up" in warm(pack, compiled(patcher, mode="off"), "64x64")


def test_bad_lines_with_good_ones(pack, patcher, clean) -> None:
    report = warm(pack, compiled(patcher), "65x71\n64x64\n1024y1152\n70x64 batch 0")
    assert f"line 3: '1024y1152' - {FORMS}" in report and "line 4: '70x64 batch 0' - the batch is 0" in report
    assert "line 1: '65x71' - taken as 64x64" in report and ran().keys() == {(64, 64, 1)}
    assert "no size to warm up" in warm(pack, compiled(patcher), "# none\n")


def test_a_long_list_of_bad_lines_is_told_in_short(pack, patcher, clean) -> None:
    """Every open browser gets what a node says, and the log has it too."""
    from anyshape.accel.families.warming import warm_up

    done = warm_up(compiled(patcher), "64x64\n" + "no size\n" * 10_000)
    assert (done.listed, done.ready, done.bad) == (1, 1, 10_000)
    assert done.line.splitlines()[0] == "1 of 1 sizes ready"
    assert done.line.splitlines()[5:] == [done.warnings[4], "and 9,995 more entries are no sizes"]
    assert len(done.warnings) == 6 and len(done.line) < 1000 and len(done.report) < 1200


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_eager_is_measured_beside_ours(pack, models, fresh, clean, monkeypatch, mode) -> None:
    """On another clone of the same model: nothing is recorded for it, counted as a call, or left in place."""
    from anyshape.accel import gain
    from anyshape.accel.families.warming import warm_up

    monkeypatch.setattr(gain, "can_gain", lambda: True)
    fast = compiled(fresh, mode=mode)
    wanted = models.sample(fresh, width=64, height=64, seed=1, steps=2)
    done = warm_up(fast, "64x64\n72x64", measure=True)
    head, *rows = done.report.splitlines()
    x = head.split().index("x")
    for shape, row in zip(shapes(), rows, strict=True):
        assert shape["calls"] == 3 and shape["eager_ms"] > 0
        assert shape["factor"] == pytest.approx(shape["eager_ms"] / shape["median_ms"], rel=0.01)
        assert shape["saved_seconds"] < 0  # what is made ahead only costs, so far
        assert float(row.split()[x]) == pytest.approx(shape["factor"], abs=0.006)  # that is rounded, too
    assert fallbacks() == [] and error(models.sample(fast, width=64, height=64, seed=1, steps=2), wanted) < 1e-4
    assert sum(shape["calls"] for shape in shapes()) == 3 + 3 + 2
    monkeypatch.undo()
    assert all(shape["factor"] is None for shape in shapes())  # on a CPU nothing is gained


@pytest.mark.gpu
def test_the_gain_is_measured_on_a_gpu(pack, models, clean) -> None:
    """A model for which the host is the limit: its graph is faster, by what a clock around both says as well."""
    import time

    from anyshape.accel.families.warming import warm_up

    from tools.driving import SMALL_UNET

    patcher = models.unet("sd15", torch.float16, **SMALL_UNET)
    fast = compiled(patcher)
    warm_up(fast, "256x256", measure=True)
    (shape,) = shapes()

    def seconds(model) -> float:
        settings = {"width": 256, "height": 256, "seed": 1, "steps": 20}
        models.sample(model, **settings)
        torch.cuda.synchronize()
        started = time.perf_counter()
        models.sample(model, **settings)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    assert shape["factor"] > 1.2 and seconds(patcher) > seconds(fast)


def test_what_is_ready_is_counted(pack, models, patcher, clean) -> None:
    from anyshape.accel.families.warming import warm_up

    counted = [
        (done.listed, done.ready, done.bad)
        for done in (
            warm_up(compiled(patcher), "64x64, 72x64\n16384x16384 batch 4096\nx"),
            warm_up(patcher, "64x64"),
            warm_up(compiled(patcher), "x"),
            warm_up(compiled(patcher), ""),
        )
    ]
    assert counted == [(3, 2, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0)]
    assert warm_up(compiled(patcher), "x").line.startswith("no size is ready\nline 1: 'x' - write")


def test_a_size_that_cannot_fit_is_not_tried(pack, patcher, clean) -> None:
    report = warm(pack, compiled(patcher), "64x64\n16384x16384 batch 4096")
    assert "not run" in report.splitlines()[1] and "make it smaller" in report.splitlines()[1]
    assert ran().keys() == {(64, 64, 1)}


@pytest.mark.parametrize("raised", [RuntimeError("boom"), torch.OutOfMemoryError("short")], ids=str)
def test_a_size_that_fails_costs_no_other(pack, models, patcher, clean, raised) -> None:
    """ComfyUI's own forward fails at one size; the report and the counters say which."""
    model = compiled(patcher)

    def fail(executor, x, *args, **kwargs):
        if x.shape[-1] == 16:
            raise raised
        return executor(x, *args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", fail)
    report = warm(pack, model)
    (failed,) = [line for line in report.splitlines() if "128x128" in line]
    assert "failed" in failed and ("out of memory" in failed or "boom" in failed)
    assert ran().keys() == LISTED - {(128, 128, 1)}
    assert [f["where"] for f in fallbacks()] == ["Warm Up"]


def test_an_interrupt_ends_it(pack, models, patcher, clean, monkeypatch) -> None:
    """Between two sizes, by ComfyUI's own button; a later prompt is as ever."""
    import comfy.model_management as mm
    import comfy.utils

    model, wanted = compiled(patcher), models.sample(patcher, 136, 120, steps=2)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *_, **__: mm.interrupt_current_processing())
    with pytest.raises(mm.InterruptProcessingException):
        warm(pack, model)
    mm.interrupt_current_processing(False)
    assert ran().keys() == {(128, 128, 1)} and fallbacks() == []
    monkeypatch.undo()
    assert error(models.sample(model, 136, 120, steps=2), wanted) < 1e-5


def test_progress(pack, patcher, clean, monkeypatch) -> None:
    import comfy.utils

    seen = []
    every_progress(monkeypatch)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: seen.append((value, total)))
    warm(pack, compiled(patcher), "64x64\n72x64", cfg="both")
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failure_of_ours_costs_nothing(pack, patcher, clean, monkeypatch) -> None:
    from anyshape.accel.families import warming

    monkeypatch.setattr(warming, "_in_order", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in warm(pack, compiled(patcher), "64x64")


# Any model --------------------------------------------------------------------------------------------------------


def made(name):
    """A tiny model of this kind, compiled, and the pixels and frames of one element of its latents."""
    from anyshape.accel.families.latents import latents_of

    from tools.architectures import patchers

    model = compiled(patchers.make(name))
    return model, latents_of(model.get_model_object("latent_format"))


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("WAN21_T2V", {"context": (256, 40), "frames": True}), ("Flux", {"context": (256, 40), "y": (24,)}),
        ("SD3", {"context": (256, 40), "y": (24,)}), ("QwenImage", {"context": (256, 40)}),
        ("LTXV", {"context": (256, 40), "attention_mask": (256,), "frames": True}), ("Flux2", {"context": (512, 40)}),
        ("HunyuanVideo", {"context": (256, 40), "y": (24,), "frames": True}), ("ZImage", {"context": (256, 40)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_any_model_without_a_prompt(pack, clean, name, prompt) -> None:
    """Its latents, and a prompt of the widths that it takes, which nobody has written down here."""
    model, latents = made(name)
    wanted, video = dict(prompt), prompt.get("frames", False)
    wanted.pop("frames", None)
    report = warm(pack, model, "128x128x9" if video else "128x128")
    (shape,) = shapes()
    size = latents.size(latents.shape(128, 128, 1, 9 if video else 1))
    assert (shape["width"], shape["height"], shape["frames"]) == size
    found = dict(re.findall(r"(\w+)\[\d+x([\dx]+)\]", shape["key"]))
    assert {part: found[part] for part in wanted} == {p: "x".join(map(str, s)) for p, s in wanted.items()}
    assert ("y" in found, "attention_mask" in found) == ("y" in wanted, "attention_mask" in wanted)
    assert "failed" not in report and "not run" not in report and shape["state"] == FUSED


def test_a_model_that_no_plain_prompt_fits(pack, clean) -> None:
    """HiDream wants the outputs of several text encoders."""
    model, _ = made("HiDream")
    (line,) = warm(pack, model, "128x128").splitlines()[1:]
    assert "not run" in line and "connect positive: no plain prompt fits this model" in line
    assert shapes() == [] and fallbacks() == []


def test_asking_for_a_prompt_leaves_nothing_behind(pack, clean) -> None:
    """To the bit; and wrappers and random state are as they were."""
    from anyshape.accel.families.plain_prompt import plain_prompt

    from tools.oracles import assert_untouched, footprint

    model, latents = made("SD3")
    with torch.inference_mode():
        plain_prompt(model, latents)  # ComfyUI loads the model, which leaves its own marks
    before, state = footprint(model.model.diffusion_model), torch.get_rng_state()
    with torch.inference_mode():
        (((text, more),), problem) = plain_prompt(model, latents)
    assert (text.shape, more["pooled_output"].shape, problem) == ((1, 256, 40), (1, 24), "")
    assert_untouched(model.model.diffusion_model, before)
    assert torch.equal(torch.get_rng_state(), state) and shapes() == []


def test_frames_are_for_video_and_sizes_for_pictures(pack, clean) -> None:
    flux, _ = made("Flux")
    report = warm(pack, flux, "128x128 9 frames\n64x64").splitlines()
    assert "not run" in report[1] and "this model makes single images: leave the frames out of" in report[1]
    assert ran().keys() == {(64, 64, 1)}
    sound, latents = made("StableAudio")
    assert latents is None
    assert "makes neither images nor video" in warm(pack, sound, "128x128")


def test_a_third_number_is_the_batch_where_there_are_no_frames(pack, patcher, clean) -> None:
    report = warm(pack, compiled(patcher), "64x64x2\n64x64 batch 2\n72x64x5000")
    assert "64x64x2 - taken as 2 images: this model makes no video" in report
    assert ran().keys() == {(64, 64, 2)} and report.count("makes single images: leave the frames out") == 1


def test_what_a_models_latents_cannot_have_is_rounded_and_said(pack, clean) -> None:
    wan, _ = made("WAN22_T2V")  # 16 pixels, and 4 frames after the first
    report = warm(pack, wan, "136x120x8 batch 2")
    assert "taken as 128x112x5 batch 2, the next size below that this model's latents have" in report
    (shape,) = shapes()
    assert (shape["width"], shape["height"], shape["frames"], shape["batch"]) == (128, 112, 5, 2)


@pytest.mark.parametrize(
    ("format_name", "node", "given"),
    [
        ("Wan21", "nodes_hunyuan.EmptyHunyuanLatentVideo", {"width": 848, "height": 480, "length": 33}),
        ("Mochi", "nodes_mochi.EmptyMochiLatentVideo", {"width": 848, "height": 480, "length": 25}),
        ("LTXV", "nodes_lt.EmptyLTXVLatentVideo", {"width": 768, "height": 512, "length": 97}),
        ("Cosmos1CV8x8x8", "nodes_cosmos.EmptyCosmosLatentVideo", {"width": 1280, "height": 704, "length": 121}),
        ("HunyuanVideo15", "nodes_hunyuan.EmptyHunyuanVideo15Latent", {"width": 848, "height": 480, "length": 33}),
        ("Flux2", "nodes_flux.EmptyFlux2LatentImage", {"width": 1000, "height": 1024}),
        ("HunyuanImage21", "nodes_hunyuan.EmptyHunyuanImageLatent", {"width": 2048, "height": 1056}),
        ("SD3", "nodes_sd3.EmptySD3LatentImage", {"width": 1016, "height": 720}),
    ],
    ids=str,
)  # fmt: skip
def test_latents_are_those_of_comfyuis_nodes(models, format_name, node, given) -> None:
    import importlib

    import comfy.latent_formats
    from anyshape.accel.families.latents import latents_of

    module, name = node.split(".")
    made_by_node = getattr(importlib.import_module(f"comfy_extras.{module}"), name).execute(**given, batch_size=2)
    found = latents_of(getattr(comfy.latent_formats, format_name)())
    shape = found.shape(given["width"], given["height"], 2, given.get("length", 1))
    assert shape == tuple(made_by_node.args[0]["samples"].shape)
    width, height, frames = found.size(shape)
    assert 0 <= given["width"] - width < found.pixels and 0 <= given["height"] - height < found.pixels
    assert frames == given.get("length", 1)


# The budget -------------------------------------------------------------------------------------------------------


def budget(pins):
    """What the node thinks of a budget of 100 MiB."""
    from anyshape.accel.families import warming

    return warming._Budget(torch.device("cpu"), 100 << 20, pins)


def test_a_graph_that_did_not_fit_ends_the_warm_up(pack) -> None:
    from anyshape.accel.graphs import Pins

    assert budget(Pins()).is_spent() == ""
    assert "graph_budget_mb (100) is full" in budget(Pins(full=True)).is_spent()


def test_a_graph_that_is_gone_is_said(pack, monkeypatch) -> None:
    from anyshape.accel.families import warming
    from anyshape.accel.size_list import Row, Shape

    monkeypatch.setattr(warming.graphs, "held", lambda _: {("UNet", "there"): 1})
    rows = [Row(Shape(64, 64), "model", "graph", keys=frozenset({("UNet", key)})) for key in ("gone", "there")]
    assert [row.state for row in budget(None).settled(rows)] == ["evicted", "graph"]
    assert "memory ran short" in rows[0].why and not rows[1].why


def test_pins_end_with_the_warm_up(pack, patcher) -> None:
    from anyshape.accel import graphs

    warm(pack, compiled(patcher), "64x64")
    assert graphs.cache(patcher.load_device)._pins is None
