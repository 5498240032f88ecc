/** "Warm up these": the sizes that the panel shows, written into the lists of the workflow's Warm Up nodes. */

import { app } from "../../../scripts/app.js";
import { listedSizes } from "./format.js";

const TYPE = "AnyShapeWarmUp";
const LIST = "shapes"; // the input's name

/** The workflow's Warm Up nodes, those in subgraphs too. */
export function warmUps(graph = app.rootGraph ?? app.graph?.rootGraph ?? app.graph) {
  const nodes = graph?.nodes ?? graph?._nodes ?? [];
  return nodes.flatMap((node) => [...(node.comfyClass === TYPE ? [node] : []), ...(node.subgraph ? warmUps(node.subgraph) : [])]);
}

/** For the panel's button. models: of what the panel is about. */
export function warmUpThese(models) {
  const text = listedSizes(models).join("\n");
  for (const node of warmUps()) {
    const list = node.widgets?.find((widget) => widget.name === LIST);
    if (list) list.value = text;
  }
  app.graph?.setDirtyCanvas?.(true, true);
}
