/**
 * Our nodes in the menu that ComfyUI shows where a link is dropped on the canvas. Pure, as format.js.
 *
 * It has the first five nodes of a type in the order of their registration: those of packs come after ComfyUI's.
 */

const OFFERED = {
  MODEL: ["AnyShapeCompileModel", "AnyShapeAccelerate", "AnyShapeSkipBlocks"],
  VAE: ["AnyShapeCompileVAE"],
  CONTROL_NET: ["AnyShapeCompileControlNet"],
};

/** Adds them to LiteGraph's lists, which extensions may add to: {type: names of nodes}, for outputs and for inputs. */
export function suggest({ slot_types_default_out: forOutputs, slot_types_default_in: forInputs }) {
  for (const lists of [forOutputs, forInputs]) {
    for (const [type, ours] of Object.entries(OFFERED)) {
      lists?.[type]?.push(...ours.filter((name) => !lists[type].includes(name)));
    }
  }
}
