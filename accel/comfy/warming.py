"""Warm Up: makes the programs and graphs of listed sizes in advance, through ComfyUI's own sampling and VAE.

Each size is sampled for a few steps with the user's prompts, so that ComfyUI decides what meets the model: which
prompts are joined, what a ControlNet adds, where the weights lie. Nothing is kept but what the engines keep anyway.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management as mm
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from .. import devices, gain, graphs
from ..attempt import Judge, attempt, failed, named
from ..errors import is_out_of_memory
from ..reasons import say
from ..size_list import MIB, MORE_BAD, Outcome, Row, Shape, in_short, parse, table
from ..skip.features import RUN_KEY, SkipRun
from ..skip.schedule import FEW_STEPS
from ..stats import STATES, STATS
from ..times import rehearsal
from ..wording import speed_of_all
from . import lazy
from .attach import compile_model, session_of
from .latents import Latents, latents_of
from .plain_prompt import noise, plain_prompt
from .session import Session
from .skipping import skips, without_skipping
from .surroundings import INTERRUPTS

STEPS = 30  # of the noise schedule; few of them are evaluated
CFG = {"on": (4.0,), "off": (1.0,), "both": (4.0, 1.0)}  # at 1.0 ComfyUI leaves the negative prompt out
CFG_OPTIONS = ("auto", *CFG)
HOPELESS = 4  # times the device's memory, by ComfyUI's estimate, which is generous: not even tried
NOT_RUN, FAILED, EVICTED = "not run", "failed", "evicted"

NO_MODEL, NO_VAE, GONE = say("nothing_compiled"), say("vae_not_compiled"), say("warm_up_no_memory")
NO_PICTURES = "this model makes neither images nor video, so a size in pixels does not apply to it"
NO_FRAMES = "{} makes single images: leave the frames out of this line"
GAVE_WAY = say("gave_way")
NO_SIZES = "no size to warm up: write one per line"


@dataclass(frozen=True)
class _Job:
    """One size in one part of the workflow."""

    shape: Shape
    part: str
    work: int  # image pixels that a call may have to compute; the largest comes first
    needs: float  # bytes of memory, by ComfyUI's estimate
    device: torch.device
    run: Callable[[], Any]
    obstacle: str = ""  # why it cannot be run at all
    note: str = ""  # what the user should know of it
    eager: Callable[[], Any] | None = None  # the same on ComfyUI's own forwards, whose times are noted


def warm_up(
    model: ModelPatcher, text: str, vae: comfy.sd.VAE | None = None, positive: list | None = None,
    negative: list | None = None, cfg: str = "auto", measure: bool = False, gives_way: Callable[[], bool] = bool,
) -> Outcome:  # fmt: skip
    """Runs the sizes that ``text`` lists, and changes nothing else.

    measure: also on ComfyUI's own forwards, timed. gives_way: whether something else waits, so that no further size
    is begun.
    """
    shapes, problems = parse(text)
    bad = len(problems)
    problems = in_short(problems, MORE_BAD) if shapes or problems else [NO_SIZES]
    outcome, failure = attempt(
        lambda: _warmed(model, shapes, vae, (positive, negative), cfg, measure, gives_way),
        failed("Warm Up", "Warm Up"),
        INTERRUPTS,
    )
    shapes, rows, warnings = outcome or (shapes, [], [failure])
    warnings = [*problems, *warnings]
    notes = in_short([shape.note for shape in shapes if shape.note], "more sizes were rounded")
    report = "\n".join([*warnings, *notes, *([table(rows)] if rows else [])])
    ready = {row.shape for row in rows} - {row.shape for row in rows if row.state in (NOT_RUN, FAILED, EVICTED)}
    left = tuple(dict.fromkeys(row.shape for row in rows if row.why == GAVE_WAY))
    return Outcome(report, warnings, len(shapes), len(ready), bad, left)


def _warmed(
    model: ModelPatcher, shapes: list[Shape], vae: comfy.sd.VAE | None, prompts: tuple, cfg: str, measure: bool,
    gives_way: Callable[[], bool],
) -> tuple[list[Shape], list[Row], list[str]]:  # fmt: skip
    """(the sizes, a row a job, what to do). The VAE first: loading it later might unload the model's graphs."""
    session, jobs, warnings = session_of(model), [], []
    latents = latents_of(model.get_model_object("latent_format"))
    if session is not None and latents and not latents.frames:
        shapes = list(dict.fromkeys(shape.as_images() for shape in shapes))
    if vae is not None:
        if lazy.module("vae").is_compiled(vae):
            jobs += _vae_jobs(vae, shapes)
        else:
            warnings.append(NO_VAE)
    if session is None:
        warnings.append(NO_MODEL)
    else:
        timed = _timed(model, session) if measure else None
        jobs += _model_jobs(model, shapes, prompts, cfg, timed)
    limit = session.settings.graph_budget_bytes if session else 0
    with ExitStack() as stack:
        stack.enter_context(rehearsal())
        pins = stack.enter_context(graphs.cache(model.load_device).pinning())
        cards = [model.load_device] if devices.is_nvidia(model.load_device) else []
        stack.enter_context(torch.random.fork_rng(devices=cards))
        stack.enter_context(torch.inference_mode())
        rows = _in_order(jobs, lambda: GAVE_WAY if gives_way() else _spent(limit, pins))
        if pins.lost and not gives_way():
            rows = _captured_again(jobs, rows, model.load_device)
        return shapes, _settled(rows, model.load_device), warnings


def _timed(model: ModelPatcher, session: Session) -> ModelPatcher:
    """The model, and its ControlNets, on ComfyUI's own forwards, timed; every step in full."""
    return compile_model(without_skipping(model), replace(session.settings, timed=True))[0]


def _spent(limit: int, pins: graphs.Pins) -> str:
    """Why there is no room for another graph beside those of this warm-up, which must not push each other out."""
    return graphs.budget_is_full(limit) if pins.full else ""


def _settled(rows: list[Row], device: torch.device) -> list[Row]:
    """The rows, now that all has run: a graph may be gone."""
    held = graphs.held(device).keys()
    for row in rows:
        if row.keys - held:
            row.state, row.why, row.speed, row.told = EVICTED, GONE, "", ()
    return rows


def _in_order(jobs: Sequence[_Job], reason: Callable[[], str]) -> list[Row]:
    progress, rows = comfy.utils.ProgressBar(len(jobs)), []
    for job in jobs:
        mm.throw_exception_if_processing_interrupted()
        why = reason()
        rows.append(Row(job.shape, job.part, NOT_RUN, why=why) if why else _run(job))
        progress.update(1)
    return rows


def _captured_again(jobs: Sequence[_Job], rows: Sequence[Row], device: torch.device) -> list[Row]:
    """The rows once every size has a graph: a later size may have cost an earlier one its graph (``graphs``)."""
    found = []
    for job, row in zip(jobs, rows, strict=True):
        if row.keys - graphs.held(device).keys():
            mm.throw_exception_if_processing_interrupted()
            again = _run(replace(job, eager=None))
            row = replace(row if again.state == FAILED else again, seconds=row.seconds + again.seconds)
        found.append(row)
    return found


def _run(job: _Job) -> Row:
    """Runs one job and says how the engines took it."""
    if job.obstacle:
        return Row(job.shape, job.part, NOT_RUN, why=job.obstacle)
    total = mm.get_total_memory(job.device)
    if job.needs > HOPELESS * total:
        why = f"needs about {job.needs / MIB:.0f} MB, and the device has {total / MIB:.0f}: make it smaller"
        return Row(job.shape, job.part, NOT_RUN, why=why)
    before, started = _calls(), time.perf_counter()
    _, failure = attempt(job.run, _judge(job), INTERRUPTS)
    seconds = time.perf_counter() - started
    if job.eager and not failure:  # without memory for it there is no factor, and all else is as it was
        attempt(job.eager, _unmeasured(job), INTERRUPTS)
    if failure:
        mm.soft_empty_cache()
        return Row(job.shape, job.part, FAILED, seconds, why=failure)
    return _outcome(job, seconds, before)


def _judge(job: _Job) -> Judge:
    """One size that fails costs neither the others nor the prompt."""

    def judge(error: Exception) -> str:
        reason = f"{job.part} at {job.shape} could not be warmed up ({named(error)}); others were"
        if is_out_of_memory(error):
            reason = f"out of memory in {job.part} at {job.shape}; lower the size or the batch"
        STATS.fallback("Warm Up", reason)
        return reason

    return judge


def _unmeasured(job: _Job) -> Judge:
    def judge(error: Exception) -> str:
        reason = say("not_timed", shape=job.shape, error=named(error))
        STATS.fallback("Warm Up", reason)
        mm.soft_empty_cache()
        return reason

    return judge


def _calls() -> dict[tuple[str, str], int]:
    """How often each shape of each model has run."""
    return {(m["name"], s["key"]): s["calls"] for m in STATS.snapshot()["models"] for s in m["shapes"]}


def _outcome(job: _Job, seconds: float, before: dict[tuple[str, str], int]) -> Row:
    """The row of all programs that ran: full and skipped steps, a ControlNet's, prompts that were not joined."""
    now = STATS.snapshot()
    ran = [
        (m["name"], s) for m in now["models"] for s in m["shapes"] if s["calls"] > before.get((m["name"], s["key"]), 0)
    ]
    states = [s["state"] for _, s in ran]
    several = len({name for name, _ in ran}) > 1
    gained = gain.total(s for _, s in ran if s["step"] != "skipped").get("factor")  # it runs as many as full ones
    told = [(name if several else "", text) for name, s in ran for text in (s["reason"], s["note"]) if text]
    captured = frozenset((name, s["key"]) for name, s in ran if s["state"] == "graph")
    return Row(
        job.shape, job.part, max(states, key=STATES.index, default="eager"), seconds, sum(s["bytes"] for _, s in ran),
        job.note, gained, captured, speed_of_all((s for _, s in ran), now["device"]), tuple(dict.fromkeys(told)),
    )  # fmt: skip


# What runs --------------------------------------------------------------------------------------------------------


def _model_jobs(
    model: ModelPatcher, shapes: Iterable[Shape], prompts: tuple[list | None, list | None], cfg: str,
    timed: ModelPatcher | None = None,
) -> list[_Job]:  # fmt: skip
    latents, jobs = latents_of(model.get_model_object("latent_format")), []
    positive, negative, obstacle = _prompts(model, latents, *prompts) if latents else ([], [], NO_PICTURES)
    for scale in CFG.get(cfg, CFG["off" if _guides_itself(model) else "on"]):
        part, rows = ("model", 2) if scale > 1 else ("model, cfg 1", 1)
        for shape in shapes:
            why = obstacle or _no_frames(shape, latents, "this model")
            size = () if why else latents.shape(shape.width, shape.height, shape.batch, shape.frames)
            needs = 0 if why else model.memory_required([*size])
            run = partial(_sample, model, size, scale, positive, negative)
            eager = partial(_sample, timed, size, scale, positive, negative) if timed else None
            note = "" if why else _rounded(shape, latents)
            jobs.append(_Job(shape, part, rows * shape.pixels, needs, model.load_device, run, why, note, eager))
    return _largest_first(jobs)


def _guides_itself(model: ModelPatcher) -> bool:
    """Whether the model takes its guidance as an input, so that samplers run it at cfg 1 (Flux.1, HunyuanVideo)."""
    config = model.model.model_config.unet_config
    return bool(config.get("guidance_embed")) or config.get("image_model") == "flux"


def _rounded(shape: Shape, latents: Latents) -> str:
    """What is run in the place of a size that this model's latents cannot have."""
    width, height, frames = latents.size(latents.shape(shape.width, shape.height, shape.batch, shape.frames))
    made = Shape(width, height, shape.batch, frames)
    return "" if made == shape else f"taken as {made}, the next size below that this model's latents have"


def _no_frames(shape: Shape, latents: Latents, what: str) -> str:
    return NO_FRAMES.format(what) if shape.frames > 1 and not latents.frames else ""


def _vae_jobs(vae: comfy.sd.VAE, shapes: Iterable[Shape]) -> list[_Job]:
    """Of a VAE of images or video. A video is encoded from its frames, one video at a time, as ComfyUI's nodes do."""
    latents, jobs = lazy.module("vae").latents_of(vae), []
    for shape in shapes:
        if latents is None:
            jobs.append(_Job(shape, "VAE", shape.pixels, 0, vae.device, tuple, say("no_pictures")))
            continue
        size = latents.shape(shape.width, shape.height, shape.batch, shape.frames)
        pictures = latents.size(size)[2] if latents.frames else shape.batch
        image = pictures, shape.height, shape.width, vae.output_channels
        needs = vae.memory_used_decode((1, *size[1:]), vae.vae_dtype)  # ComfyUI splits what does not fit
        why = _no_frames(shape, latents, "this VAE")
        for part, run in (("VAE decode", partial(_decode, vae, size)), ("VAE encode", partial(_encode, vae, image))):
            jobs.append(_Job(shape, part, shape.pixels, needs, vae.device, run, why))
    return _largest_first(jobs)


def _largest_first(jobs: Iterable[_Job]) -> list[_Job]:
    """So that the graphs' pool is as large as it will be from the first one on."""
    return sorted(jobs, key=lambda job: job.work, reverse=True)


def _decode(vae: comfy.sd.VAE, shape: tuple[int, ...]) -> None:
    vae.decode(noise(*shape))


def _encode(vae: comfy.sd.VAE, shape: tuple[int, ...]) -> None:
    vae.encode(noise(*shape).sigmoid_())  # values of an image, 0..1


def _sample(model: ModelPatcher, shape: tuple[int, ...], cfg: float, positive: list, negative: list) -> None:
    """A few steps of a run, as KSampler makes them. Random input: on constant images rounding is all there is.

    With Skip Blocks also of a run so short that nothing is skipped, which keeps nothing and is another program.
    """
    start = noise(*shape)
    for steps in (FEW_STEPS, STEPS) if skips(model) else (STEPS,):
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
        comfy.sample.sample_custom(
            model, start, cfg, comfy.samplers.KSAMPLER(_few_steps), sigmas, positive, negative,
            torch.zeros_like(start), disable_pbar=True, seed=0,
        )  # fmt: skip


def _few_steps(model: Callable[..., Tensor], x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], **_: Any) -> Tensor:
    """A sampler, by ComfyUI's protocol, that looks at some steps of the schedule and changes nothing."""
    run = extra_args["model_options"].get("transformer_options", {}).get(RUN_KEY)
    ones = x.new_ones(len(x))
    for step in steps_to_evaluate(run, len(sigmas) - 1):
        if run is not None:
            run.begin_step(step)
        model(x * (sigmas[step] / sigmas[0]), sigmas[step] * ones, **extra_args)
    return x


def steps_to_evaluate(run: SkipRun | None, count: int) -> list[int]:
    """The first, the middle and the last step: a ControlNet or a prompt may begin or end in between.

    Of a run that skips blocks, each time a full step and the skipped one behind it.
    """
    if run is None or not run.skips:
        return sorted({0, count // 2, count - 1})
    pairs = [step for step in sorted(run.full) if step + 1 < count and step + 1 not in run.full]
    chosen = {pairs[0], pairs[len(pairs) // 2], pairs[-1]}
    return sorted(chosen | {step + 1 for step in chosen} | {count - 1})


def _prompts(
    model: ModelPatcher, latents: Latents, positive: list | None, negative: list | None
) -> tuple[list, list, str]:
    """(positive, negative, why there are none or ""): one in place of the other, or plain ones without any."""
    plain, problem = ([], "") if positive or negative else plain_prompt(model, latents)
    return positive or negative or plain, negative or positive or plain, problem
