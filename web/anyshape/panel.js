/** The panel "Shape cache": every size that has run, the graphs' budget, what ran slower and why. */

import { compare, isRunning, status } from "./compare.js";
import { el, setText, setTitle, sync } from "./dom.js";
import { budget, fallbacks, inShort, inexact, place, title, together, totals } from "./format.js";
import { gain, gainText, isLoss, stepsText } from "./gain.js";
import { count, fill } from "./phrases.js";
import { emptyText, makeScope } from "./scope.js";
import * as store from "./store.js";
import { showTables } from "./tables.js";
import { language, words } from "./texts.js";
import { warmUpThese, warmUps } from "./warm_up.js";

const SAID_FOR = 4000; // milliseconds

/** The panel's element, and `show(stats)`. Its parts stay; only texts and table lines change. */
export function makePanel() {
  const parts = {
    title: el("h2"),
    gain: el("p", { className: "anyshape-gain" }),
    totals: el("p", { className: "anyshape-totals" }),
    bar: el("div", { className: "anyshape-budget", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }),
    budget: el("p", { className: "anyshape-note" }),
    compare: el("p", { className: "anyshape-compare", role: "status" }),
    empty: el("p", { className: "anyshape-note" }),
    tables: el("div", { className: "anyshape-tables", role: "region", tabIndex: 0 }),
    inexact: list(),
    skip: list(),
    fallbacks: list(),
    said: el("span", { role: "status" }),
    work: el("span", { className: "anyshape-work", role: "status" }),
  };
  const line = el("p", { className: "anyshape-said" }, parts.work, parts.said);
  parts.scope = makeScope("panel", "all", parts.work);
  const warm = () => warmUpThese(parts.scope.part(store.stats).models);
  const actions = { clear: () => store.clear(false), free: () => store.clear(true), copy: copyReport, compare, warm };
  const buttons = Object.entries(actions).map(([name, action]) => button(name, action, parts.said));
  const element = el(
    "section",
    { className: "anyshape-panel" },
    el(
      "header",
      {},
      ...[parts.title, parts.gain, parts.totals, parts.bar, parts.budget],
      el("div", { className: "anyshape-buttons" }, ...buttons),
    ),
    parts.compare,
    line,
    parts.scope.element,
    el("div", { className: "anyshape-scroll" }, ...lists(parts)),
  );
  return { element, show: (stats) => showPanel(element, parts, buttons, stats) };
}

const lists = (parts) => [parts.empty, parts.tables, parts.inexact, parts.skip, parts.fallbacks];
const list = () => el("div", { className: "anyshape-list" }, el("h3"), el("ul"));

function button(name, action, said) {
  const say = (text) => {
    setText(said, text);
    clearTimeout(said.timer);
    said.timer = setTimeout(() => setText(said, ""), SAID_FOR);
  };
  const made = el("button", { type: "button", className: "anyshape-button" });
  made.dataset.action = name;
  made.addEventListener("click", async () => {
    try {
      await action();
      say(words().done[name] ?? "");
    } catch (error) {
      say(fill(words().failed, { error: error.message }));
    }
  });
  return made;
}

/** Pages that are not served from this machine or by https have no clipboard; a selected text can be copied anywhere. */
async function copyReport() {
  const text = await store.report();
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, className: "anyshape-copied" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error(words().no_clipboard);
}

function showPanel(element, parts, buttons, stats) {
  const texts = words();
  element.setAttribute("aria-label", texts.title);
  parts.tables.setAttribute("aria-label", texts.title);
  setText(parts.title, texts.title);
  const chosen = parts.scope.apply(stats);
  showGain(parts.gain, chosen, texts);
  showCompare(parts.compare, buttons);
  setText(parts.totals, fill(texts.totals, totals(chosen, texts, language())));
  showBudget(parts, budget(stats.graphs), texts);
  parts.bar.hidden = parts.budget.hidden = !stats.graphs.budget_bytes && stats.device === "cpu"; // there can be none
  const hasRun = (one) => one.models.some((model) => model.shapes.length);
  parts.empty.hidden = hasRun(chosen);
  setText(parts.empty, emptyText(stats));
  buttons.forEach((one) => {
    setText(one, texts.buttons[one.dataset.action].title);
    one.title = texts.buttons[one.dataset.action].help;
  });
  showWarm(buttons, hasRun(chosen) && warmUps().length > 0);
  showTables(parts.tables, chosen);
  showList(parts.inexact, texts.inexact, inexact(chosen, texts));
  showList(parts.skip, texts.skip.title, together(chosen.skip.map((run) => skipLine(run, stats, texts))));
  const steps = fallbacks(chosen).map((f) => `${place(f.where, stats, texts)}${texts.comma}${count(texts.counts.times, f.count, language())}${texts.colon}${inShort(f.reason, chosen)}`);
  showList(parts.fallbacks, texts.fallbacks, steps, fallbacks(chosen).map((f) => f.reason));
}

/** The first line: how much faster than ComfyUI, or how to find out, or that there is nothing to gain. */
function showGain(line, stats, texts) {
  const shapes = stats.models.flatMap((model) => model.shapes);
  const found = gain(shapes);
  line.classList.toggle("anyshape-loss", isLoss(found?.factor, stats.device));
  const none = stats.device === "cpu" ? texts.gain.cpu : texts.gain.unknown;
  setText(line, found ? gainText(found, texts) : none);
  setTitle(line, [texts.gain.help, stepsText(shapes, texts)].filter(Boolean).join("\n"));
}

function showCompare(line, buttons) {
  const { text, loss } = status();
  setText(line, text);
  line.hidden = !text;
  line.classList.toggle("anyshape-loss", loss);
  buttons.find((one) => one.dataset.action === "compare").disabled = isRunning();
}

/** The button is there only where a Warm Up is. */
function showWarm(buttons, wanted) {
  const warm = buttons.find((one) => one.dataset.action === "warm");
  if (!wanted) warm.remove();
  else if (!warm.parentElement) buttons[0].parentElement.append(warm);
}

function showBudget(parts, graphs, texts) {
  const percent = graphs ? Math.round(100 * graphs.fraction) : 0;
  parts.bar.style.setProperty("--share", `${percent}%`);
  parts.bar.setAttribute("aria-valuenow", String(percent));
  parts.bar.setAttribute("aria-label", texts.budget.title);
  setText(parts.budget, graphs ? fill(texts.budget.used, graphs) : texts.budget.none);
}

function skipLine(run, stats, texts) {
  const resets = Object.entries(run.resets).map(([reason, n]) => fill(texts.skip.reset, { n, reason }));
  return [`${title(run.entry || run.model, stats, texts)}${texts.colon}${fill(texts.badge.skipped, run)}`, ...resets].join(texts.semicolon);
}

/** titles: the tooltip of each line, where the lines are short forms. */
function showList(part, title, lines, titles = []) {
  part.hidden = !lines.length;
  setText(part.children[0], title);
  const items = lines.map((text, index) => ({ text, index }));
  sync(part.children[1], items, (item) => item.index, () => el("li"), (item, { text, index }) => {
    setText(item, text);
    setTitle(item, titles[index] ?? "");
  });
}
