/**
 * The prompts of a comparison: without AnyShape and with it. Pure, as format.js.
 *
 * prompt: in ComfyUI's API format. definition(class): of a node, as /object_info has it; undefined if there is none.
 */

const COMPILE = "AnyShapeCompileModel";
const TIMING = new Set([COMPILE, "AnyShapeAccelerate"]); // nodes that can time ComfyUI's own forwards
const CONTROL = "AnyShapeCompileControlNet"; // what it gives is timed with the model that it steers
const LEFT_OUT = new Set(["AnyShapeWarmUp", "AnyShapeShapeCacheInfo"]); // in runs with AnyShape: they make no picture
const SKIP = "AnyShapeSkipBlocks";
const TIMED = ["auto", "exact"]; // modes in which ComfyUI's own forwards can be timed
const MODELS = new Set(["MODEL", "VAE", "CONTROL_NET"]);
const PREVIEW = "PreviewImage";
const FRAMES = "GetVideoComponents"; // its first output are a video's pictures
const SALT = "anyshape_compare"; // an input that no node has: ComfyUI leaves it out, and takes nothing from its cache

export const isOurs = (type, definition) => {
  const module = definition(type)?.python_module;
  return module !== undefined && module === definition(COMPILE)?.python_module;
};

/** Whether steps may be skipped: work that is left out is a gain on a CPU, too. */
export const skips = (prompt) => Object.values(prompt).some((node) => node.class_type === SKIP);

/**
 * What is queued, in order: {way: "without" | "with", prompt}. The first of each pair pays for what runs once, the
 * second is measured. While the first runs, ComfyUI's own forwards are timed, for the factors of its sizes.
 */
export function runs(prompt, definition, salt) {
  const ours = (node) => isOurs(node.class_type, definition);
  const nodes = salted(prompt, ours, definition);
  const made = [timed(prompt, ours, definition), without(prompt, ours, definition)].map((one) => ["without", one]);
  const fast = without(prompt, (node) => LEFT_OUT.has(node.class_type), definition);
  made.push(["with", fast], ["with", fast]);
  return made.map(([way, one], index) => ({ way, prompt: quiet(withSalt(one, nodes, `${salt} ${index}`), definition) }));
}

/** The prompt as if the nodes were bypassed; what only they could feed goes too. */
export function without(prompt, bypassed, definition) {
  const link = (from) => source(prompt, from, bypassed, definition);
  const left = Object.entries(prompt).filter(([, node]) => !bypassed(node));
  const made = new Map(left.map(([id, node]) => [id, { ...node, inputs: mapped(node.inputs, link) }]));
  for (let gone = true; gone; ) {
    gone = false;
    for (const [id, node] of made) {
      if (Object.values(node.inputs).every((value) => value !== null && (!isLink(value) || made.has(value[0])))) continue;
      made.delete(id);
      gone = true;
    }
  }
  return Object.fromEntries(made);
}

/** What a link comes from if the nodes are bypassed; null if from nothing. */
function source(prompt, [id, slot], bypassed, definition) {
  while (prompt[id] && bypassed(prompt[id])) {
    const through = inputOf(prompt[id], definition(prompt[id].class_type).output?.[slot], definition);
    if (!through) return null;
    [id, slot] = through;
  }
  return [id, slot];
}

const isLink = (value) => Array.isArray(value) && value.length === 2 && typeof value[1] === "number";
const mapped = (inputs, link) =>
  Object.fromEntries(Object.entries(inputs).map(([name, value]) => [name, isLink(value) ? link(value) : value]));

/** The link into a node that its output of this type passes on. */
function inputOf(node, type, definition) {
  const { required, optional } = definition(node.class_type).input ?? {};
  const names = Object.entries({ ...required, ...optional }).filter(([, spec]) => spec[0] === type);
  return names.map(([name]) => node.inputs[name]).find(isLink);
}

/** Without our nodes, but for those that time ComfyUI's own forwards. */
function timed(prompt, ours, definition) {
  const times = (node) => TIMING.has(node.class_type) && TIMED.includes(node.inputs.mode);
  const any = Object.values(prompt).some(times);
  const stays = (node) => times(node) || (any && node.class_type === CONTROL);
  const made = without(prompt, (node) => ours(node) && !stays(node), definition);
  const changed = (node) => (times(node) ? { ...node, inputs: { ...node.inputs, mode: `time ${node.inputs.mode}` } } : node);
  return Object.fromEntries(Object.entries(made).map(([id, node]) => [id, changed(node)]));
}

/**
 * The nodes that must run again: what uses a model, and ours. So each measured run gets its model in another form than
 * the run before had it, and pays as much for that. What loads a model, or changes one and hands it on, does not run
 * again for its own sake.
 */
export function salted(prompt, ours, definition) {
  const again = ([, node]) => ours(node) || [...used(prompt, node, definition)].some((type) => !handsOn(node, type, definition));
  return new Set(Object.entries(prompt).filter(again).map(([id]) => id));
}

/** The types of models that a node takes from others. */
function used(prompt, node, definition) {
  const links = Object.values(node.inputs).filter((value) => isLink(value) && prompt[value[0]]);
  const types = links.map((link) => outputOf(prompt, link, definition));
  return new Set(types.filter((type) => MODELS.has(type)));
}

const outputOf = (prompt, [id, slot], definition) => definition(prompt[id]?.class_type)?.output?.[slot];
const handsOn = (node, type, definition) => definition(node.class_type)?.output?.includes(type);

function withSalt(prompt, nodes, salt) {
  const changed = ([id, node]) => [id, nodes.has(id) ? { ...node, inputs: { ...node.inputs, [SALT]: salt } } : node];
  return Object.fromEntries(Object.entries(prompt).map(changed));
}

/** Pictures and videos are looked at, not saved four times, and models are not saved at all. */
function quiet(prompt, definition) {
  const models = (node) => !definition(node.class_type)?.output?.length && used(prompt, node, definition).size;
  const left = Object.fromEntries(Object.entries(prompt).filter(([, node]) => !models(node)));
  const saved = new Map(Object.entries(left).map(([id, node]) => [node, seen(left, id, definition)]).filter(([, as]) => as));
  const isSaver = (node) => saved.has(node);
  const made = without(left, isSaver, definition);
  for (const [id, node] of Object.entries(left)) {
    if (!isSaver(node)) continue;
    const { type, link } = saved.get(node);
    const from = source(left, link, isSaver, definition);
    // the node on the page shows these as if it had made them; one that shows videos could not
    const shown = node.class_type === "SaveImage" ? id : `${id} preview`;
    const images = type === "VIDEO" ? [`${id} frames`, 0] : from;
    if (type === "VIDEO") made[images[0]] = { class_type: FRAMES, inputs: { video: from } };
    made[shown] = { class_type: PREVIEW, inputs: { images } };
  }
  return made;
}

/** {type, link} of what a node would save, if it can be looked at instead; null else. */
function seen(prompt, id, definition) {
  const { class_type, inputs } = prompt[id];
  const known = definition(class_type);
  const type = ["IMAGE", "VIDEO"].find((one) => known && inputOf(prompt[id], one, definition));
  if (!type || !known.output_node || !("filename_prefix" in inputs)) return null;
  const link = inputOf(prompt[id], type, definition);
  if (outputOf(prompt, link, definition) === "LATENT") return null; // some decode what they save
  const handsOnMore = Object.values(prompt).some((node) =>
    Object.values(node.inputs).some((value) => isLink(value) && value[0] === id && known.output[value[1]] !== type),
  );
  const needed = type === "VIDEO" ? [PREVIEW, FRAMES] : [PREVIEW];
  return handsOnMore || !needed.every(definition) ? null : { type, link };
}
