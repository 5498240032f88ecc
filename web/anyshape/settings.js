/**
 * The pack's page in the frontend's settings. Its values lie in the user's file on the server, which reads them there
 * (nodes/preferences.py) at each prompt.
 *
 * Their texts are not in locales/<language>/settings.json: the front end of ComfyUI 0.3.75 drops those of all languages
 * but English, and would then show English.
 */

import { app } from "../../../scripts/app.js";
import { setting, settingTexts } from "./texts.js";

const PAGE = "AnyShape";
const BUDGET = "GraphBudget";
const BUDGET_INPUT = "graph_budget_mb";
const FOLLOW = "ComfyUI"; // no language's name
const DEFINITIONS = {
  Automatic: { type: "boolean", defaultValue: false },
  Exceptions: { type: "text", defaultValue: "" },
  [BUDGET]: { type: "number", defaultValue: 2048, attrs: { min: 0, max: 1 << 20, step: 64, useGrouping: false } },
  SizesAtStart: { type: "boolean", defaultValue: false },
  Language: { type: "combo", defaultValue: FOLLOW },
};

const idOf = (name) => `${PAGE}.${name}`;

/** What a setting is called now: {name, tooltip, options of the one with a list}. */
function texts(name) {
  const { title, help, follow } = settingTexts()[name];
  const languages = [{ value: FOLLOW, text: follow }, { value: "en", text: "English" }, { value: "zh", text: "中文" }];
  return { name: title, tooltip: help, ...(follow ? { options: languages } : {}) };
}

/** For the extension's `settings`; the highest order comes first. */
export const page = () =>
  Object.entries(DEFINITIONS).map(([name, definition], index) => ({
    id: idOf(name),
    ...definition,
    ...texts(name),
    category: [PAGE, PAGE, name],
    sortOrder: -index,
  }));

/** The page in the language of now; a front end without this list shows it when it is loaded again. */
export function rename() {
  const known = app.ui?.settings?.settingsLookup ?? {};
  for (const name of Object.keys(DEFINITIONS)) if (known[idOf(name)]) Object.assign(known[idOf(name)], texts(name));
}

/** For the extension's `nodeCreated`: a new node's budget is the page's; a saved node gets its own afterwards. */
export function useBudget(node) {
  const widget = node.comfyClass?.startsWith(PAGE) && node.widgets?.find((one) => one.name === BUDGET_INPUT);
  const wanted = setting(idOf(BUDGET));
  if (widget && Number.isInteger(wanted)) widget.value = wanted;
}
