/**
 * Titles, labels and tooltips of our nodes in the page's language.
 *
 * The front end of ComfyUI 0.3.75 loads a language after the packs' texts were added to it, and drops those: the nodes
 * would stay English. What is set here is what newer ones set themselves, from the same file.
 */

import { nodeTexts } from "./texts.js";

/** For the extension's `beforeRegisterNodeDef`: of the node in the menu, the search box, the library. */
export function describe(definition) {
  const own = nodeTexts(definition.name);
  if (!own) return;
  definition.display_name = own.display_name;
  definition.description = own.description;
  for (const inputs of [definition.input?.required, definition.input?.optional]) {
    for (const [name, spec] of Object.entries(inputs ?? {})) {
      const tooltip = own.inputs[name]?.tooltip;
      if (tooltip) spec[1] = { ...spec[1], tooltip };
    }
  }
  definition.output_tooltips = definition.output?.map((_, index) => own.outputs[index]?.tooltip);
}

/** For the extension's `nodeCreated`: of one on the canvas. What the user has named otherwise is kept in `label`. */
export function label(node) {
  const own = nodeTexts(node.comfyClass);
  if (!own) return;
  for (const input of node.inputs ?? []) input.localized_name = own.inputs[input.name]?.name ?? input.localized_name;
  for (const widget of node.widgets ?? []) widget.label = own.inputs[widget.name]?.name ?? widget.label;
  node.outputs?.forEach((output, index) => {
    if (output.name !== output.type) output.localized_name = own.outputs[index]?.name ?? output.localized_name;
  });
}
