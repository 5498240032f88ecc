"""Soak: random prompts one after another in one process, each compared with eager.

python -m bench.soak [--model demo|small|sd15|sdxl|zimage|wan] [--prompts 500] [--seed 0] [--start N | --only N]
    [--rounds 1] [--limit S] [--partly] [--dynamic] [--mode MODE] [--budget MB] [--patch adapter] [--json FILE]

A prompt draws its size (odd latents too), batch, sampler, steps, CFG, prompts by area and time, LoRAs (of the model or
of one prompt, which ComfyUI writes into the weights while it samples), a mask, a ControlNet, another pack's patch, Skip
Blocks, Compile Model's settings and Compile VAE; whether it is broken off first by the user or by a patch that fails;
whether models are unloaded or built again. It is sampled in eager as well, with the same skipping on plain eager
pieces. What must hold: the latent and the picture are eager's (``soak_checks`` says how near), nothing compiles again,
nothing falls back unexpectedly, every call is counted, nothing is left on the shared models; every so many prompts
memory is where it was, while models run and after they were unloaded, and a picture in eager is what it was to the bit.
zimage and wan: those transformers with few and narrow blocks, the second one's videos too, also with quantised weights
(zimage-int8).

``--seed`` names the sequence: ``--only N`` runs its prompt N alone, ``--start N`` begins with it. A prompt that fails
is told with its line, and the run goes on; the exit code is 1 then. On a CPU use demo or small.

Libraries keep a plan for each size that they met, in eager too. ``--rounds 2`` runs the same prompts once more: then
the process' memory may hardly grow. ``--partly``: some prompts find room for a part of the model's weights alone.
``--dynamic``: so too, with ComfyUI's DynamicVRAM, as most people have it. ``--mode off`` and ``--budget 0`` show if a
failure needs our programs, or their graphs. ``--patch adapter``: each prompt has an adapter's patches (UNets), with
one of four images.
"""

import sys

from tools import dynamic_vram, embed

DYNAMIC = "--dynamic"
if DYNAMIC in sys.argv:  # its library must be there before ComfyUI is imported
    dynamic_vram.start()
else:
    embed.use_comfyui()
    embed.load_pack()
embed.load_demo()

import argparse  # noqa: E402
import gc  # noqa: E402
import itertools  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import weakref  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from anyshape.accel import stats  # noqa: E402
from comfy.model_management import InterruptProcessingException  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import measure, models  # noqa: E402
from bench import soak_checks as checks  # noqa: E402
from bench.product import compile_vae  # noqa: E402
from bench.soak_parts import NAMES, Parts, Way, failing, known, sample, scope, trembling  # noqa: E402
from bench.soak_prompts import ADAPTER, INTERRUPT, PATCHES, Prompt, Scope, draw  # noqa: E402

CANARY = {"index": -1, "width": 136, "height": 120, "images": 1, "sampler": "euler", "steps": 2, "cfg": 7.0}
PROGRESS = 25  # prompts from one line to the next


@dataclass
class Report:
    """What came of the prompts so far."""

    failed: list[dict[str, Any]] = field(default_factory=list)  # index, line, problems
    prompts: int = 0
    steps: int = 0
    worst_error: float = 0.0  # of a latent
    worst_share: float = 0.0  # of a latent's bound
    worst_picture: float = 0.0
    not_finite: int = 0  # latents that eager could not compute either
    other_steps: int = 0  # prompts whose ways skipped another number of steps
    beyond_floor: int = 0  # latents whose bound had to be measured
    calls: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    broken_off: int = 0
    unloads: int = 0
    rebuilds: int = 0
    memory: list[dict[str, int]] = field(default_factory=list)  # MiB, at every look

    def line(self, seconds: float) -> str:
        """For the person who waits."""
        return (
            f"{self.prompts} prompts in {seconds:.0f} s, {len(self.failed)} failed; worst latent "
            f"{self.worst_error:.1e} ({self.worst_share:.0%} of its bound), worst picture "
            f"{self.worst_picture:.1e}; {self.states}"
        )


class Soak:
    """The models, and what has been found. dynamic: with DynamicVRAM. fixed: of each prompt, whatever is drawn."""

    def __init__(self, name: str, seed: int, scope: Scope, dynamic: bool = False, **fixed: Any) -> None:
        self.seed, self.scope, self.fixed, self.report = seed, scope, fixed, Report()
        self.parts = Parts(name, len(scope.shares) > 1, dynamic)
        self.later = checks.LATER if self.parts.rounding else 0  # kernels that may still be compiled
        self.canary: Tensor | None = None
        self.first: dict[str, int] = {}
        self.settled = False  # every size that comes was there before

    def run(self, indices: range, limit: float = float("inf"), rounds: int = 1) -> Report:
        """Runs these prompts of the sequence ``rounds`` times, for ``limit`` seconds at most."""
        started = time.perf_counter()
        for turn, index in itertools.product(range(rounds), indices):
            if turn and index == indices[0]:
                self.first, self.settled = {}, True
            prompt = replace(draw(self.seed, index, self.scope), **self.fixed)
            # by how many have run: models are warm at the first look, wherever the run begins
            problems = self.attempt(prompt, look=(self.report.prompts + 1) % self.scope.every == 0)
            self.report.prompts += 1
            if problems:
                self.report.failed.append({"index": index, "line": prompt.line(), "problems": problems})
                print(f"FAILED {prompt.line()}", *problems, sep="\n    ", flush=True)
            seconds = time.perf_counter() - started
            if self.report.prompts % PROGRESS == 0:
                print(self.report.line(seconds), flush=True)
            if seconds > limit:
                break
        return self.report

    def attempt(self, prompt: Prompt, look: bool = False) -> list[str]:
        """What is wrong with a prompt, and after it. look: at memory and at the shared models."""
        try:
            with torch.inference_mode():
                problems = list(self._prompt(prompt))
                if look:
                    problems += self._look()
        except Exception:  # noqa: BLE001  the run is to go on, and the report to say what happened
            problems = [traceback.format_exc()]
        return problems

    def _prompt(self, prompt: Prompt) -> Iterator[str]:
        if prompt.rebuild:
            yield from self._rebuild()
        if prompt.unload == "before":
            checks.unload()
        counters = checks.Counters()
        latent = self._latent(prompt)
        eager, fast = (self.parts.way(prompt, fast) for fast in (False, True))
        full: set[int] = set()  # steps of each run

        def sampled(way: Way) -> Tensor:
            out = sample(way, prompt, latent)
            if prompt.skip:
                full.add(stats.snapshot()["skip"][-1]["full"])
            return out

        with self.parts.room(prompt.share):
            if prompt.patch and prompt.skip:  # while a patch turns out to keep something, fewer steps are skipped
                sample(fast, prompt, latent)
            if prompt.eager_first:
                wanted = sampled(eager)
            if prompt.unload == "between":
                checks.unload()
            if prompt.stop:
                yield from self._broken_off(prompt, fast, latent)
            outs = [sampled(fast) for _ in range(1 + prompt.twice)]
            if not prompt.eager_first:
                wanted = sampled(eager)
            if prompt.share < 1 and len(full) > 1:
                # Features of ComfyUI's own forward, from which weights are streamed, do not serve a tape: where weights
                # come to fit in mid-run, more steps are full, and the picture is another one.
                self.report.other_steps += 1
                if wanted.isfinite().all() and not all(out.isfinite().all() for out in outs):
                    yield "the latent is not finite, and eager's is"
            else:
                yield from self._latents(prompt, eager, outs, wanted, latent)  # which may call eager's way again
        engines = (fast.calls[0] if prompt.skip or prompt.mode != "off" else 0) + (eager.calls[0] if prompt.skip else 0)
        yield from self._pictures(prompt, outs[-1])
        yield from self._counted(prompt, counters, engines)
        yield from checks.altered(self.parts.modules())

    def _latent(self, prompt: Prompt) -> Tensor:
        """What sampling starts from: zeros, or a random picture's latent."""
        size = prompt.width, prompt.height, prompt.images, prompt.frames
        zeros = models.empty_latent(self.parts.patcher, *size)
        if prompt.denoise == 1.0:
            return zeros
        generator, video = torch.Generator().manual_seed(prompt.seed), zeros.ndim == 5
        small = torch.rand(prompt.frames if video else prompt.images, 3, 4, 4, generator=generator)
        picture = torch.nn.functional.interpolate(small, (prompt.height, prompt.width), mode="bilinear")
        latent = self.parts.vae.encode(picture.movedim(1, -1))
        return latent.expand(zeros.shape).clone() if video else latent

    def _broken_off(self, prompt: Prompt, fast: Way, latent: Tensor) -> Iterator[str]:
        """A first try that the user or another pack's patch ends at a step."""
        at, what, step = prompt.stop.step, InterruptProcessingException, [0]
        way = replace(fast, patcher=fast.patcher.clone())

        def callback(done: int, *_: Any) -> None:
            step[0] = done + 1
            if prompt.stop.how == INTERRUPT and done == at:
                raise InterruptProcessingException

        if prompt.stop.how != INTERRUPT:
            what = RuntimeError
            failing(way.patcher, lambda: step[0] >= at, checks.FAILED)
        self.report.broken_off += 1
        try:
            sample(way, prompt, latent, callback)
        except what as error:
            if what is RuntimeError and checks.FAILED not in str(error):
                raise
        else:
            yield f"{prompt.stop.how} at step {at} did not end the run"

    def _latents(self, prompt: Prompt, eager: Way, outs: list[Tensor], wanted: Tensor, latent: Tensor) -> Iterator[str]:
        """Whether each latent is near enough to eager's."""
        dtype = self.parts.dtype
        if not wanted.isfinite().all():  # random weights in half precision: nothing to compare with
            self.report.not_finite += 1
            return
        found, bound = max(_distance(out, wanted) for out in outs), checks.FLOOR[dtype]
        if found > bound:
            self.report.beyond_floor += 1
            moved = sample(trembling(eager, checks.FORWARD[dtype], self.parts.rounding), prompt, latent)
            bound = max(bound, _distance(moved, wanted) * (checks.RANDOM if self.parts.rounding else 1))
        if not found <= bound:
            yield f"the latent is {found:.2e} from eager's, and {bound:.2e} are allowed"
        self.report.worst_error = max(self.report.worst_error, found)
        self.report.worst_share = max(self.report.worst_share, found / bound)
        self.report.steps += prompt.steps * len(outs)

    def _pictures(self, prompt: Prompt, latent: Tensor) -> Iterator[str]:
        """Whether Compile VAE decodes and encodes as the VAE itself does."""
        if not prompt.vae:
            return
        latent = latent.nan_to_num(0.0, 1.0, -1.0)
        plain, (fast, message) = self.parts.vae, compile_vae(self.parts.vae)
        picture = plain.decode(latent)
        allowed = checks.PICTURE[plain.vae_dtype]
        frames = picture[0] if picture.ndim == 5 else picture  # of one video
        found = max(_distance(fast.decode(latent), picture), _distance(fast.encode(frames), plain.encode(frames)))
        self.report.worst_picture = max(self.report.worst_picture, found)
        if message or not found <= allowed:
            yield f"the VAE's result is {found:.2e} from eager's, {allowed:.1e} are allowed; {message}"

    def _counted(self, prompt: Prompt, counters: checks.Counters, engines: int) -> Iterator[str]:
        """Whether the counters say what they should."""
        counted, report = counters.read(), self.report
        yield from checks.complaints(prompt, counted, self.later)
        self.later -= min(self.later, counted.recompiles)
        if counted.calls.get("model", 0) != engines:
            yield f"the model was called {engines} times, and {counted.calls.get('model', 0)} calls were counted"
        if bool(counted.calls.get("vae")) != prompt.vae:
            yield f"Compile VAE is {prompt.vae}, and {counted.calls.get('vae', 0)} calls were counted"
        for name in ("calls", "states", "fallbacks"):
            setattr(report, name, checks.summed(getattr(report, name), getattr(counted, name)))
        report.skipped += counted.skipped
        report.unloads += bool(prompt.unload)

    def _rebuild(self) -> Iterator[str]:
        """Frees the models and builds them again."""
        held = [weakref.ref(module) for module in self.parts.modules()]
        checks.unload()
        how, self.parts = (self.parts.name, self.parts.partly, self.parts.dynamic), None
        gc.collect()
        yield from (f"a freed {type(module()).__name__} is still held" for module in held if module() is not None)
        self.parts = Parts(*how)
        self.report.rebuilds += 1

    def _look(self) -> Iterator[str]:
        """At memory, and at the shared models: a picture in eager is the one that it always was, to the bit."""
        now = checks.memory()
        if self.report.memory or not self.parts.dynamic:  # where a layer's tensors are made when it first runs
            self.first = self.first or now
            yield from checks.grown(self.first, now, checks.weight_bytes(self.parts.modules()), self.settled)
        self.report.memory.append({name: value >> 20 for name, value in now.items()})
        with torch.backends.cudnn.flags(deterministic=True):
            prompt = replace(
                draw(0, 0, self.scope), **CANARY, seed=0, denoise=1.0, conds="one", tokens=77, loras=(), control=None,
                hook=None, masked=False, patch="", skip=None,
            )  # fmt: skip
            latent = sample(self.parts.way(prompt, fast=False), prompt, self._latent(prompt))
            picture = self.parts.vae.decode(latent)
        if self.canary is None:
            self.canary = picture
        if not torch.equal(picture, self.canary):
            yield f"a picture in eager is no longer what it was: {_distance(picture, self.canary):.2e} away"


def _distance(out: Tensor, reference: Tensor) -> float:
    """The relative L2; infinite where a value is not finite."""
    return measure.relative_error(out, reference) if out.isfinite().all() else float("inf")


def arguments() -> argparse.Namespace:
    """The command line."""
    cuda = torch.cuda.is_available()
    parser = measure.options(__doc__.splitlines()[0])
    parser.add_argument("--model", default="sdxl" if cuda else "demo")
    parser.add_argument("--prompts", type=int, default=500 if cuda else 40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="begin with this prompt of the sequence")
    parser.add_argument("--only", type=int, help="this prompt of the sequence alone")
    parser.add_argument("--rounds", type=int, default=1, help="how many times the prompts run")
    parser.add_argument("--list", action="store_true", help="print the sequence and end")
    parser.add_argument("--partly", action="store_true", help="a part of the weights alone fits for some prompts")
    parser.add_argument(DYNAMIC, action="store_true", help="the same with DynamicVRAM")
    parser.add_argument("--mode", choices=("auto", "exact", "off"), help="of Compile Model, for each prompt")
    parser.add_argument("--budget", type=int, help="of its graphs, MB, for each prompt")
    parser.add_argument("--patch", choices=(*PATCHES, ADAPTER), help="of another pack, for each prompt")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no prompt begins")
    chosen = parser.parse_args()
    if not known(chosen.model):
        parser.error(f"unknown model {chosen.model}; there are {', '.join(NAMES)}, and forms of weights: zimage-int8")
    if chosen.patch and not scope(chosen.model, cuda).controls:
        parser.error(
            f"--patch {chosen.patch} is for UNets, and {chosen.model} is none: choose demo, small, sd15 or sdxl"
        )
    chosen.partly |= chosen.dynamic
    if chosen.partly and not cuda:
        parser.error("--partly needs a GPU")
    return chosen


def main() -> int:
    """Prints what fails, and a line now and then; writes the JSON. The exit code: 1 if a prompt failed."""
    chosen = arguments()
    drawn = scope(chosen.model, torch.cuda.is_available(), chosen.partly, chosen.dynamic)
    start, count = (chosen.start, chosen.prompts) if chosen.only is None else (chosen.only, 1)
    indices = range(start, start + count)
    if chosen.list or chosen.only is not None:
        print(*(draw(chosen.seed, index, drawn).line() for index in indices), sep="\n", flush=True)
    if chosen.list:
        return 0
    took: dict[str, float] = {}
    with measure.seconds(took, "seconds"):
        given = {"mode": chosen.mode, "budget_mb": chosen.budget, "patch": chosen.patch}
        fixed = {name: value for name, value in given.items() if value is not None}
        soak = Soak(chosen.model, chosen.seed, drawn, chosen.dynamic, **fixed)
        report = soak.run(indices, chosen.limit, chosen.rounds)
    print(report.line(took["seconds"]), flush=True)
    what = {"model": chosen.model, "seed": chosen.seed, "partly": chosen.partly, "dynamic": chosen.dynamic}
    measure.write(chosen.json, {**what, **took, **vars(report)})
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
