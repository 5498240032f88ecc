/** The pure part of the web extension, in Node.js; tests/test_browser.py starts it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "../../web/anyshape/format.js";
import { count, fill } from "../../web/anyshape/phrases.js";
import { EN, ZH } from "./locales.js";

const MIB = 1 << 20;

const shape = (more = {}) => ({
  key: "x[2x4x64x64] float16",
  width: 512,
  height: 512,
  batch: 1,
  frames: 1,
  state: "graph",
  calls: 3,
  replays: 2,
  first_call_seconds: 1.5,
  median_ms: 20,
  eager_ms: null,
  bytes: 8 * MIB,
  reason: "",
  note: "",
  ...more,
});
const model = (shapes, more = {}) => ({
  name: "SDXL",
  kind: "model",
  kernels: 0,
  recompiles: 0,
  inexact: [],
  compile_seconds: 4.25,
  shapes,
  ...more,
});
const stats = (models, more = {}) => ({
  models,
  graphs: { budget_bytes: 0, used_bytes: 0, evictions: 0 },
  fallbacks: [],
  skip: [],
  nodes: [],
  ...more,
});
const entry = (more = {}) => ({
  id: "4",
  workflow: "w",
  type: "AnyShapeCompileModel",
  state: "ready",
  message: "",
  models: ["SDXL"],
  ...more,
});
const badge = (models, more = {}, words = EN, language = "en", device = "a GPU") =>
  format.badge(entry(more), stats(models, { device }), words, language);

test("a template is filled, and what is not given stays", () => {
  assert.equal(fill("{used} of {budget} {x}", { used: 0, budget: "2" }), "0 of 2 {x}");
});

test("nouns are counted", () => {
  assert.deepEqual([0, 1, 2].map((n) => count(EN.counts.sizes, n)), ["0 sizes", "1 size", "2 sizes"]);
  assert.equal(count(ZH.counts.sizes, 1, "zh"), "1 个尺寸");
});

test("figures keep a readable number of digits", () => {
  assert.deepEqual([0.0414, 9.994, 28.94].map(format.seconds), ["0.04", "9.99", "28.9"]);
  assert.deepEqual([0, 3.14159, 640.4].map(format.milliseconds), ["–", "3.1", "640"]);
  assert.deepEqual([0, 1, 10 * MIB].map(format.megabytes), ["–", "1", "10"]);
});

test("a size with several lines is one size, another batch is another", () => {
  const other = shape({ key: "longer prompt" });
  assert.equal(format.sizes([shape(), other]), 1);
  assert.equal(format.sizes([shape(), shape({ batch: 2 }), shape({ width: 520 })]), 3);
});

test("the frames of a video are part of its size", () => {
  const video = shape({ width: 832, height: 480, frames: 33 });
  assert.deepEqual([shape(), video].map(format.size), ["512×512", "832×480×33"]);
  assert.equal(format.size({ width: 8, height: 8 }), "8×8"); // an older server
  assert.equal(format.sizes([video, shape({ width: 832, height: 480 }), { ...video }]), 2);
});

test("a size that runs without a graph although nothing is wrong is fast, and says why", () => {
  const note = "the GPU is the limit at this size";
  const shown = badge([model([shape({ state: "tape", note })])]);
  assert.deepEqual([shown.level, shown.text], ["fast", "fast: 512×512"]);
  assert.match(shown.title, /ran: tape 1\nSince the start: 1 size, 0 recompiles\nthe GPU is the limit at this size$/);
  assert.deepEqual(format.why(shape({ reason: "a patch", note })), ["a patch", note]);
  assert.deepEqual(format.why(shape()), []);
});

test("three states: with a reason a size is not all that it could be, and on a CPU nothing is gained", () => {
  const speeds = (device) => ["graph", "tape", "eager"].map((state) => format.speed({ state, reason: "" }, device));
  assert.deepEqual(speeds("NVIDIA H200"), ["fast", "fast", "as_comfyui"]);
  assert.deepEqual(speeds(undefined), speeds("NVIDIA H200")); // an older server
  assert.deepEqual(speeds("cpu"), ["as_comfyui", "as_comfyui", "as_comfyui"]);
  assert.equal(format.speed({ state: "graph", reason: "no Triton" }, "NVIDIA H200"), "partly");
});

test("a reason stands once in a table, with the sizes where it holds for some", () => {
  const widths = [64, 72, 80, 88, 96];
  const shapes = widths.map((width, i) => shape({ width, reason: "for all", note: i ? "for most" : "for one" }));
  const reasons = (...given) => format.reasons(...given).map(({ reason, where }) => where + reason);
  assert.deepEqual(reasons(shapes, EN), ["for all", "64×512: for one", "4 sizes: for most"]);
  assert.deepEqual(reasons([shape({ batch: 2, note: "a" }), shape()], EN), ["512×512 ×2: a"]);
  assert.deepEqual(reasons(shapes.slice(0, 3), ZH, "zh")[2], "72×512，80×512：for most");
});

test("what a table says is not listed once more", () => {
  const steps = [["SDXL", "a"], ["SDXL", "b"], ["VAE", "a"]].map(([where, reason]) => ({ where, reason, count: 1 }));
  const all = stats([model([shape({ reason: "a" })])], { fallbacks: steps });
  assert.deepEqual(format.fallbacks(all).map((f) => f.where + f.reason), ["SDXLb", "VAEa"]);
});

test("equal runs are one line", () => {
  assert.deepEqual(format.together(["a", "b", "a", "a"]), ["a × 3", "b"]);
});

test("the file of a model is known from the node that had it", () => {
  const nodes = [entry({ file: "sd_xl_base", models: ["SDXL", "SDXL #2"] }), entry()];
  assert.deepEqual([...format.files(stats([], { nodes }))], [["SDXL", "sd_xl_base"], ["SDXL #2", "sd_xl_base"]]);
  assert.deepEqual([...format.files({})], []); // an older server
  const both = entry({ type: "AnyShapeWarmUp", file: "flux1-dev", models: ["Flux", "VAE decoder"] });
  const vae = entry({ type: "AnyShapeCompileVAE", file: "ae", models: ["VAE decoder"] });
  const models = [model([], { name: "Flux" }), model([], { name: "VAE decoder", kind: "vae" })];
  const found = format.files(stats(models, { nodes: [vae, both] })); // whose VAE may be from another file
  assert.deepEqual([...found].sort(), [["Flux", "flux1-dev"], ["VAE decoder", "ae"]]);
});

test("a model is called by its file, and a place by the one that all of its class have", () => {
  const nodes = [entry({ file: "base", models: ["SDXL"] }), entry({ file: "refiner", models: ["SDXL #2"] })];
  const all = stats([model([]), model([], { name: "SDXL #2" }), model([], { name: "SDXLRefiner" })], { nodes });
  assert.deepEqual(["SDXL", "SDXL #2", "Flux"].map((name) => format.title(name, all, EN)), ["base (SDXL)", "refiner (SDXL #2)", "Flux"]);
  assert.deepEqual(["SDXL", "SDXL #2", "Warm Up"].map((name) => format.place(name, all, EN)), ["SDXL", "refiner (SDXL #2)", "Warm Up"]);
  assert.equal(format.place("SDXL", stats([model([])], { nodes }), ZH), "base（SDXL）");
  assert.deepEqual(["VAE decoder #2", "VAE encoder", "SDXL #2"].map((name) => format.title(name, stats([]), ZH)), ["VAE 解码器 #2", "VAE 编码器", "SDXL #2"]);
  assert.equal(format.title("VAE decoder", stats([]), EN), "VAE decoder");
});

test("what is less exact is listed by model, while that has run", () => {
  const wan = model([shape()], { name: "Wan", inexact: ["one", "two"] });
  assert.deepEqual(format.inexact(stats([model([shape()]), wan]), EN), ["Wan: one", "Wan: two"]);
  assert.deepEqual(format.inexact(stats([{ ...wan, shapes: [] }, { shapes: [shape()] }]), EN), []); // cleared; an older server
  const nodes = [entry({ file: "wan2.1", models: ["Wan"] })];
  assert.deepEqual(format.inexact(stats([wan], { nodes }), ZH)[0], "wan2.1（Wan）：one");
});

test("totals add the models up", () => {
  const models = [model([shape(), shape({ width: 64 })]), model([shape()], { recompiles: 2 }), model([])];
  assert.deepEqual(format.totals(stats(models), EN), { sizes: "2 sizes", recompiles: "2 recompiles", seconds: "12.8" });
  assert.equal(fill(EN.totals, format.totals(stats([model([shape()])]), EN)), "1 size, 0 recompiles, 4.25 s compiling");
});

test("the budget is a fraction, never more than all of it", () => {
  assert.equal(format.budget(stats([]).graphs), null);
  const graphs = { budget_bytes: 100 * MIB, used_bytes: 25 * MIB, evictions: 1 };
  assert.deepEqual(format.budget(graphs), { fraction: 0.25, used: 25, budget: 100, evictions: 1 });
  assert.equal(format.budget({ ...graphs, used_bytes: 200 * MIB }).fraction, 1);
});

test("bars grow with the logarithm: one long compilation does not flatten the others", () => {
  const near = (found, wanted) => found.forEach((value, i) => assert.ok(Math.abs(value - wanted[i]) < 1e-9, `${found}`));
  near(format.shares([0.1, 1, 10, 0]), [0.12, 0.56, 1, 0]);
  near(format.shares([37.7, 0.25, 0.3]).slice(0, 2), [1, 0.12]);
  near(format.shares([3, 3]), [1, 1]);
  assert.ok(format.shares([0.29, 0.32])[0] > 0.95); // what is nearly equal looks so
  assert.deepEqual(format.shares([0, 0]), [0, 0]);
  assert.deepEqual(format.shares([]), []);
});

test("an entry belongs to the node of its id, class and workflow", () => {
  const foreign = entry({ workflow: "another" });
  const script = entry({ workflow: "", message: "script", prompt: "p" });
  const where = { id: "4", type: "AnyShapeCompileModel", workflow: "w" };
  assert.equal(format.entryOf(stats([], { nodes: [foreign] }), where), undefined);
  assert.equal(format.entryOf(stats([], { nodes: [foreign, script, entry()] }), where).workflow, "w");
  assert.equal(format.entryOf(stats([], { nodes: [foreign, script] }), where), undefined); // a script's
  const queued = new Set(["p"]); // from this page
  assert.equal(format.entryOf(stats([], { nodes: [foreign, script] }), { ...where, queued }), script);
  assert.equal(format.entryOf(stats([], { nodes: [entry()] }), { ...where, type: "AnyShapeCompileVAE" }), undefined);
  assert.equal(format.entryOf({}, where), undefined); // an older server
  const cached = { ...where, cached: true }; // the node ran in a copy of the workflow
  assert.equal(format.entryOf(stats([], { nodes: [foreign] }), cached), foreign);
  const latest = entry({ workflow: "a third" });
  assert.equal(format.entryOf(stats([], { nodes: [foreign, latest] }), cached), latest);
});

test("a node from the cache may have run under another id: the one whose model the latest prompt ran", () => {
  const shapes = (prompt) => [shape({ prompt })];
  const models = [model(shapes(7), { name: "SDXL" }), model(shapes(6), { name: "Flux" })];
  const nodes = [entry({ id: "8" }), entry({ id: "7", models: ["Flux"] }), entry({ id: "6", type: "AnyShapeSkipBlocks" })];
  const where = { id: "4", type: "AnyShapeCompileModel", workflow: "v", cached: true };
  assert.equal(format.entryOf(stats(models, { nodes }), where), nodes[0]);
  assert.equal(format.entryOf(stats(models, { nodes }), { ...where, cached: false }), undefined);
  const two = [...nodes, entry({ id: "9", models: ["SDXL", "Flux"] })];
  assert.equal(format.entryOf(stats(models, { nodes: two }), where), undefined);
  const told = [model([shape({ prompt: 7, prompts: { u: 7 } })]), model([shape({ prompt: 6, prompts: { v: 6 } })], { name: "Flux" })];
  assert.equal(format.entryOf(stats(told, { nodes }), where), nodes[1]); // the prompt of this workflow, not of another
  const same = [entry({ id: "4", workflow: "a", models: ["Flux"] }), entry({ id: "4", workflow: "b" })];
  assert.equal(format.entryOf(stats(told, { nodes: same }), where), same[0]);
});

test("a node that has not run, is off, cannot be compiled, or has not sampled", () => {
  assert.equal(format.badge(undefined, stats([]), EN).text, "not run yet");
  assert.equal(badge([], { state: "off" }).level, "off");
  const eager = badge([], { state: "eager", message: `Chroma ${"x".repeat(100)}` });
  assert.equal(eager.level, "as_comfyui");
  assert.match(eager.text, /^as ComfyUI: Chroma x+…$/);
  assert.match(eager.title, /\nChroma x{100}$/);
  assert.equal(badge([], { models: [] }).text, "ready, nothing sampled yet");
  assert.match(badge([], { message: "more than the card has" }).title, /ready.*\nmore than the card has/);
});

test("a node whose latest prompt was broken off does not say what the one before did", () => {
  const six = [model([shape()])];
  assert.equal(badge(six, { ended: "cancelled" }).text, "the latest prompt was cancelled");
  assert.equal(badge(six, { ended: "failed" }).text, "the latest prompt failed");
  assert.equal(badge(six, { ended: "cancelled", state: "off" }).level, "off");
});

test("a bypassed or muted node says so, whatever ran before", () => {
  const mode = (n) => format.badge(entry(), stats([model([shape()])]), EN, "en", n);
  assert.deepEqual([mode(0).level, mode(2).level, mode(4).level], ["fast", "as_comfyui", "off"]);
  assert.match(mode(4).text, /^bypassed/);
  assert.match(mode(2).text, /^muted.*Bypass it instead/);
  assert.equal(format.badge(undefined, stats([]), EN, "en", 4).text, mode(4).text);
});

test("a node whose model ran in one way", () => {
  const six = Array.from({ length: 6 }, (_, i) => shape({ width: 512 + 8 * i }));
  const shown = badge([model(six), model([shape({ state: "eager" })], { name: "another" })]);
  assert.deepEqual([shown.level, shown.text], ["fast", "fast: 6 sizes"]);
  assert.equal(badge([model(six)], {}, ZH, "zh").text, "加速：6 个尺寸");
  assert.equal(badge([model([shape({ batch: 2 })])]).text, "fast: 512×512 ×2");
  const onCpu = badge([model(six)], {}, EN, "en", "cpu");
  assert.equal(onCpu.text, "as ComfyUI: 6 sizes, on a CPU");
  const patched = badge([model([shape({ state: "eager", reason: "a patch" })])], {}, ZH, "zh", "cpu");
  assert.equal(patched.text, "与 ComfyUI 相同：512×512，在 CPU 上"); // without the patch too
  assert.match(patched.title, /\na patch$/);
  assert.match(onCpu.title, /\nOn a CPU nothing is gained/);
  assert.doesNotMatch(shown.title, /CPU/);
  const why = badge([model([shape({ state: "eager", reason: "unknown patch attn2" })])]);
  assert.deepEqual([why.level, why.text], ["as_comfyui", "as ComfyUI: unknown patch attn2"]);
});

test("a node whose model ran in several ways", () => {
  const shapes = [shape(), shape({ width: 520 }), shape({ width: 64, state: "eager", reason: "eager was faster" })];
  const shown = badge([model(shapes, { recompiles: 1 })]);
  assert.deepEqual([shown.level, shown.text], ["partly", "partly fast: 2 of 3 sizes, 1 recompile, eager was faster"]);
  assert.match(shown.title, /graph 2, eager 1\n.*3 sizes, 1 recompile\neager was faster/);
});

test("the reason on the line is that of most calls, in its short form", () => {
  const shapes = [["rare", 5], ["often", 3], ["often", 3]].map(([reason, calls], i) => shape({ reason, calls, width: 64 + 8 * i }));
  const shown = (given, shorts) => format.badge(entry(), stats([model(given)], { shorts }), EN).text;
  assert.equal(shown(shapes), "partly fast: 3 sizes, often");
  assert.equal(shown(shapes, { often: "Install Triton" }), "partly fast: 3 sizes, Install Triton");
  assert.equal(shown(shapes.map((s) => ({ ...s, state: "eager" }))), "as ComfyUI: often");
  assert.equal(shown([shape(), ...shapes.slice(0, 2)]), "partly fast: 1 of 3 sizes, rare");
});

test("a node's line is about the latest prompt of its model", () => {
  const old = [shape({ prompt: 3 }), shape({ width: 64, prompt: 4, state: "eager", reason: "a patch" })];
  const now = [...old, shape({ width: 72, prompt: 7, state: "tape" })];
  assert.equal(badge([model(now)]).text, "fast: 72×512");
  assert.match(badge([model(now)]).title, /ran: tape 1\nSince the start: 3 sizes/);
  assert.equal(badge([model(old)]).text, "as ComfyUI: a patch");
  const decoder = model([shape({ width: 72, prompt: 6 })], { name: "VAE decoder" });
  assert.equal(badge([model(now), decoder], { models: ["SDXL", "VAE decoder"] }).text, "fast: 72×512");
});

test("a node's line is about its own workflow: another one may use the same model", () => {
  const here = shape({ prompt: 9, prompts: { v: 9, w: 3 }, width: 64 });
  const there = shape({ prompt: 9, prompts: { v: 9 }, width: 72, state: "eager", reason: "a patch" });
  const both = [model([here, there])];
  assert.equal(badge(both).text, "fast: 64×512");
  assert.match(badge(both).title, /ran: graph 1\nSince the start: 2 sizes/);
  assert.equal(badge(both, { workflow: "v" }).text, "partly fast: 1 of 2 sizes, a patch");
  assert.equal(badge([model([there])]).text, "ready, nothing sampled yet");
  const script = shape({ prompt: 10, prompts: { w: 3, "": 10 }, width: 80 });
  assert.equal(badge([model([script, { ...here, prompts: { w: 4 } }])]).text, "fast: 64×512");
  assert.equal(badge([model([script])], { workflow: "" }).text, "fast: 80×512");
  const cached = (workflow) => format.badge(entry({ workflow: "v" }), stats([model([there, here])]), EN, "en", 0, workflow).text;
  assert.equal(cached("w"), "fast: 64×512"); // the sampler ran here, and the node elsewhere
  assert.equal(cached("another"), "partly fast: 1 of 2 sizes, a patch");
  assert.equal(badge([model([shape({ prompt: 0, prompts: {} })])]).text, "fast: 512×512"); // outside of prompts
});

test("a node that another pack took over says so, whatever ran before", () => {
  const shown = badge([model([shape()])], { instead: "another node runs this model" });
  assert.deepEqual([shown.level, shown.text], ["as_comfyui", "as ComfyUI: another node runs this model"]);
});

test("Warm Up's line is about its list", () => {
  const warm = (listed, ready, bad, words, language) =>
    badge([model([shape()])], { type: "AnyShapeWarmUp", sizes: { listed, ready, bad } }, words, language);
  assert.deepEqual([warm(3, 3, 0).level, warm(3, 3, 0).text], ["fast", "3 of 3 sizes ready"]);
  assert.deepEqual([warm(3, 2, 1).level, warm(3, 2, 1).text], ["partly", "2 of 3 sizes ready, 1 entry is not a size"]);
  assert.deepEqual([warm(0, 0, 9).level, warm(0, 0, 9).text], ["as_comfyui", "9 entries are not sizes"]);
  assert.equal(warm(3, 2, 1, ZH, "zh").text, "3 个尺寸中 2 个已就绪，1 项不是尺寸");
  const bad = { type: "AnyShapeWarmUp", state: "eager", message: "connect Compile Model", sizes: { listed: 1, ready: 0, bad: 0 } };
  assert.match(badge([], bad).title, /0 of 1 sizes ready\nconnect Compile Model/);
});

test("Skip Blocks shows the latest run of its own model in its own workflow", () => {
  const run = { model: "SDXL", entry: "SDXL #2", prompt: 4, workflow: "w", depth: 2, full: 8, skipped: 12, resets: {}, seconds: 1, bytes: 0 };
  const foreign = [{ ...run, model: "SD15", entry: "SD15", full: 99 }, { ...run, entry: "SDXL", full: 98 }, { ...run, workflow: "v", full: 97 }];
  const all = stats([], { skip: [{ ...run, full: 1 }, run, ...foreign, { ...run, workflow: "", full: 96 }] });
  const mine = entry({ type: "AnyShapeSkipBlocks", models: ["SDXL #2"] });
  assert.equal(format.badge(mine, all, EN).text, "8 full, 12 skipped, depth 2");
  assert.ok(format.badge(mine, all, EN).title.includes("\nThe latest run: 1.00 s, stored features – MB\n"));
  const copied = { ...mine, workflow: "v" }; // the node came from the cache: the run is of the page's workflow
  assert.equal(format.badge(copied, all, EN, "en", 0, "w").text, "8 full, 12 skipped, depth 2");
  assert.equal(format.badge(copied, all, EN, "en", 0, "x").text, "97 full, 12 skipped, depth 2");
  const none = { ...run, skipped: 0, resets: { "few steps": 8 } };
  const shown = format.badge(mine, stats([], { skip: [none] }), EN);
  assert.equal(shown.level, "as_comfyui");
  assert.match(shown.title, /8 calls in full: few steps/);
  assert.equal(format.badge(mine, stats([]), EN).text, "ready, nothing sampled yet");
});

test("sizes as Warm Up's list has them: of models, each once", () => {
  const models = [
    model([shape(), shape({ key: "k", batch: 4 }), shape({ key: "full" }), shape({ key: "v", width: 832, height: 480, frames: 33 })]),
    model([shape({ width: 64, height: 64 })], { kind: "vae" }),
  ];
  assert.deepEqual(format.listedSizes(models), ["512x512", "512x512 batch 4", "832x480x33"]);
  assert.deepEqual(format.listedSizes([]), []);
});
