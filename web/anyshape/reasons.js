/**
 * Reasons in the page's language, in two forms. Pure.
 *
 * The stats have a reason as its long English text, and in `reasons` what that text is made of: its short form, and a
 * key by which locales/<language>/main.json has both forms. English has none there: accel/reasons is where it is.
 */

import { fill } from "./phrases.js";

/** `stats` with every known reason in the language of `words`; `shorts`: long form -> short form. */
export function inWords(stats, words) {
  const known = new Map((stats.reasons ?? []).map((told) => [told.text, told]));
  const long = (text) => (known.has(text) ? longForm(known.get(text), words) : text);
  const shape = (s) => ({ ...s, reason: long(s.reason), note: long(s.note) });
  const node = (n) => ({ ...n, message: n.message.split("\n").map(long).join("\n"), ...(n.instead && { instead: long(n.instead) }) });
  const shorts = Object.fromEntries([...known.values()].map((told) => [long(told.text), shortForm(told, words)]));
  return {
    ...stats,
    shorts,
    models: stats.models.map((m) => ({ ...m, inexact: m.inexact?.map(long), shapes: m.shapes.map(shape) })),
    nodes: stats.nodes.map(node),
    fallbacks: stats.fallbacks.map((f) => ({ ...f, reason: long(f.reason) })),
    skip: stats.skip.map((run) => ({ ...run, resets: renamed(run.resets, long) })),
  };
}

const shortForm = ({ said }, words) =>
  together(said.map(({ key, short, values }) => fill(words.reasons?.[key]?.short ?? short, values)), words);

/** As it is where it says more than its reasons, a size for example: that would be lost. */
function longForm({ text, all, said }, words) {
  if (!all || !words.reasons || !said.every(({ key }) => words.reasons[key])) return text;
  const written = said.map(({ key, values }) => {
    const sentence = fill(words.reasons[key].long, values);
    return values.place ? fill(words.brackets, { text: sentence, more: values.place }) : sentence;
  });
  return together(written, words);
}

const together = (texts, words) => [...new Set(texts)].join(words.semicolon);
const renamed = (counts, name) => Object.fromEntries(Object.entries(counts).map(([text, n]) => [name(text), n]));
