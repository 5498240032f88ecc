/**
 * The state of a collapsed node, whose line is not shown: a strip along the bottom of its title.
 *
 * Its colour is that of the state, and it is the longer the more of the model is fast, for those who see no colours.
 * Nothing of it is saved: a node's own colours stay the user's.
 */

import { el } from "./dom.js";

const SHARES = { fast: 1, preparing: 1, partly: 0.5, as_comfyui: 0.25, none: 0.125, off: 0.125 }; // of the title's length
const HEIGHT = 4; // pixels of the canvas, as all here
const INSET = 10; // on both sides: titles have round corners

let sheet = null; // for nodes that are elements; the front end may make those again at any time, rules stay

/** Paints the strip of a node that is drawn on the canvas. level: gives its state, as `badge` of format.js has it. */
export function drawWhenCollapsed(node, level) {
  const drawn = node.onDrawForeground;
  node.onDrawForeground = function (context, ...rest) {
    const result = drawn?.call(this, context, ...rest);
    if (this.flags?.collapsed) strip(context, this.renderingSize?.[0] ?? this._collapsed_width ?? 0, level());
    return result;
  };
}

function strip(context, width, level) {
  context.save();
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--anyshape-${level}`) || "#999";
  context.fillRect(INSET, -HEIGHT, (width - 2 * INSET) * SHARES[level], HEIGHT);
  context.restore();
}

/** The strips of nodes that are elements: those in which there is no line. levels: [[id, level], ...]. */
export function showCollapsed(levels) {
  const rule = ([id, level]) =>
    `.lg-node[data-node-id="${CSS.escape(String(id))}"]:not(:has(.anyshape-badge))::after { content: ""; position: absolute; ` +
    `left: ${INSET}px; bottom: 0; height: ${HEIGHT}px; width: calc((100% - ${2 * INSET}px) * ${SHARES[level]}); ` +
    `background: var(--anyshape-${level}); pointer-events: none; }`;
  if (!sheet) document.head.append((sheet = el("style", { id: "anyshape-collapsed" })));
  const rules = levels.map(rule).join("\n");
  if (sheet.textContent !== rules) sheet.textContent = rules;
}
