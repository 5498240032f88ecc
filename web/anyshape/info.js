/** Shape Cache Info: the tables and bars on the node itself, of now; the node's outputs are of the moment of its run. */

import { addLine } from "./badges.js";
import { el, setText } from "./dom.js";
import { emptyText, makeScope } from "./scope.js";
import { showTables } from "./tables.js";
import { words } from "./texts.js";

const TYPE = "AnyShapeShapeCacheInfo";
const HEIGHT = 180; // pixels at least; the node may be made larger
const MOST = 4000;
const SIZE = [460, 320]; // of a new node

const shown = new Map(); // node -> its element's parts

/** For the extension's `nodeCreated`. */
export function addInfo(node) {
  if (node.comfyClass !== TYPE || !node.addDOMWidget) return;
  const parts = {
    scope: makeScope("info", "workflow"),
    empty: el("p", { className: "anyshape-note" }),
    tables: el("div", { className: "anyshape-tables" }),
  };
  const children = [parts.scope.element, parts.empty, parts.tables];
  const element = el("div", { className: "anyshape-info", role: "region", tabIndex: 0 }, ...children);
  addLine(node, element, { map: shown, value: { element, ...parts }, height: HEIGHT, most: MOST });
  node.setSize?.([Math.max(node.size[0], SIZE[0]), Math.max(node.size[1], SIZE[1])]);
}

/** Shows `stats` on every such node. */
export function show(stats) {
  const texts = words();
  for (const { element, scope, empty, tables } of shown.values()) {
    element.setAttribute("aria-label", texts.title);
    const chosen = scope.apply(stats);
    empty.hidden = chosen.models.some((model) => model.shapes.length);
    setText(empty, emptyText(stats));
    showTables(tables, chosen);
  }
}
