/** The stats that every view shows: fetched once, then pushed by the server; nothing polls. */

import { api } from "../../../scripts/api.js";
import { inWords } from "./reasons.js";
import { words } from "./texts.js";

const EVENT = "anyshape.stats";
const EMPTY = {
  models: [],
  graphs: { budget_bytes: 0, used_bytes: 0, evictions: 0 },
  fallbacks: [],
  skip: [],
  nodes: [],
  preparing: {},
};
const TICK = 500; // milliseconds, of the clock while something is prepared

const views = new Set();
export let stats = EMPTY;
let clock = null;

/** Calls `view(stats)` now and at every change; the result ends that. */
export function watch(view) {
  views.add(view);
  view(inWords(stats, words()));
  return () => views.delete(view);
}

export function refresh() {
  const told = inWords(stats, words());
  views.forEach((view) => view(told));
}

function take(data) {
  stats = { ...EMPTY, ...data }; // what another version of the server does not send is empty, not an error
  runClock();
  refresh();
}

/** The server says once that it prepares something, and since when; the seconds go on here. */
function runClock() {
  clearInterval(clock);
  const { preparing } = stats;
  if (!preparing.number) return;
  const began = performance.now() - 1000 * preparing.seconds;
  clock = setInterval(() => {
    stats = { ...stats, preparing: { ...preparing, seconds: (performance.now() - began) / 1000 } };
    refresh();
  }, TICK);
}

/** Begins to listen; after a lost connection the server may be another one. */
export function connect() {
  api.addEventListener(EVENT, (event) => take(event.detail));
  api.addEventListener("reconnected", load);
  return load();
}

async function load() {
  const response = await api.fetchApi("/anyshape/stats").catch(() => null);
  if (response?.ok) take(await response.json());
}

/** Forgets what was counted; with `graphs` their memory goes too. Throws with the server's words. */
export async function clear(graphs) {
  const response = await api.fetchApi("/anyshape/clear", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ graphs }),
  });
  const data = await response.json().catch(() => ({ error: `HTTP ${response.status}` }));
  if (!response.ok) throw new Error(data.error);
  take(data);
}

/** The report of Shape Cache Info, with the machine's particulars. */
export async function report() {
  const response = await api.fetchApi("/anyshape/stats?format=text");
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.text();
}
