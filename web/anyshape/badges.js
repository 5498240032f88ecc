/** A line at the bottom of each of our nodes that says how its model runs, and a strip where it is collapsed. */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { drawWhenCollapsed, showCollapsed } from "./collapsed.js";
import { el, setText, setTitle } from "./dom.js";
import { badge, entryOf } from "./format.js";
import * as store from "./store.js";
import { isEnglish, language, words } from "./texts.js";

const PROGRESS = "$$node-text-preview"; // ComfyUI's widget for the text under a node
const PREPARING = "preparing "; // how that text begins, of nodes/live.py; other texts stay
const HEIGHT = 28; // pixels; fixed, so that a node never changes its size
const MARGIN = 4; // of the element within its line
const TYPES = new Set([
  "AnyShapeAccelerate",
  "AnyShapeCompileModel",
  "AnyShapeCompileVAE",
  "AnyShapeCompileControlNet",
  "AnyShapeSkipBlocks",
  "AnyShapeWarmUp",
]);

const badges = new Map(); // node -> its element
const heights = new WeakMap(); // node -> its height without a text under it
const grown = new WeakSet(); // nodes with such a text, which makes them higher
const queued = new Set(); // ids of prompts from this page: ComfyUI tells only who queued a prompt that it begins
const cached = new Set(); // "workflow node" of those that ComfyUI did not run, because their inputs were the same

/** For the extension's `setup`. */
export function listen() {
  api.addEventListener("execution_cached", ({ detail }) => {
    detail.nodes.forEach((id) => cached.add(`${rootGraph()?.id} ${id}`));
    store.refresh();
  });
  api.addEventListener("execution_start", ({ detail }) => queued.add(detail.prompt_id));
  api.addEventListener("graphChanged", store.refresh); // a node may have been bypassed or muted
  api.addEventListener("progress_text", () => setTimeout(store.refresh)); // after ComfyUI has put it under the node
}

/** For the extension's `nodeCreated`. */
export function addBadge(node) {
  if (!TYPES.has(node.comfyClass) || !node.addDOMWidget) return;
  const element = el("div", { className: "anyshape-badge" });
  addLine(node, element, { map: badges, value: element, height: HEIGHT, most: HEIGHT });
  drawWhenCollapsed(node, () => element.dataset.level ?? "none");
  node.setSize?.([node.size[0], node.computeSize()[1]]);
}

/**
 * Puts an element into a node, which is neither saved with the workflow nor sent with a prompt, and `value` into `map`
 * for as long as the node is there. height, most: pixels.
 */
export function addLine(node, element, { map, value, height, most }) {
  const heights = { getMinHeight: () => height, getMaxHeight: () => most };
  const options = { serialize: false, hideOnZoom: false, margin: MARGIN, ...heights };
  node.addDOMWidget("anyshape", "anyshape", element, options).serialize = false;
  map.set(node, value);
  const removed = node.onRemoved;
  node.onRemoved = function (...args) {
    map.delete(node);
    return removed?.apply(this, args);
  };
  setTimeout(store.refresh); // a loaded node has its id only then
}

/** Shows `stats` on every node of ours. */
export function show(stats) {
  if (!badges.size) return;
  const root = rootGraph();
  const found = idsOf(root);
  for (const [node, element] of badges) {
    const { id, mode } = found.get(node) ?? { id: String(node.id), mode: node.mode };
    const where = { id, type: node.comfyClass, workflow: root?.id, queued, cached: cached.has(`${root?.id} ${id}`) };
    const shown = badge(entryOf(stats, where), stats, words(), language(), mode, root?.id);
    if (element.dataset.level !== shown.level && node.flags?.collapsed) node.setDirtyCanvas?.(true, true);
    element.dataset.level = shown.level;
    element.classList.toggle("anyshape-loss", Boolean(shown.loss));
    setText(element, shown.text);
    setTitle(element, shown.title);
    tidy(node, shown);
  }
  showCollapsed([...badges].map(([node, element]) => [node.id, element.dataset.level]));
}

/**
 * The text under a node, which the server writes in English: in another language it is what the tooltip has besides the
 * line. It ends once the model is no longer prepared: the line says the rest. Newer front ends end every text with its
 * prompt, and leave the node as high as it was with the text.
 */
function tidy(node, { level, title }) {
  const text = node.widgets?.find((widget) => widget.name === PROGRESS);
  if (!text) {
    if (grown.delete(node)) setHeight(node);
    else heights.set(node, node.size[1]);
    return;
  }
  const said = String(text.value ?? "");
  const begins = [PREPARING, words().preparing.split("{")[0]];
  if (level !== "preparing" && begins.some((begin) => said.startsWith(begin))) {
    node.removeWidget?.(text);
    grown.delete(node);
    setHeight(node);
    return;
  }
  grown.add(node);
  const translated = title.split("\n").slice(1).join("\n") || title;
  if (said && !isEnglish() && said !== translated) text.value = translated;
}

/** As it was without a text. */
function setHeight(node) {
  node.setSize?.([node.size[0], heights.get(node) ?? node.computeSize()[1]]);
}

export const rootGraph = () => app.rootGraph ?? app.graph?.rootGraph ?? app.graph;

/** node -> {id: "4", or "7:4" within the subgraph of node 7, as the server knows it; mode: that of node 7 first}. */
function idsOf(graph, prefix = "", outer = 0, found = new Map()) {
  for (const node of graph?.nodes ?? graph?._nodes ?? []) {
    const mode = outer || node.mode;
    found.set(node, { id: `${prefix}${node.id}`, mode });
    if (node.subgraph) idsOf(node.subgraph, `${prefix}${node.id}:`, mode, found);
  }
  return found;
}
