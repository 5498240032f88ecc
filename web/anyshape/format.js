/**
 * What is shown of the stats, as text and numbers. Pure: no page, no ComfyUI; tests/web runs it in Node.js.
 *
 * The stats are those of docs/scripts.md; `words` are the texts of locales/<language>/main.json.
 */

import { gain, gainText, isLoss, preparingText, stepsText, sum } from "./gain.js";
import { count, fill } from "./phrases.js";

const MIB = 1 << 20;
const LONGEST = 100; // characters of a line on a node, which shows as many as it is wide; the tooltip has all
const SHORTEST_BAR = 0.12; // of the longest; what is not 0 must be seen
const DECADE = 10;
const MUTED = 2; // of a node's `mode`, in every front end
const BYPASSED = 4;
const SKIP_BLOCKS = "AnyShapeSkipBlocks";
const FILE_OF = { AnyShapeCompileVAE: "vae", AnyShapeCompileControlNet: "controlnet" }; // of other nodes it is the MODEL's
const NAMED = 3; // sizes that a reason names; of more their number

export const seconds = (value) => value.toFixed(value < 10 ? 2 : 1);
export const milliseconds = (value) => (value > 0 ? value.toFixed(value < 100 ? 1 : 0) : "–");
export const megabytes = (bytes) => (bytes > 0 ? Math.max(1, Math.round(bytes / MIB)).toString() : "–");

/** Of an image "1024×1152", of a video "832×480×33": the frames come last. */
export const size = (s) => [s.width, s.height, ...(s.frames > 1 ? [s.frames] : [])].join("×");

/** Sizes that a user would count: width, height, frames and batch, however many lines a size has. */
export const sizes = (shapes) => new Set(shapes.map((s) => `${size(s)} ${s.batch}`)).size;

/** A size as one names it: "512×768", "512×768 ×4" for four a prompt. */
const sized = (s) => size(s) + (s.batch > 1 ? ` ×${s.batch}` : "");

/** The sizes that models ran at, as Warm Up's list has them: "512x768 batch 4", "832x480x33" for a video. */
export const listedSizes = (models) =>
  distinct(
    models
      .filter((model) => model.kind === "model")
      .flatMap((model) => model.shapes)
      .map((s) => size(s).replaceAll("×", "x") + (s.batch > 1 ? ` batch ${s.batch}` : "")),
  );

const distinct = (items) => [...new Set(items)];

/** How a size runs, in the words of users: "fast" | "partly" | "as_comfyui". On a CPU nothing is gained. */
export function speed(s, device) {
  if (s.state === "eager" || device === "cpu") return "as_comfyui";
  return s.reason ? "partly" : "fast";
}

/** What all models together come to; models without a call since the last clear count for their compilations only. */
export function totals(stats, words, language = "en") {
  const shapes = stats.models.flatMap((model) => model.shapes);
  const recompiles = sum(stats.models, (model) => model.recompiles);
  return {
    sizes: count(words.counts.sizes, sizes(shapes), language),
    recompiles: count(words.counts.recompiles, recompiles, language),
    seconds: seconds(sum(stats.models, (model) => model.compile_seconds)),
  };
}

/** The graphs' memory: {fraction of the budget, used MB, budget MB, evicted}; null where no graph has a budget. */
export function budget(graphs) {
  if (!graphs.budget_bytes) return null;
  return {
    fraction: Math.min(1, graphs.used_bytes / graphs.budget_bytes),
    used: Math.round(graphs.used_bytes / MIB),
    budget: Math.round(graphs.budget_bytes / MIB),
    evictions: graphs.evictions,
  };
}

export function shorten(text, longest = LONGEST) {
  return text.length <= longest ? text : `${text.slice(0, longest - 1).trimEnd()}…`;
}

/**
 * Each value's length as a bar, 0 to 1, by its logarithm: of 0.1, 1 and 10 each is as much longer as the next. The scale
 * is DECADE wide at least: what is nearly equal looks so.
 */
export function shares(values) {
  const positive = values.filter((value) => value > 0);
  const [least, most] = [Math.min(...positive), Math.max(...positive)];
  const width = Math.log(Math.max(most / least, DECADE));
  const of = (value) => 1 + Math.log(value / most) / width;
  return values.map((value) => (value > 0 ? SHORTEST_BAR + (1 - SHORTEST_BAR) * of(value) : 0));
}

/** Equal texts as one, with how many there are, in the order of the first: ["a", "b", "a"] -> ["a × 2", "b"]. */
export function together(texts) {
  const counted = new Map();
  for (const text of texts) counted.set(text, (counted.get(text) ?? 0) + 1);
  return [...counted].map(([text, n]) => (n > 1 ? `${text} × ${n}` : text));
}

/**
 * The entry of a node, if it has run: of its own workflow, or one that came without the name of its workflow in a prompt
 * that this page queued (the ids in `queued`): a script's nodes may have the same numbers. A node that ComfyUI took from
 * its cache ran in another workflow, a copy of this one, where it may have another id: the entry whose model the latest
 * prompt of this workflow ran, or the one that ran last, because ComfyUI's cache holds no older ones.
 */
export function entryOf(stats, { id, type, workflow, cached = false, queued = new Set() }) {
  const same = stats.nodes?.filter((entry) => entry.type === type) ?? [];
  const mine = same.filter((entry) => entry.id === id);
  const own = mine.find((entry) => entry.workflow === workflow) ?? mine.find((entry) => !entry.workflow && queued.has(entry.prompt));
  if (own || !cached) return own;
  const last = latest(stats.models.flatMap((model) => model.shapes), [workflow]);
  const names = new Set(stats.models.filter((model) => model.shapes.some((s) => last.includes(s))).map((model) => model.name));
  const ran = (entry) => entry.models.some((name) => names.has(name));
  return mine.filter(ran).at(-1) ?? mine.at(-1) ?? onlyOne(same.filter(ran));
}

/** The last of these entries, if all have the same model. */
const onlyOne = (found) => (distinct(found.map((entry) => entry.models.join())).length === 1 ? found.at(-1) : undefined);

/** The number of the latest prompt of `workflow` that called this size: 0 outside of prompts, -1 if none of them did. */
const promptOf = (s, workflow) => s.prompts?.[workflow] ?? (s.prompts && s.prompt ? -1 : (s.prompt ?? 0));

/** The sizes of the latest prompt of the first of these workflows that has called any; or those outside of prompts. */
function latest(shapes, workflows) {
  for (const workflow of workflows) {
    const newest = Math.max(...shapes.map((s) => promptOf(s, workflow)));
    if (newest > 0) return shapes.filter((s) => promptOf(s, workflow) === newest);
  }
  return shapes.filter((s) => promptOf(s) === 0);
}

/**
 * What a node shows of itself: {level: "none" | "off" | "preparing" | "fast" | "partly" | "as_comfyui", text, title,
 * loss: whether it is slower than ComfyUI}.
 * entry: of entryOf; undefined before the node's first run. mode: the node's, as the graph has it. workflow: the id of
 * the one that the node is in, which is not the entry's where ComfyUI took the node from its cache.
 */
export function badge(entry, stats, words, language = "en", mode = 0, workflow = entry?.workflow) {
  if (mode === MUTED) return plain("as_comfyui", words.badge.muted);
  if (mode === BYPASSED) return plain("off", words.badge.bypassed);
  if (!entry) return plain("none", words.badge.not_run);
  if (entry.models.includes(stats.preparing?.model)) return plain("preparing", preparingText(stats.preparing, words));
  if (entry.state === "off") return plain("off", words.badge.off);
  if (entry.ended) return plain("none", words.badge[entry.ended]);
  if (entry.sizes) return withMessage(warmed(entry.sizes, words, language), entry.message);
  if (entry.state === "eager") return asComfyUI(entry.message, stats, words);
  if (entry.instead) return asComfyUI(entry.instead, stats, words); // whatever ran before
  const models = stats.models.filter((model) => entry.models.includes(model.name));
  const all = models.flatMap((model) => model.shapes);
  const workflows = [workflow, entry.workflow];
  const shapes = latest(all, workflows);
  const skips = entry.type === SKIP_BLOCKS;
  const found = skips ? skipped(entry, workflows, shapes, all, stats, words) : ran(models, shapes, all, stats, words, language);
  return withMessage(found ?? plain("none", words.badge.ready), entry.message);
}

const plain = (level, text, title = text) => ({ level, text, title });
const withMessage = (shown, message) => (message ? { ...shown, title: `${shown.title}\n${message}` } : shown);

function asComfyUI(reason, stats, words) {
  const name = words.states.as_comfyui.title;
  const text = `${name}${words.colon}${inShort(reason, stats)}`;
  return plain("as_comfyui", reason ? shorten(text) : name, reason ? `${name}\n${reason}` : name);
}

/** Of Warm Up: what became of its list. */
function warmed({ listed, ready, bad }, words, language) {
  const wrong = bad ? [count(words.counts.bad, bad, language)] : [];
  const parts = listed || !bad ? [fill(words.badge.warmed, { ready, listed }), ...wrong] : wrong; // a node has room for one
  const level = !ready ? "as_comfyui" : ready < listed || bad ? "partly" : "fast";
  return plain(level, parts.join(words.comma));
}

/** The form of a reason for a node's line or a table's cell: what helps first. The text itself where it has none. */
export const inShort = (reason, stats) => reason.split("\n").map((line) => stats.shorts?.[line] ?? line).join(" ");

/** What is said of a shape: the reason why it does not run faster, and the note where nothing is missed. */
export const why = (s) => [s.reason, s.note].filter(Boolean);

/** Each reason of a table once: {reason, where}, where `where` is "512×512, 768×768: ", or "" if it holds for all. */
export function reasons(shapes, words, language = "en") {
  const all = distinct(shapes.map(sized));
  return distinct(shapes.flatMap(why)).map((reason) => {
    const found = distinct(shapes.filter((s) => why(s).includes(reason)).map(sized));
    if (found.length === all.length) return { reason, where: "" };
    const named = found.length > NAMED ? count(words.counts.sizes, found.length, language) : found.join(words.comma);
    return { reason, where: `${named}${words.colon}` };
  });
}

/** What ran slower and is in no table: what a size says of itself is not said again. */
export function fallbacks(stats) {
  const said = new Set(stats.models.flatMap((model) => model.shapes.map((s) => `${model.name} ${s.reason}`)));
  return stats.fallbacks.filter((f) => !said.has(`${f.where} ${f.reason}`));
}

/** name of an entry -> the file that its model is from, where a node knows it. */
export function files(stats) {
  const kinds = new Map((stats.models ?? []).map((model) => [model.name, model.kind]));
  const known = (stats.nodes ?? []).filter((one) => one.file);
  const isOf = (node) => (name) => (kinds.get(name) ?? "model") === (FILE_OF[node.type] ?? "model");
  return new Map(known.flatMap((one) => one.models.filter(isOf(one)).map((name) => [name, one.file])));
}

/** What an entry is called: "file (name)", or its name. */
export const title = (name, stats, words) => withFile(name, files(stats).get(name), words);

const withFile = (name, file, words) => (file ? fill(words.brackets, { text: file, more: inPlainWords(name, words) }) : inPlainWords(name, words));

/** "VAE decoder #2" in the page's language; a model's class is the same in all. */
const inPlainWords = (name, words) => name.replace(/^VAE \w+/, (part) => words.parts[part] ?? part);

/** The same of where something ran slower: an entry, or all of a class, which may have a file in common. */
export function place(name, stats, words) {
  const known = files(stats);
  const entries = stats.models.filter((model) => model.name === name || model.name.startsWith(`${name} #`));
  const found = distinct(entries.map((model) => known.get(model.name)));
  return withFile(name, found.length === 1 ? found[0] : undefined, words);
}

/** "sdxl (SDXL): sentence", for each rule in use that is less exact than ComfyUI's own rounding. */
export function inexact(stats, words) {
  const used = stats.models.filter((model) => model.shapes.length);
  const told = (model) => (model.inexact ?? []).map((sentence) => `${title(model.name, stats, words)}${words.colon}${sentence}`);
  return used.flatMap(told);
}

/** Of `shapes`, those of the latest prompt; the tooltip has what came before it, of all workflows. */
function ran(models, shapes, all, stats, words, language) {
  if (!shapes.length) return null;
  const device = stats.device;
  const levels = distinct(shapes.map((s) => speed(s, device)));
  const level = levels.length === 1 ? levels[0] : "partly";
  const recompiles = sum(models, (model) => model.recompiles);
  const why_not = distinct(shapes.flatMap(why));
  const reason = foremost(shapes);
  const name = words.states[level].title;
  const fast = shapes.filter((s) => speed(s, device) === "fast");
  const sized_by = levels.length === 1 ? listed(shapes, words, language) : ratio(fast, shapes, words);
  const counted = recompiles ? [count(words.counts.recompiles, recompiles, language)] : [];
  const claims = level === "as_comfyui" ? [] : shapes; // what Skip Blocks gains on a CPU is on that node's line
  const now = gain(claims);
  const gained = gainOf(claims, all, words);
  const short = device === "cpu" ? words.badge.cpu : inShort(reason, stats);
  const instead = level === "as_comfyui" && device !== "cpu" && reason; // all that there is to say
  const first = `${name}${words.colon}${instead ? short : sized_by}`;
  const text = [...gained, first, ...counted, instead ? "" : short].filter(Boolean).join(words.comma);
  const nothing = device === "cpu" ? [words.gain.cpu] : [];
  const steps = [stepsText(claims, words)].filter(Boolean);
  const title = [text, ...steps, ...nothing, technical(shapes, words), since(all, recompiles, words, language), ...why_not];
  return { ...plain(level, shorten(text), title.join("\n")), loss: isLoss(now?.factor, device) };
}

/** The reason of most calls; "" where there is none. */
function foremost(shapes) {
  const calls = new Map();
  for (const s of shapes) if (s.reason) calls.set(s.reason, (calls.get(s.reason) ?? 0) + s.calls);
  return [...calls].sort(([, a], [, b]) => b - a)[0]?.[0] ?? "";
}

/** The factor of the latest prompt's sizes, and what all calls at any size saved; [] where nothing is known. */
const gainOf = (shapes, all, words) => {
  const now = gain(shapes);
  return now ? [gainText({ ...now, saved: gain(all).saved }, words)] : [];
};

const ratio = (fast, shapes, words) => fill(words.badge.of, { fast: sizes(fast), all: sizes(shapes) });

/** "512×512", or "3 sizes". */
function listed(shapes, words, language) {
  const found = distinct(shapes.map(sized));
  return found.length === 1 ? found[0] : count(words.counts.sizes, sizes(shapes), language);
}

/** "graph 2, tape 1": how many sizes ran in which way, for those who know the words. */
function technical(shapes, words) {
  const states = distinct(shapes.map((s) => s.state)).map((state) => `${state} ${sizes(shapes.filter((s) => s.state === state))}`);
  return fill(words.badge.latest, { states: states.join(words.comma) });
}

function since(shapes, recompiles, words, language) {
  const counted = [count(words.counts.sizes, sizes(shapes), language), count(words.counts.recompiles, recompiles, language)];
  return fill(words.badge.since, { counted: counted.join(words.comma) });
}

/** Of Skip Blocks: the latest sampling run of its model in the first of these workflows that has one. */
function skipped(entry, workflows, shapes, all, stats, words) {
  const mine = stats.skip.filter((run) => entry.models.includes(run.entry));
  const run = workflows.map((workflow) => mine.filter((one) => one.workflow === workflow).at(-1)).find(Boolean);
  if (!run) return null;
  const steps_of = (some) => some.filter((s) => s.step);
  const text = [...gainOf(steps_of(shapes), steps_of(all), words), fill(words.badge.skipped, run)].join(words.comma);
  const steps = [stepsText(steps_of(shapes), words)].filter(Boolean);
  const resets = Object.entries(run.resets).map(([reason, n]) => fill(words.skip.reset, { n, reason }));
  const cost = fill(words.badge.skipped_cost, { seconds: seconds(run.seconds), memory: megabytes(run.bytes) });
  return plain(run.skipped ? "fast" : "as_comfyui", text, [text, cost, ...steps, words.badge.skipped_help, ...resets].join("\n"));
}
