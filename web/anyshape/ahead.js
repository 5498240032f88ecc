/** A word to the user when sizes of the last session are warmed up: a prompt that they did not queue. */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { count, fill } from "./phrases.js";
import { language, words } from "./texts.js";

const EVENT = "anyshape.ahead";
const SHOWN_FOR = 8000; // milliseconds

/** For the extension's `setup`. */
export function listen() {
  api.addEventListener(EVENT, ({ detail: { file, sizes } }) => {
    const detail = fill(words().ahead, { file, sizes: count(words().counts.sizes, sizes, language()) });
    app.extensionManager?.toast?.add?.({ severity: "info", summary: "AnyShape", detail, life: SHOWN_FOR });
  });
}
