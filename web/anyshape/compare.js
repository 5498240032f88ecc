/**
 * Compare: the workflow that is open runs without AnyShape and with it, twice each, and both times are shown.
 *
 * Only what is queued is changed: the user's graph stays as it is. A run begins when the one before has ended.
 */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { difference, inWords } from "./compare_pictures.js";
import { isOurs, runs, skips } from "./compare_prompts.js";
import { duration, isLoss, times } from "./gain.js";
import { fill } from "./phrases.js";
import * as store from "./store.js";
import { words } from "./texts.js";

const EVENTS = ["status", "execution_success", "execution_error", "execution_interrupted", "reconnected"];
const TICK = 1000; // milliseconds

const definitions = new Map(); // class -> of the node, as /object_info has it
let now = null; // {step, of, way, first, began}: the run that goes on
let outcome = null; // {text, loss} of the latest comparison
let count = 0;

/** For the extension's `beforeRegisterNodeDef`. */
export const learn = (definition) => definitions.set(definition.name, definition);

export const isRunning = () => now !== null;

/** What the panel says of it: {text, loss}; text "" if there is nothing to say. */
export function status() {
  if (!now) return outcome ?? { text: "", loss: false };
  const seconds = Math.floor((performance.now() - now.began) / 1000);
  return { text: fill(words().compare.running, { ...now, way: words().compare[now.way], part: words().compare[now.part], n: seconds }), loss: false };
}

/** Runs the comparison; it never throws, what went wrong is the outcome. */
export async function compare() {
  if (now) return;
  outcome = null;
  now = { step: 0, of: 4, way: "without", part: "first", began: performance.now() };
  const clock = setInterval(store.refresh, TICK);
  store.refresh();
  try {
    outcome = await compared();
  } catch (error) {
    outcome = { text: fill(words().failed, { error: error.message }), loss: true };
  } finally {
    clearInterval(clock);
    now = null;
    store.refresh();
  }
}

async function compared() {
  const { output, workflow } = await app.graphToPrompt();
  const definition = (type) => definitions.get(type);
  const mine = Object.values(output).some((node) => isOurs(node.class_type, definition));
  count += 1;
  const queue = runs(output, definition, `${api.clientId} ${Date.now()} ${count}`);
  const ended = [];
  for (const [index, { way, prompt }] of queue.entries()) {
    now = { step: index + 1, of: queue.length, way, part: index % 2 ? "timed" : "first", began: performance.now() };
    store.refresh();
    const accelerate = way === "without" ? { accelerate: false } : mine ? {} : { accelerate: true }; // the server adds ours
    ended.push(await ran(prompt, workflow, { compare: way, sizes_at_start: false, ...accelerate }));
  }
  const [firstPlain, plain, firstFast, fast] = ended;
  const factor = plain.seconds / fast.seconds;
  const found = await difference(plain.outputs, fast.outputs, pixels, words());
  const time = (run) => duration(run.seconds, words());
  const said = [
    fill(words().compare.result, { without: time(plain), with: time(fast), factor: times(factor) }),
    ...inWords(found, words()),
    fill(words().compare.firsts, { without: time(firstPlain), with: time(firstFast) }),
    ...(store.stats.device === "cpu" && !skips(output) ? [words().gain.cpu, words().compare.chance] : []),
  ];
  return { text: said.join("\n"), loss: isLoss(factor, store.stats.device) };
}

/** Queues one run and gives {seconds, outputs} when it has ended. Throws with what the user should know. */
async function ran(prompt, workflow, asked) {
  const body = {
    client_id: api.clientId,
    prompt,
    extra_data: { extra_pnginfo: { workflow }, anyshape: asked },
  };
  const headers = { "Content-Type": "application/json" };
  const response = await api.fetchApi("/prompt", { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(refusal(answer) ?? `HTTP ${response.status}`);
  const entry = await end(answer.prompt_id);
  const messages = new Map(entry.status.messages);
  if (messages.has("execution_interrupted")) throw new Error(words().compare.cancelled);
  const failed = messages.get("execution_error");
  if (failed) throw new Error(`${failed.node_type}: ${failed.exception_message}`);
  const [start, stop] = ["execution_start", "execution_success"].map((name) => messages.get(name).timestamp);
  return { seconds: (stop - start) / 1000, outputs: entry.outputs };
}

/** Why ComfyUI did not take the prompt, in its words. */
function refusal({ error, node_errors: nodes }) {
  const details = Object.values(nodes ?? {}).flatMap((node) => node.errors.map((one) => `${node.class_type}: ${one.message} (${one.details})`));
  return [error?.message, ...details].filter(Boolean).join("; ") || undefined;
}

/** The history's entry of a prompt, as soon as it is there. Throws if the prompt was taken out of the queue. */
function end(id) {
  return new Promise((resolve, reject) => {
    const settle = (result, value) => {
      EVENTS.forEach((name) => api.removeEventListener(name, look));
      result(value);
    };
    const look = async () => {
      const queue = await json("/queue"); // before the history: what leaves the one is in the other
      const entry = (await json(`/history/${id}`))?.[id];
      if (entry) return settle(resolve, entry);
      const waiting = queue && [...queue.queue_running, ...queue.queue_pending].some((item) => item[1] === id);
      if (queue && !waiting) settle(reject, new Error(words().compare.cancelled));
    };
    EVENTS.forEach((name) => api.addEventListener(name, look));
    look();
  });
}

async function json(path) {
  const response = await api.fetchApi(path).catch(() => null);
  return response?.ok ? response.json() : null;
}

/** Of a file that a run made: null if the browser takes it for no picture. Of an animated one, its first frame. */
async function pixels({ filename, subfolder, type }) {
  const response = await api.fetchApi(`/view?${new URLSearchParams({ filename, subfolder, type })}`);
  if (!response.ok) return null;
  const asStored = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
  const picture = await createImageBitmap(await response.blob(), asStored).catch(() => null);
  if (!picture) return null;
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  return context.getImageData(0, 0, picture.width, picture.height).data;
}
