/** How much faster, of which sizes, and what a comparison queues: pure, in Node.js; tests/test_web.py starts it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { difference, inWords } from "../../web/anyshape/compare_pictures.js";
import { runs, without } from "../../web/anyshape/compare_prompts.js";
import * as format from "../../web/anyshape/format.js";
import { duration, factorHelp, gain, gainText, preparingText, scoped, stepsText, times } from "../../web/anyshape/gain.js";
import { EN, ZH } from "./locales.js";

const shape = (more = {}) => ({
  key: "k", width: 512, height: 512, batch: 1, frames: 1, state: "graph", calls: 10, median_ms: 20, eager_ms: 30,
  factor: 1.5, saved_seconds: 0.1, reason: "", note: "", prompt: 1, workflows: ["w"], ...more,
});
const unknown = (more = {}) => shape({ eager_ms: null, factor: null, saved_seconds: null, ...more });
const model = (name, shapes) => ({ name, kind: "model", recompiles: 0, compile_seconds: 1, inexact: [], shapes });
const stats = (models, more = {}) => ({ models, fallbacks: [], skip: [], device: "a GPU", ...more });

test("the gain is of the sizes where both were measured, by their calls", () => {
  const slow = shape({ calls: 30, eager_ms: 10, median_ms: 20, factor: 0.5, saved_seconds: -0.3 });
  const found = gain([shape(), slow, unknown({ calls: 1000 })]);
  assert.ok(Math.abs(found.factor - 600 / 800) < 1e-9 && Math.abs(found.saved + 0.2) < 1e-9);
  assert.equal(gain([unknown()]), null);
  assert.equal(gain([{ median_ms: 3 }]), null); // an older server
});

test("the gain in words", () => {
  assert.equal(gainText({ factor: 1.44, saved: 12.3 }, EN), "1.4x, 12 s saved");
  assert.equal(gainText({ factor: 0.96, saved: -3 }, EN), "0.96x, 3.0 s lost so far");
  assert.equal(gainText({ factor: 2, saved: 600 }, ZH), "2.0x，节省 10 分钟");
  assert.equal(duration(9000, EN), "2.5 h");
  assert.deepEqual([1.04, 1.5, 0.5, null].map(times), ["1.04x", "1.5x", "0.5x", "–"]);
});

const entry = { id: "4", workflow: "w", type: "AnyShapeCompileModel", state: "ready", message: "", models: ["SDXL"] };
const badge = (shapes, more = {}, words = EN, language = "en") =>
  format.badge(entry, stats([model("SDXL", shapes)], more), words, language);

test("a node says how much faster it is: the latest prompt's factor, and all that was saved", () => {
  const old = shape({ width: 64, prompt: 1, factor: 3, eager_ms: 60, saved_seconds: 11.9 });
  const shown = badge([old, shape({ prompt: 2 })]);
  assert.deepEqual([shown.text, shown.loss], ["1.5x, 12 s saved, fast: 512×512", false]);
  const slower = badge([shape({ factor: 0.8, eager_ms: 16, saved_seconds: -2 })]);
  assert.deepEqual([slower.text, slower.loss], ["0.8x, 2.0 s lost so far, fast: 512×512", true]);
  const byChance = badge([shape({ factor: 0.91, eager_ms: 18, saved_seconds: -2 })], { device: "cpu" });
  assert.deepEqual([byChance.level, byChance.loss], ["as_comfyui", false]); // red is for a GPU
  assert.equal(badge([unknown()]).text, "fast: 512×512");
  assert.equal(badge([unknown({ state: "eager", reason: "a patch" })]).text, "as ComfyUI: a patch");
  assert.equal(badge([shape()], {}, ZH, "zh").text, "1.5x，节省 0.1 秒，加速：512×512");
});

const skipping = () => [
  shape({ step: "full", calls: 10, eager_ms: 30, median_ms: 20, factor: 1.5 }),
  shape({ step: "skipped", calls: 20, eager_ms: 30, median_ms: 5, factor: 6, saved_seconds: 0.5 }),
];

test("behind Skip Blocks every step stands beside a full one of ComfyUI's, and the tooltip says so", () => {
  const shown = badge(skipping());
  assert.equal(shown.text, "3.0x, 0.6 s saved, fast: 512×512");
  assert.match(shown.title, /\nFull steps alone: 1.5x. Skipped steps are compared with full steps too/);
  assert.match(badge(skipping(), {}, ZH, "zh").title, /\n只看完整步：1.5x。/);
  assert.equal(stepsText([shape()], EN), "");
  assert.equal(stepsText([skipping()[1]], EN), ""); // no full step's time is known: there is nothing to say of them
  const run = { model: "SDXL", entry: "SDXL", workflow: entry.workflow, depth: 2, full: 10, skipped: 20, resets: {}, seconds: 1, bytes: 0 };
  const node = { ...entry, type: "AnyShapeSkipBlocks" };
  const mine = format.badge(node, stats([model("SDXL", [shape(), ...skipping()])], { skip: [run] }), EN);
  assert.equal(mine.text, "3.0x, 0.6 s saved, 10 full, 20 skipped, depth 2"); // what ran without it is not counted
  assert.match(mine.title, /\nFull steps alone: 1.5x/);
  const onCpu = stats([model("SDXL", skipping())], { skip: [run], device: "cpu" });
  assert.match(format.badge(node, onCpu, EN).text, /^3.0x, 0.6 s saved, 10 full/); // less work is less work anywhere
  const compiled = format.badge(entry, onCpu, EN); // but nothing of it is that node's
  assert.equal(compiled.text, "as ComfyUI: 512×512, on a CPU");
  assert.match(compiled.title, /On a CPU nothing is gained/);
});

test("each size says what its factor compares, or why there is none", () => {
  const [full, skipped] = skipping();
  const help = (s, device = "a GPU") => factorHelp(s, device, EN);
  assert.match(help(full), /the same work$/);
  assert.match(help(skipped), /work that is left out/);
  assert.equal(help(shape()), "");
  assert.match(help(unknown()), /Warm Up with measure, or Compare/);
  assert.match(help(unknown({ eager_ms: 30, median_ms: 0 })), /second call/);
  assert.match(help(unknown({ state: "eager" })), /as ComfyUI does/);
  assert.match(help(unknown({ state: "eager", step: "skipped" })), /Compare shows how long a run takes/);
  assert.match(help(unknown(), "cpu"), /On a CPU nothing is gained/);
  assert.match(help(unknown({ step: "full" }), "cpu"), /Warm Up with measure/);
  for (const name of ["steps", "full", "skipped", "not_known", "one_call", "streamed", "as_comfyui"]) assert.ok(ZH.gain[name]);
});

test("what is being prepared is on the line of its model's nodes, with a clock", () => {
  const preparing = { number: 3, model: "SDXL", size: "832x480x33", seconds: 12.7 };
  const shown = badge([shape()], { preparing });
  assert.deepEqual([shown.level, shown.text], ["preparing", "preparing 832×480×33… 12 s"]);
  assert.equal(badge([shape()], { preparing: { ...preparing, model: "Flux" } }).level, "fast");
  assert.equal(badge([shape()], { preparing: {} }).level, "fast");
  assert.equal(preparingText(preparing, ZH), "正在准备 832×480×33… 12 秒");
});

test("a view is about the last prompt, a workflow or everything, the model that ran last first", () => {
  const sdxl = model("SDXL", [shape({ prompt: 4 }), shape({ width: 64, prompt: 2, workflows: ["v", "w"] })]);
  const flux = model("Flux #2", [shape({ width: 8, prompt: 5, workflows: ["v"] })]);
  const all = stats([model("old", []), flux, sdxl, model("new", [])], {
    fallbacks: [{ where: "SDXL" }, { where: "Warm Up" }],
    skip: [{ model: "Flux", prompt: 5, workflow: "v" }, { model: "SDXL", prompt: 4, workflow: "w" }],
  });
  const widths = (found) => found.models.map((one) => [one.name, ...one.shapes.map((s) => s.width)]);
  assert.deepEqual(widths(scoped(all, "all")).slice(0, 2), [["Flux #2", 8], ["SDXL", 512, 64]]);
  assert.deepEqual(widths(scoped(all, "prompt")), [["Flux #2", 8]]);
  assert.deepEqual(widths(scoped(all, "workflow", "w")), [["SDXL", 512, 64]]);
  assert.deepEqual(widths(scoped(all, "workflow", "v")), [["Flux #2", 8], ["SDXL", 64]]);
  assert.deepEqual(widths(scoped(all, "workflow", undefined)), []);
  assert.deepEqual(scoped(all, "workflow", "w").fallbacks, [{ where: "SDXL" }]);
  assert.deepEqual(scoped(all, "prompt").skip, [all.skip[0]]);
  assert.deepEqual(scoped(all, "workflow", "w").skip, [all.skip[1]]);
  assert.equal(scoped(all, "all").fallbacks.length, 2);
  const scripts = stats([model("SDXL", [shape({ prompt: 0, workflows: [] })])]);
  assert.deepEqual(widths(scoped(scripts, "prompt")), []);
});

// What a comparison queues ------------------------------------------------------------------------------------------

const defined = (python_module, input, output) => ({ python_module, input: { required: input }, output });
const core = "nodes";
const saver = (input, output) => ({ ...defined(core, { ...input, filename_prefix: ["STRING"] }, output), output_node: true });
const ours = "custom_nodes.AnyShape";
const DEFINITIONS = {
  Loader: defined(core, {}, ["MODEL", "CLIP", "VAE"]),
  ControlNetLoader: defined(core, {}, ["CONTROL_NET"]),
  ControlNetApply: defined(core, { control_net: ["CONTROL_NET"] }, ["CONDITIONING"]),
  Lora: defined(core, { model: ["MODEL"], strength: ["FLOAT"] }, ["MODEL"]),
  KSampler: defined(core, { model: ["MODEL"], seed: ["INT"] }, ["LATENT"]),
  VAEDecode: defined(core, { samples: ["LATENT"], vae: ["VAE"] }, ["IMAGE"]),
  SaveImage: saver({ images: ["IMAGE"] }, []),
  SaveAnimatedWEBP: saver({ images: ["IMAGE"] }, ["IMAGE"]),
  SaveVideo: saver({ video: ["VIDEO"] }, ["VIDEO"]),
  OthersCombine: saver({ images: ["IMAGE"] }, ["FILENAMES"]),
  OthersRename: saver({ filenames: ["FILENAMES"] }, []),
  CreateVideo: defined(core, { images: ["IMAGE"], audio: ["AUDIO"] }, ["VIDEO"]),
  GetVideoComponents: defined(core, { video: ["VIDEO"] }, ["IMAGE", "AUDIO", "FLOAT"]),
  PreviewImage: defined(core, { images: ["IMAGE"] }, []),
  CheckpointSave: defined(core, { model: ["MODEL"], clip: ["CLIP"] }, []),
  PreviewAny: defined(core, { source: ["*"] }, []),
  AnyShapeCompileModel: defined(ours, { model: ["MODEL"], mode: [["auto"]] }, ["MODEL"]),
  AnyShapeAccelerate: defined(ours, { model: ["MODEL"], mode: [["auto"]], vae: ["VAE"] }, ["MODEL", "VAE", "CONTROL_NET"]),
  AnyShapeCompileControlNet: defined(ours, { control_net: ["CONTROL_NET"] }, ["CONTROL_NET"]),
  AnyShapeCompileVAE: defined(ours, { vae: ["VAE"] }, ["VAE"]),
  AnyShapeSkipBlocks: defined(ours, { model: ["MODEL"] }, ["MODEL"]),
  AnyShapeWarmUp: defined(ours, { model: ["MODEL"], vae: ["VAE"] }, ["MODEL", "VAE", "STRING"]),
  AnyShapeShapeCacheInfo: defined(ours, { after: ["*"] }, ["STRING", "STRING", "IMAGE"]),
};
const definition = (type) => DEFINITIONS[type];
const made = (class_type, inputs) => ({ class_type, inputs });
const prompt = () => ({
  1: made("Loader", {}),
  2: made("AnyShapeCompileModel", { model: ["1", 0], mode: "exact" }),
  3: made("Lora", { model: ["2", 0], strength: 1 }),
  4: made("AnyShapeSkipBlocks", { model: ["3", 0] }),
  5: made("AnyShapeWarmUp", { model: ["4", 0], vae: ["6", 0] }),
  6: made("AnyShapeCompileVAE", { vae: ["1", 2] }),
  7: made("KSampler", { model: ["5", 0], seed: 7 }),
  8: made("VAEDecode", { samples: ["7", 0], vae: ["5", 1] }),
  9: made("SaveImage", { images: ["8", 0], filename_prefix: "x" }),
  10: made("AnyShapeShapeCacheInfo", { after: ["8", 0] }),
  11: made("PreviewAny", { source: ["10", 0] }),
  12: made("PreviewAny", { source: ["5", 2] }),
  13: made("CheckpointSave", { model: ["3", 0], clip: ["1", 1] }),
});

test("bypassed nodes hand on what they got, and what only they could feed is left out", () => {
  const left = without(prompt(), (node) => node.class_type.startsWith("AnyShape"), definition);
  assert.deepEqual(Object.keys(left), ["1", "3", "7", "8", "9", "13"]);
  assert.deepEqual([left[3].inputs.model, left[7].inputs.model, left[8].inputs.vae], [["1", 0], ["3", 0], ["1", 2]]);
});

test("a comparison queues four prompts and leaves the given one as it is", () => {
  const given = prompt();
  const queue = runs(given, definition, "salt");
  assert.deepEqual(given, prompt());
  assert.deepEqual(queue.map((one) => one.way), ["without", "without", "with", "with"]);
  const [timed, plain, first, fast] = queue.map((one) => one.prompt);
  assert.deepEqual(Object.keys(timed), ["1", "2", "3", "7", "8", "9"]);
  assert.equal(timed[2].inputs.mode, "time exact");
  assert.deepEqual(Object.keys(plain), ["1", "3", "7", "8", "9"]);
  assert.deepEqual(Object.keys(first), ["1", "2", "3", "4", "6", "7", "8", "9"]);
  assert.deepEqual([fast[7].inputs.model, fast[8].inputs.vae], [["4", 0], ["6", 0]]);
  for (const one of [timed, plain, first, fast]) {
    assert.equal(one[7].inputs.seed, 7);
    assert.deepEqual(one[9], made("PreviewImage", { images: ["8", 0] })); // not saved
  }
});

const filmed = () => ({
  ...prompt(),
  20: made("SaveAnimatedWEBP", { images: ["8", 0], filename_prefix: "x", fps: 6 }),
  21: made("CreateVideo", { images: ["20", 0], fps: 24 }),
  22: made("SaveVideo", { video: ["21", 0], filename_prefix: "x", format: "auto" }),
  23: made("SaveVideo", { video: ["22", 0], filename_prefix: "y", format: "mp4" }),
  24: made("OthersCombine", { images: ["8", 0], filename_prefix: "x" }),
});

test("animations and videos are not saved: their frames are previews, which nodes that save hand on", () => {
  const [plain] = runs(filmed(), definition, "salt").map((one) => one.prompt);
  const shown = Object.entries(plain).filter(([, node]) => node.class_type === "PreviewImage");
  assert.deepEqual(Object.fromEntries(shown.map(([id, node]) => [id, node.inputs.images])), {
    9: ["8", 0], "20 preview": ["8", 0], "24 preview": ["8", 0],
    "22 preview": ["22 frames", 0], "23 preview": ["23 frames", 0],
  });
  assert.deepEqual(plain["22 frames"], made("GetVideoComponents", { video: ["21", 0] }));
  assert.deepEqual(plain["23 frames"], made("GetVideoComponents", { video: ["21", 0] }));
  assert.deepEqual(plain[21].inputs.images, ["8", 0]);
  assert.deepEqual(Object.values(plain).filter((node) => "filename_prefix" in node.inputs), []);
});

test("what cannot be a preview is saved as ever", () => {
  const others = { ...filmed(), 25: made("OthersRename", { filenames: ["24", 0], filename_prefix: "x" }) };
  const saved = (given, known) => {
    const left = Object.entries(runs(given, known, "salt")[3].prompt).filter(([, node]) => "filename_prefix" in node.inputs);
    return left.map(([id]) => id);
  };
  assert.deepEqual(saved(others, definition), ["24", "25"]); // its files are for another node
  assert.deepEqual(saved({ ...prompt(), 20: made("OthersCombine", { images: ["7", 0], filename_prefix: "x" }) }, definition), ["20"]);
  const without = (gone) => (type) => (type === gone ? undefined : definition(type));
  assert.deepEqual(saved(filmed(), without("GetVideoComponents")), ["22", "23"]);
  assert.deepEqual(saved(prompt(), without("PreviewImage")), ["9"]);
});

const file = (filename) => ({ filename, subfolder: "", type: "temp" });
const STORED = { "a.png": [1, 2, 200], "b.png": [1, 5, 190], "c.png": [7, 7, 7], "wide.png": [1, 2, 3, 4] };
const pixels = async ({ filename }) => STORED[filename] ?? null;
const compared = (plain, fast) => difference(plain, fast, pixels, EN);

test("the largest difference is of all pictures, and files that are none are counted", async () => {
  const [still, moving] = [{ images: [file("a.png"), file("c.png")] }, { images: [file("a.png")], animated: [true] }];
  const video = { images: [file("a.mp4")], animated: [true] };
  const found = await compared({ 1: still, 2: video, 3: { text: ["x"] }, 4: moving }, { 1: { images: [file("b.png"), file("c.png")] }, 2: video, 4: moving });
  assert.deepEqual(found, { largest: 10, animated: true, others: 1 });
  assert.deepEqual(inWords(found, EN), [
    "Largest difference of the pictures: 10 of 255 levels.",
    "Of animated pictures, the first frame was compared.",
    "Files that are not pictures and were not compared: 1.",
  ]);
  const films = await compared({ 2: video }, { 2: video });
  assert.deepEqual(inWords(films, EN), ["Files that are not pictures and were not compared: 1."]);
  assert.deepEqual(inWords(await compared({ 1: still }, {}), ZH), ["没有可对比的图片。"]);
  await assert.rejects(compared({ 1: still }, { 1: { images: [file("wide.png")] } }), /different sizes/);
});

test("what uses a model runs again each time, and what loads one does not", () => {
  const salts = runs(prompt(), definition, "salt").map((one) =>
    Object.fromEntries(Object.entries(one.prompt).map(([id, node]) => [id, node.inputs.anyshape_compare])),
  );
  for (const salt of salts) assert.deepEqual([salt[1], salt[9]], [undefined, undefined]);
  assert.equal(new Set(salts.map((salt) => salt[7])).size, 4);
  assert.equal(new Set(salts.map((salt) => salt[8])).size, 4);
  assert.notEqual(salts[2][2], salts[3][2]); // a model in another form, as between the two runs without
});

test("a workflow without a node of ours runs again too: the server may put some into the prompt", () => {
  const plain = without(prompt(), (node) => node.class_type.startsWith("AnyShape"), definition);
  const ids = runs(plain, definition, "salt").map((one) =>
    Object.keys(one.prompt).filter((id) => one.prompt[id].inputs.anyshape_compare),
  );
  assert.deepEqual(ids, [["7", "8"], ["7", "8"], ["7", "8"], ["7", "8"]]);
});

test("where ComfyUI's own forwards are timed, so are those of compiled ControlNets, and Accelerate times as well", () => {
  const controlled = (compile) => ({
    ...prompt(),
    2: made(compile, { model: ["1", 0], mode: "auto" }),
    14: made("ControlNetLoader", {}),
    15: made("AnyShapeCompileControlNet", { control_net: ["14", 0] }),
    16: made("ControlNetApply", { control_net: ["15", 0], seed: 1 }),
    17: made("KSampler", { model: ["5", 0], seed: 1, positive: ["16", 0] }),
  });
  for (const compile of ["AnyShapeCompileModel", "AnyShapeAccelerate"]) {
    const [timed, plain] = runs(controlled(compile), definition, "salt").map((one) => one.prompt);
    assert.deepEqual([timed[2].inputs.mode, timed[16].inputs.control_net], ["time auto", ["15", 0]]);
    assert.deepEqual([plain[2], plain[15], plain[16].inputs.control_net], [undefined, undefined, ["14", 0]]);
  }
  const off = controlled("AnyShapeCompileModel");
  off[2].inputs.mode = "off";
  assert.equal(runs(off, definition, "salt")[0].prompt[15], undefined); // nothing would be timed
});

test("Compile Model is bypassed where its mode is off or comes from another node", () => {
  for (const mode of ["off", ["1", 0], "regions"]) {
    const changed = prompt();
    changed[2].inputs.mode = mode;
    assert.equal(runs(changed, definition, "salt")[0].prompt[2], undefined);
  }
});
