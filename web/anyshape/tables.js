/** A table a model, a line a size, with its two costs as bars: what the panel and Shape Cache Info have in common. */

import { el, setText, setTitle, sync } from "./dom.js";
import { count, fill, megabytes, milliseconds, seconds, shares, size, sizes, step, why } from "./format.js";
import { language, words } from "./texts.js";

const BREAK = "\u200b"; // where a line may break that is too long for its column: a video's frames go below its size
const COLUMNS = ["size", "batch", "state", "calls", "first", "median", "memory"];

/** Puts the tables of `stats` into `parent`; those of models without a call since the last clear are left out. */
export function showTables(parent, stats) {
  const models = stats.models.filter((model) => model.shapes.length);
  sync(parent, models, (model) => model.name, makeModel, showModel);
}

function makeModel() {
  const head = el("tr", {}, ...COLUMNS.map(() => el("th", { scope: "col" })));
  return el("table", { className: "anyshape-table" }, el("caption"), el("thead", {}, head), el("tbody"));
}

function showModel(table, model) {
  const texts = words();
  const [head, body] = [table.tHead.rows[0], table.tBodies[0]];
  setText(table.caption, caption(model, texts));
  COLUMNS.forEach((name, index) => {
    setText(head.cells[index], texts.columns[name].title);
    setTitle(head.cells[index], texts.columns[name].help);
  });
  const first = shares(model.shapes.map((s) => s.first_call_seconds));
  const now = shares(model.shapes.map((s) => s.median_ms));
  const lines = model.shapes.flatMap((s, i) => [
    { key: s.key, shape: s, bars: [first[i], now[i]] },
    ...why(s).map((reason, place) => ({ key: `${s.key} why ${place}`, reason })),
  ]);
  sync(body, lines, (line) => line.key, makeLine, showLine);
}

function caption(model, texts) {
  const counted = [
    count(texts.counts.sizes, sizes(model.shapes), language()),
    count(texts.counts.recompiles, model.recompiles, language()),
  ];
  return `${model.name} (${model.kind}): ${counted.join(", ")}`;
}

const makeLine = () => el("tr");

function showLine(row, line) {
  if (line.reason) showReason(row, line.reason);
  else showShape(row, line.shape, line.bars);
}

function showReason(row, reason) {
  row.className = "anyshape-reason";
  if (!row.cells.length) row.append(el("td", { colSpan: COLUMNS.length }));
  setText(row.cells[0], reason);
}

function showShape(row, shape, bars) {
  if (!row.cells.length) row.append(...COLUMNS.map(() => el("td")));
  row.dataset.state = shape.state;
  setTitle(row, shape.key);
  const kind = step(shape.key);
  const texts = [
    shape.frames > 1 ? size(shape).replace(/×(?=\d+$)/, `${BREAK}×`) : size(shape),
    shape.batch,
    kind ? `${shape.state} (${words().steps[kind]})` : shape.state,
    shape.calls,
    seconds(shape.first_call_seconds),
    milliseconds(shape.median_ms),
    megabytes(shape.bytes),
  ];
  texts.forEach((text, index) => setText(row.cells[index], String(text)));
  setTitle(row.cells[5], shape.eager_ms > 0 ? fill(words().eager_ms, { ms: milliseconds(shape.eager_ms) }) : "");
  bars.forEach((share, index) => {
    row.cells[4 + index].className = "anyshape-bar";
    row.cells[4 + index].style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
  });
}
