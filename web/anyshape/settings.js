/**
 * The pack's page in the frontend's settings. Its values lie in the user's file on the server, which reads them there
 * (nodes/preferences.py) at each prompt.
 */

import { setting, settingTexts } from "./texts.js";

const PAGE = "AnyShape";
const BUDGET = { id: "AnyShape.GraphBudget", default: 2048, most: 1 << 20, input: "graph_budget_mb" };
const FOLLOW = "ComfyUI"; // no language's name
const DEFINITIONS = [
  { id: "AnyShape.Automatic", type: "boolean", defaultValue: false },
  { id: "AnyShape.Exceptions", type: "text", defaultValue: "" },
  { id: BUDGET.id, type: "number", defaultValue: BUDGET.default, attrs: { min: 0, max: BUDGET.most, step: 64, useGrouping: false } },
  { id: "AnyShape.SizesAtStart", type: "boolean", defaultValue: false },
  { id: "AnyShape.Language", type: "combo", defaultValue: FOLLOW, options: { [FOLLOW]: "As ComfyUI", en: "English", zh: "中文" } },
];

/** For the extension's `settings`: the first comes first. A frontend that knows our texts puts its own in their place. */
export const page = () =>
  DEFINITIONS.map(({ options, ...definition }, index) => {
    const { name, tooltip } = settingTexts()[definition.id.replace(".", "_")];
    const listed = options && { options: Object.entries(options).map(([value, text]) => ({ value, text })) };
    const sorted = { category: [PAGE, PAGE, definition.id], sortOrder: DEFINITIONS.length - index };
    return { ...definition, name, tooltip, ...sorted, ...listed };
  });

/** For the extension's `nodeCreated`: a new node's budget is the page's; a saved node gets its own afterwards. */
export function useBudget(node) {
  const widget = node.comfyClass?.startsWith(PAGE) && node.widgets?.find((one) => one.name === BUDGET.input);
  const wanted = setting(BUDGET.id);
  if (widget && Number.isInteger(wanted)) widget.value = wanted;
}
