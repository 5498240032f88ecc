/** Shape Cache Info: its tables and bars on the node itself, new after each run. */

import { addLine } from "./badges.js";
import { el, setText } from "./dom.js";
import { complete } from "./store.js";
import { showTables } from "./tables.js";
import { words } from "./texts.js";

const TYPE = "AnyShapeShapeCacheInfo";
const HEIGHT = 180; // pixels at least; the node may be made larger
const MOST = 4000;
const SIZE = [460, 320]; // of a new node

const shown = new Map(); // node -> what `show` needs

/** For the extension's `nodeCreated`. */
export function addInfo(node) {
  if (node.comfyClass !== TYPE || !node.addDOMWidget) return;
  const parts = { empty: el("p", { className: "anyshape-note" }), tables: el("div", { className: "anyshape-tables" }) };
  const element = el("div", { className: "anyshape-info", tabIndex: 0 }, parts.empty, parts.tables);
  addLine(node, "anyshape", element, HEIGHT, MOST);
  node.setSize?.([Math.max(node.size[0], SIZE[0]), Math.max(node.size[1], SIZE[1])]);
  shown.set(node, { element, parts, stats: complete({}) });
  chain(node, "onExecuted", (output) => {
    const [stats] = output?.anyshape ?? [];
    if (stats) shown.get(node).stats = complete(stats);
    show(node);
  });
  chain(node, "onRemoved", () => shown.delete(node));
  show(node);
}

/** In the language of now. */
export function showAll() {
  [...shown.keys()].forEach(show);
}

function show(node) {
  const { element, parts, stats } = shown.get(node);
  const none = !stats.models.some((model) => model.shapes.length);
  element.setAttribute("aria-label", words().title);
  parts.empty.hidden = !none;
  setText(parts.empty, words().empty);
  showTables(parts.tables, stats);
}

function chain(node, name, more) {
  const before = node[name];
  node[name] = function (...args) {
    const result = before?.apply(this, args);
    more(...args);
    return result;
  };
}
