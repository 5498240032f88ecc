/** Reasons in the page's language, in Node.js; tests/test_web.py starts it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { badge, inShort } from "../../web/anyshape/format.js";
import { inWords } from "../../web/anyshape/reasons.js";
import { EN, ZH } from "./locales.js";

const DRAWS = "it draws random numbers (ldm/x.py:7)";
const SMALL = "graph_budget_mb is 0, so no graphs are captured; raise it for more speed at small sizes";
const REASONS = [
  { text: DRAWS, all: true, said: [{ key: "draws", short: "the model draws random numbers", values: { place: "ldm/x.py:7" } }] },
  { text: SMALL, all: true, said: [{ key: "no_graphs", short: "Raise graph_budget_mb: it is 0", values: {} }] },
];
const shape = { key: "x", width: 8, height: 8, batch: 1, frames: 1, state: "eager", reason: DRAWS, note: "unknown" };
const node = { id: "4", workflow: "", type: "AnyShapeCompileModel", state: "ready", message: "", models: ["M"] };
const STATS = {
  device: "a GPU",
  models: [{ name: "M", kind: "model", recompiles: 0, inexact: [SMALL], shapes: [shape] }],
  nodes: [node, { ...node, id: "5", instead: SMALL }],
  fallbacks: [{ where: "M", reason: DRAWS, count: 1 }],
  skip: [{ model: "M", depth: 0, full: 1, skipped: 0, resets: { [SMALL]: 2 } }],
  reasons: REASONS,
};

test("English keeps the long forms as they are, and knows the short ones", () => {
  const told = inWords(STATS, EN);
  assert.equal(told.models[0].shapes[0].reason, DRAWS);
  assert.equal(inShort(DRAWS, told), "the model draws random numbers");
  assert.equal(inShort("unknown", told), "unknown");
});

test("Chinese has both forms, with the line of code that a reason names", () => {
  const told = inWords(STATS, ZH);
  const [drawn] = told.models[0].shapes;
  assert.equal(drawn.reason, "模型会生成随机数（ldm/x.py:7）");
  assert.equal(drawn.note, "unknown");
  assert.equal(inShort(drawn.reason, told), "模型会生成随机数");
  assert.equal(told.fallbacks[0].reason, drawn.reason);
  assert.equal(told.nodes[1].instead, ZH.reasons.no_graphs.long);
  assert.deepEqual(told.skip[0].resets, { [ZH.reasons.no_graphs.long]: 2 });
  assert.deepEqual(told.models[0].inexact, [ZH.reasons.no_graphs.long]);
});

test("a node's line has the short form, its tooltip the long one", () => {
  const english = inWords(STATS, EN);
  const shown = badge(english.nodes[0], english, EN);
  assert.equal(shown.text, "as ComfyUI: the model draws random numbers");
  assert.ok(shown.title.includes(DRAWS));
  const chinese = inWords(STATS, ZH);
  assert.equal(badge(chinese.nodes[1], chinese, ZH, "zh").text, "与 ComfyUI 相同：请调高 CUDA 图显存上限：现在是 0");
});

test("a message is told line by line, and a line that says more than its reasons stays", () => {
  const more = `512x512: ${SMALL}`;
  const entry = { ...node, state: "eager", message: `${more}\n${SMALL}` };
  const told = inWords({ ...STATS, nodes: [entry], reasons: [...REASONS, { ...REASONS[1], text: more, all: false }] }, ZH);
  assert.equal(told.nodes[0].message, `${more}\n${ZH.reasons.no_graphs.long}`);
  const short = ZH.reasons.no_graphs.short;
  assert.equal(inShort(told.nodes[0].message, told), `${short} ${short}`);
});

test("an older server sends no reasons, and a newer one may send some that this page does not know", () => {
  const { reasons, ...older } = STATS;
  assert.equal(inWords(older, ZH).models[0].shapes[0].reason, DRAWS);
  const newer = inWords({ ...STATS, reasons: [{ text: DRAWS, all: true, said: [{ key: "of tomorrow", short: "short", values: {} }] }] }, ZH);
  assert.equal(newer.models[0].shapes[0].reason, DRAWS);
  assert.equal(inShort(DRAWS, newer), "short");
});
