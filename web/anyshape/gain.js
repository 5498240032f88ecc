/** How much faster than ComfyUI, and of which sizes that is said. Pure, as format.js. */

import { fill } from "./phrases.js";

export const SCOPES = ["prompt", "workflow", "all"];
const NEAR = [0.9, 1.1]; // factors with two digits, so that a loss is seen to be one

export const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

/**
 * {factor, saved: seconds} of the sizes where ComfyUI's own forward was measured too, by how often each ran; null if
 * there is none. Nothing is ever said of what ran as ComfyUI runs it: the server gives it no factor.
 */
export function gain(shapes) {
  const known = shapes.filter((s) => s.factor > 0);
  if (!known.length) return null;
  const [eager, ours] = ["eager_ms", "median_ms"].map((name) => sum(known, (s) => s.calls * s[name]));
  return { factor: eager / ours, saved: sum(known, (s) => s.saved_seconds) };
}

/** The factor of full steps alone, where Skip Blocks skipped some; null where none was, or no full step's is known. */
export function ofFullSteps(shapes) {
  const skipped = shapes.some((s) => s.step === "skipped" && s.factor > 0);
  return skipped ? (gain(shapes.filter((s) => s.step === "full"))?.factor ?? null) : null;
}

/** What the factor of these sizes compares, where Skip Blocks skipped steps; "" elsewhere. */
export function stepsText(shapes, words) {
  const full = ofFullSteps(shapes);
  return full ? fill(words.gain.steps, { factor: times(full) }) : "";
}

/** What the factor of one size compares, or why there is none. */
export function factorHelp(s, device, words) {
  if (s.factor > 0) return s.step ? words.gain[s.step] : "";
  if (s.state === "eager") return s.step === "skipped" ? words.gain.streamed : words.gain.as_comfyui;
  if (device === "cpu" && !s.step) return words.gain.cpu;
  return s.eager_ms > 0 ? words.gain.one_call : words.gain.not_known;
}

/** "1.4x"; "–" of none. */
export const times = (factor) =>
  factor > 0 ? `${factor.toFixed(factor > NEAR[0] && factor < NEAR[1] ? 2 : 1)}x` : "–";

/** Seconds with as many digits as they deserve, and minutes and hours of many. */
export function duration(seconds, words) {
  if (seconds >= 5400) return fill(words.units.h, { n: (seconds / 3600).toFixed(1) });
  if (seconds >= 90) return fill(words.units.min, { n: Math.round(seconds / 60) });
  return fill(words.units.s, { n: seconds.toFixed(seconds < 10 ? 1 : 0) });
}

/** Whether a factor is shown as a loss: never on a CPU, where the two times differ by chance. */
export const isLoss = (factor, device) => factor > 0 && factor < 1 && device !== "cpu";

/** "1.4x, 12 s saved", or "1.4x, 3 s lost so far" until the cost of the first calls is won back. */
export function gainText({ factor, saved }, words) {
  const time = duration(Math.abs(saved), words);
  return [times(factor), fill(saved < 0 ? words.gain.lost : words.gain.saved, { time })].join(words.comma);
}

/** "preparing 512x512… 12 s". */
export const preparingText = (work, words) =>
  fill(words.preparing, { size: work.size.replaceAll("x", "×"), n: Math.floor(work.seconds) });

const latest = (model) => Math.max(0, ...model.shapes.map((s) => s.prompt ?? 0));

/** The model that ran last comes first. */
const newestFirst = (models) => [...models].reverse().sort((a, b) => latest(b) - latest(a));

/**
 * The stats of what a view is about: the sizes of the last prompt, those that any prompt of this workflow has used, or
 * everything. What is no size (runs with skipped blocks, what was not accelerated) goes with its model.
 */
export function scoped(stats, scope, workflow) {
  if (scope === "all") return { ...stats, models: newestFirst(stats.models) };
  const last = Math.max(0, ...stats.models.map(latest));
  const belongs = scope === "prompt" ? (s) => last > 0 && s.prompt === last : (s) => s.workflows?.includes(workflow);
  const models = stats.models
    .map((model) => ({ ...model, shapes: model.shapes.filter(belongs) }))
    .filter((model) => model.shapes.length);
  const names = new Set(models.flatMap((model) => [model.name, model.name.replace(/ #\d+$/, "")]));
  const isOf = (run) => (scope === "prompt" ? run.prompt === last : run.workflow === workflow);
  return {
    ...stats,
    models: newestFirst(models),
    fallbacks: stats.fallbacks.filter((f) => names.has(f.where)),
    skip: stats.skip.filter(isOf),
  };
}
