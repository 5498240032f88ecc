/** What a dropped link is offered, in Node.js; tests/test_web.py starts it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { suggest } from "../../web/anyshape/suggestions.js";

test("our nodes come after ComfyUI's, once, in the lists that are there", () => {
  const out = { MODEL: ["Reroute", "KSampler"], IMAGE: ["Reroute"] };
  const lists = { slot_types_default_out: out, slot_types_default_in: undefined };
  suggest(lists);
  suggest(lists);
  const ours = ["AnyShapeCompileModel", "AnyShapeAccelerate", "AnyShapeSkipBlocks"];
  assert.deepEqual(out, { MODEL: ["Reroute", "KSampler", ...ours], IMAGE: ["Reroute"] });
});
