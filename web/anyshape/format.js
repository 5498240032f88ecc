/**
 * What is shown of the stats, as text and numbers. Pure: no page, no ComfyUI; tests/web runs it in Node.js.
 *
 * The stats are those of docs/architecture.md; `words` are the texts of locales/<language>/main.json.
 */

const MIB = 1 << 20;
const LONGEST = 60; // characters of a reason on a node; the tooltip has all of it

/** "{n} of {all}" and {n: 1, all: 2} -> "1 of 2"; what is not given stays as it is. */
export function fill(template, values) {
  return template.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** The form of a counted noun that `n` wants: forms {one, other}. */
export function count(forms, n, language = "en") {
  const form = new Intl.PluralRules(language).select(n) === "one" ? forms.one : forms.other;
  return fill(form, { n });
}

export const seconds = (value) => value.toFixed(value < 10 ? 2 : 1);
export const milliseconds = (value) => (value > 0 ? value.toFixed(value < 100 ? 1 : 0) : "–");
export const megabytes = (bytes) => (bytes > 0 ? Math.max(1, Math.round(bytes / MIB)).toString() : "–");

/** Of an image "1024×1152", of a video "832×480×33": the frames come last. */
export const size = (s) => [s.width, s.height, ...(s.frames > 1 ? [s.frames] : [])].join("×");

/** Sizes that a user would count: width, height, frames and batch, however many lines a size has. */
export const sizes = (shapes) => new Set(shapes.map((s) => `${size(s)} ${s.batch}`)).size;

const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

/** What all models together come to; models without a call since the last clear count for their compilations only. */
export function totals(stats) {
  const shapes = stats.models.flatMap((model) => model.shapes);
  return {
    models: stats.models.filter((model) => model.shapes.length).length,
    sizes: sizes(shapes),
    calls: sum(shapes, (s) => s.calls),
    recompiles: sum(stats.models, (model) => model.recompiles),
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

/** Which of Skip Blocks' two kinds of step a line is: "full", "skipped" or "". */
export const step = (key) => key.match(/\bstep=(full|skipped)\b/)?.[1] ?? "";

export function shorten(text, longest = LONGEST) {
  return text.length <= longest ? text : `${text.slice(0, longest - 1).trimEnd()}…`;
}

/** Each value's share of the largest, 0 to 1. */
export function shares(values) {
  const most = Math.max(...values, 0);
  return values.map((value) => (most > 0 ? value / most : 0));
}

/**
 * The entry of a node, if it has run: of its own workflow, or one that came without the name of its workflow. A node
 * that ComfyUI took from its cache ran in another workflow, a copy of this one: its entry, if there is but one.
 */
export function entryOf(stats, { id, type, workflow, cached = false }) {
  const mine = stats.nodes?.filter((entry) => entry.id === id && entry.type === type) ?? [];
  const own = mine.find((entry) => entry.workflow === workflow) ?? mine.find((entry) => !entry.workflow);
  return own ?? (cached && mine.length === 1 ? mine[0] : undefined);
}

/**
 * What a node shows of itself: {level: "none" | "off" | a state ("graph", "tape", "eager") | "mixed", text, title}.
 * entry: of entryOf; undefined before the node's first run.
 */
export function badge(entry, stats, words, language = "en") {
  if (!entry) return plain("none", words.badge.not_run);
  if (entry.state === "off") return plain("off", words.badge.off);
  if (entry.state === "eager") return eager(entry.message);
  const models = stats.models.filter((model) => entry.models.includes(model.name));
  const found = entry.type === "AnyShapeSkipBlocks" ? skipped(entry, stats, words) : ran(models, words, language);
  return withMessage(found ?? plain("none", words.badge.ready), entry.message);
}

const plain = (level, text, title = text) => ({ level, text, title });
const eager = (reason) => plain("eager", shorten(reason ? `eager: ${reason}` : "eager"), reason || "eager");
const withMessage = (shown, message) => (message ? { ...shown, title: `${shown.title}\n${message}` } : shown);

/** What is said of a shape: the reason why it does not run faster, and the note where nothing is missed. */
export const why = (s) => [s.reason, s.note].filter(Boolean);

/** "SDXL: sentence", for each rule in use that is less exact than ComfyUI's own rounding. */
export const inexact = (models) =>
  models.filter((model) => model.shapes.length).flatMap((model) => (model.inexact ?? []).map((sentence) => `${model.name}: ${sentence}`));

function ran(models, words, language) {
  const shapes = models.flatMap((model) => model.shapes);
  if (!shapes.length) return null;
  const recompiles = count(words.counts.recompiles, sum(models, (model) => model.recompiles), language);
  const states = [...new Set(shapes.map((s) => s.state))];
  const reasons = [...new Set(shapes.flatMap(why))];
  if (states.length === 1 && states[0] === "eager") return eager(reasons.join("\n"));
  const distinct = (state) => sizes(shapes.filter((s) => s.state === state));
  const parts =
    states.length === 1
      ? [states[0], count(words.counts.sizes, distinct(states[0]), language)]
      : states.map((state) => `${state} ${distinct(state)}`);
  const text = [...parts, recompiles].join(", ");
  return plain(states.length === 1 ? states[0] : "mixed", text, [text, ...reasons].join("\n"));
}

/** Of Skip Blocks: its model's latest sampling run. A run is named by the class, an entry may have a number behind it. */
function skipped(entry, stats, words) {
  const classes = entry.models.map((name) => name.replace(/ #\d+$/, ""));
  const run = stats.skip.filter((one) => classes.includes(one.model)).at(-1);
  if (!run) return null;
  const text = fill(words.badge.skipped, run);
  const resets = Object.entries(run.resets).map(([reason, n]) => fill(words.skip.reset, { n, reason }));
  return plain(run.skipped ? "graph" : "eager", text, [text, ...resets].join("\n"));
}
