/** A table for each model with a line for each size, and its two costs as bars: for the panel and Shape Cache Info. */

import { el, setText, setTitle, sync } from "./dom.js";
import { files, inShort, megabytes, milliseconds, reasons, seconds, shares, size, sizes, speed } from "./format.js";
import { factorHelp, isLoss, times } from "./gain.js";
import { count, fill } from "./phrases.js";
import { language, words } from "./texts.js";

const BREAK = "\u200b"; // where a line may break that is too long for its column: a video's frames go below its size
const COLUMNS = ["size", "batch", "state", "calls", "first", "median", "factor", "memory"];

/**
 * Puts the tables of `stats` into `parent`; those of models without a call since the last clear are left out. Reasons are
 * there in their short form, with the long one as a tooltip.
 */
export function showTables(parent, stats) {
  const named = files(stats);
  const models = stats.models.filter((model) => model.shapes.length);
  const show = (part, model) => showModel(part, model, named.get(model.name), stats);
  sync(parent, models, (model) => model.name, makeModel, show);
}

function makeModel() {
  const head = el("tr", {}, ...COLUMNS.map(() => el("th", { scope: "col" })));
  const table = el("table", { className: "anyshape-table" }, el("caption"), el("thead", {}, head), el("tbody"));
  return el("div", { className: "anyshape-model" }, table, el("ul", { className: "anyshape-reasons" }));
}

function showModel(part, model, file, stats) {
  const texts = words();
  const [table, list] = part.children;
  const head = table.tHead.rows[0];
  setText(table.caption, caption(model, file, texts));
  COLUMNS.forEach((name, index) => {
    setText(head.cells[index], texts.columns[name].title);
    setTitle(head.cells[index], texts.columns[name].help);
  });
  const work = stats.preparing?.model === model.name;
  const levelOf = (s) => (s.first_call_seconds > 0 || !work ? speed(s, stats.device) : "preparing"); // its first call goes on
  const first = shares(model.shapes.map((s) => s.first_call_seconds));
  const now = shares(model.shapes.map((s) => s.median_ms));
  const lines = model.shapes.map((s, i) => ({ shape: s, level: levelOf(s), bars: [first[i], now[i]], device: stats.device }));
  sync(table.tBodies[0], lines, (line) => line.shape.key, () => el("tr"), showShape);
  sync(list, reasons(model.shapes, texts, language()), (one) => one.where + one.reason, () => el("li"), (item, { where, reason }) => {
    setText(item, where + inShort(reason, stats));
    setTitle(item, reason);
  });
}

function caption(model, file, texts) {
  const counted = [
    count(texts.counts.sizes, sizes(model.shapes), language()),
    count(texts.counts.recompiles, model.recompiles, language()),
  ];
  const name = fill(texts.brackets, file ? { text: file, more: model.name } : { text: model.name, more: texts.kinds[model.kind] });
  return `${name}${texts.colon}${counted.join(texts.comma)}`;
}

function showShape(row, { shape, level, bars, device }) {
  if (!row.cells.length) row.append(...COLUMNS.map(() => el("td")));
  const texts = words();
  row.dataset.state = shape.state;
  row.dataset.level = level;
  setTitle(row, shape.key);
  const state = texts.states[level];
  const cells = [
    shape.frames > 1 ? size(shape).replace(/×(?=\d+$)/, `${BREAK}×`) : size(shape),
    shape.batch,
    shape.step ? fill(texts.brackets, { text: state.title, more: texts.steps[shape.step] }) : state.title,
    shape.calls,
    shape.first_call_seconds > 0 ? seconds(shape.first_call_seconds) : "–",
    milliseconds(shape.median_ms),
    times(shape.factor),
    megabytes(shape.bytes),
  ];
  cells.forEach((text, index) => setText(row.cells[index], String(text)));
  setTitle(row.cells[2], `${shape.state}${texts.colon}${texts.technical[shape.state]}`);
  setTitle(row.cells[5], shape.eager_ms > 0 ? fill(texts.eager_ms, { ms: milliseconds(shape.eager_ms) }) : "");
  setTitle(row.cells[6], factorHelp(shape, device, texts));
  row.cells[6].classList.toggle("anyshape-loss", isLoss(shape.factor, device));
  bars.forEach((share, index) => {
    row.cells[4 + index].className = "anyshape-bar";
    row.cells[4 + index].style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
  });
}
