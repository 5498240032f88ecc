/** The pure part of the web extension, in Node.js; tests/test_browser.py starts it. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as format from "../../web/anyshape/format.js";

const read = (language) =>
  JSON.parse(readFileSync(new URL(`../../locales/${language}/main.json`, import.meta.url))).anyshape;
const EN = read("en");
const ZH = read("zh");
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
const badge = (models, more = {}, words = EN, language = "en") =>
  format.badge(entry(more), stats(models), words, language);

test("a template is filled, and what is not given stays", () => {
  assert.equal(format.fill("{used} of {budget} {x}", { used: 0, budget: "2" }), "0 of 2 {x}");
});

test("nouns are counted", () => {
  assert.deepEqual([0, 1, 2].map((n) => format.count(EN.counts.sizes, n)), ["0 sizes", "1 size", "2 sizes"]);
  assert.equal(format.count(ZH.counts.sizes, 1, "zh"), "1 个尺寸");
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

test("a size that runs without a graph although nothing is wrong is not eager, and says why", () => {
  const note = "the GPU is the limit at this size";
  const shown = badge([model([shape({ state: "tape", note })])]);
  assert.deepEqual([shown.level, shown.text], ["tape", "tape, 1 size, 0 recompiles"]);
  assert.equal(shown.title, `tape, 1 size, 0 recompiles\n${note}`);
  assert.deepEqual(format.why(shape({ reason: "a patch", note })), ["a patch", note]);
  assert.deepEqual(format.why(shape()), []);
});

test("what is less exact is listed by model, while that has run", () => {
  const wan = model([shape()], { name: "Wan", inexact: ["one", "two"] });
  assert.deepEqual(format.inexact([model([shape()]), wan]), ["Wan: one", "Wan: two"]);
  assert.deepEqual(format.inexact([{ ...wan, shapes: [] }, { shapes: [shape()] }]), []); // cleared; an older server
});

test("totals add the models up", () => {
  const all = format.totals(stats([model([shape(), shape({ width: 64 })]), model([shape()], { recompiles: 2 }), model([])]));
  assert.deepEqual(all, { models: 2, sizes: 2, calls: 9, recompiles: 2, seconds: "12.8" });
});

test("the budget is a fraction, never more than all of it", () => {
  assert.equal(format.budget(stats([]).graphs), null);
  const graphs = { budget_bytes: 100 * MIB, used_bytes: 25 * MIB, evictions: 1 };
  assert.deepEqual(format.budget(graphs), { fraction: 0.25, used: 25, budget: 100, evictions: 1 });
  assert.equal(format.budget({ ...graphs, used_bytes: 200 * MIB }).fraction, 1);
});

test("the step of a line is read off its key", () => {
  const keys = ["x[1x4x8x8] step=full depth*2 float16", "x step=skipped depth*0 bf16", "x[1] float16"];
  assert.deepEqual(keys.map(format.step), ["full", "skipped", ""]);
});

test("bars are shares of the longest", () => {
  assert.deepEqual(format.shares([1, 4, 0]), [0.25, 1, 0]);
  assert.deepEqual(format.shares([0, 0]), [0, 0]);
  assert.deepEqual(format.shares([]), []);
});

test("an entry belongs to the node of its id, class and workflow", () => {
  const foreign = entry({ workflow: "another" });
  const script = entry({ workflow: "", message: "script" });
  const where = { id: "4", type: "AnyShapeCompileModel", workflow: "w" };
  assert.equal(format.entryOf(stats([], { nodes: [foreign] }), where), undefined);
  assert.equal(format.entryOf(stats([], { nodes: [foreign, script, entry()] }), where).workflow, "w");
  assert.equal(format.entryOf(stats([], { nodes: [foreign, script] }), where), script);
  assert.equal(format.entryOf(stats([], { nodes: [entry()] }), { ...where, type: "AnyShapeCompileVAE" }), undefined);
  assert.equal(format.entryOf({}, where), undefined); // an older server
  const cached = { ...where, cached: true }; // the node ran in a copy of the workflow
  assert.equal(format.entryOf(stats([], { nodes: [foreign] }), cached), foreign);
  assert.equal(format.entryOf(stats([], { nodes: [foreign, entry({ workflow: "a third" })] }), cached), undefined);
});

test("a node that has not run, is off, cannot be compiled, or has not sampled", () => {
  assert.equal(format.badge(undefined, stats([]), EN).text, "not run yet");
  assert.equal(badge([], { state: "off" }).level, "off");
  const eager = badge([], { state: "eager", message: `Chroma ${"x".repeat(100)}` });
  assert.equal(eager.level, "eager");
  assert.match(eager.text, /^eager: Chroma x+…$/);
  assert.match(eager.title, /^Chroma x{100}$/);
  assert.equal(badge([], { models: [] }).text, "ready, nothing sampled yet");
  assert.match(badge([], { message: "more than the card has" }).title, /ready.*\nmore than the card has/);
});

test("a node whose model ran in one way", () => {
  const six = Array.from({ length: 6 }, (_, i) => shape({ width: 512 + 8 * i }));
  const shown = badge([model(six), model([shape({ state: "eager" })], { name: "another" })]);
  assert.deepEqual([shown.level, shown.text], ["graph", "graph, 6 sizes, 0 recompiles"]);
  assert.equal(badge([model(six)], {}, ZH, "zh").text, "graph, 6 个尺寸, 重新编译 0 次");
  const why = badge([model([shape({ state: "eager", reason: "unknown patch attn2" })])]);
  assert.deepEqual([why.level, why.text], ["eager", "eager: unknown patch attn2"]);
});

test("a node whose model ran in several ways", () => {
  const shapes = [shape(), shape({ width: 520 }), shape({ width: 64, state: "eager", reason: "eager was faster" })];
  const shown = badge([model(shapes, { recompiles: 1 })]);
  assert.deepEqual([shown.level, shown.text], ["mixed", "graph 2, eager 1, 1 recompile"]);
  assert.match(shown.title, /eager was faster/);
});

test("Skip Blocks shows its model's latest run", () => {
  const run = { model: "SDXL", depth: 2, full: 8, skipped: 12, resets: {}, seconds: 1, bytes: 0 };
  const all = stats([], { skip: [{ ...run, full: 1 }, run, { ...run, model: "SD15", full: 99 }] });
  const mine = entry({ type: "AnyShapeSkipBlocks", models: ["SDXL #2"] });
  assert.equal(format.badge(mine, all, EN).text, "8 full, 12 skipped, depth 2");
  const none = { ...run, skipped: 0, resets: { "few steps": 8 } };
  const shown = format.badge(mine, stats([], { skip: [none] }), EN);
  assert.equal(shown.level, "eager");
  assert.match(shown.title, /8 calls in full: few steps/);
  assert.equal(format.badge(mine, stats([]), EN).text, "ready, nothing sampled yet");
});
