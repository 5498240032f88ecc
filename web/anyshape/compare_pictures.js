/**
 * How much the pictures of two runs differ. Pure, as format.js.
 *
 * Outputs are a prompt's in ComfyUI's history: what nodes show under "images" may be videos too.
 */

import { fill } from "./phrases.js";

const LEVELS = 255;

/**
 * {largest: in levels of 0 to 255, null if nothing was compared; animated: whether some have more frames than the
 * first, which was; others: files that are no pictures}. pixels(file): its bytes; null if it is no picture.
 */
export async function difference(plain, fast, pixels, words) {
  const found = { largest: null, animated: false, others: 0 };
  for (const [id, { images = [], animated = [] }] of Object.entries(plain)) {
    for (const [index, image] of images.entries()) {
      const same = fast[id]?.images?.[index];
      if (!same) continue;
      const [one, other] = await Promise.all([pixels(image), pixels(same)]);
      if (!one || !other) {
        found.others += 1;
        continue;
      }
      if (one.length !== other.length) throw new Error(words.compare.sizes);
      found.animated ||= animated.some(Boolean);
      found.largest = one.reduce((most, value, at) => Math.max(most, Math.abs(value - other[at])), found.largest ?? 0);
    }
  }
  return found;
}

/** What it says, in sentences. */
export function inWords({ largest, animated, others }, { compare }) {
  const said = [];
  if (largest !== null) said.push(fill(compare.levels, { levels: largest, all: LEVELS }));
  else if (!others) said.push(compare.no_pictures);
  if (animated) said.push(compare.first_frame);
  if (others) said.push(fill(compare.not_compared, { n: others }));
  return said;
}
