/** What a view is about: the last prompt, this workflow or everything; and what is being prepared. */

import { rootGraph } from "./badges.js";
import { el, setText, setTitle } from "./dom.js";
import { title } from "./format.js";
import { preparingText, SCOPES, scoped } from "./gain.js";
import * as store from "./store.js";
import { words } from "./texts.js";

/** A row of three buttons. name: under which the choice is kept in this browser. work: where the clock is shown. */
export function makeScope(name, chosen, work = el("span", { className: "anyshape-work", role: "status" })) {
  const key = `anyshape.scope.${name}`;
  const kept = localStorage.getItem(key);
  const scope = { chosen: SCOPES.includes(kept) ? kept : chosen };
  const buttons = SCOPES.map((one) => el("button", { type: "button", className: "anyshape-choice" }));
  buttons.forEach((button, index) => {
    button.dataset.scope = SCOPES[index];
    button.addEventListener("click", () => {
      scope.chosen = SCOPES[index];
      localStorage.setItem(key, scope.chosen);
      store.refresh();
    });
  });
  const group = el("span", { role: "group" }, ...buttons);
  scope.element = el("div", { className: "anyshape-scope" }, group, ...(work.parentElement ? [] : [work]));
  scope.part = (stats) => scoped(stats, scope.chosen, rootGraph()?.id);
  scope.apply = (stats) => {
    const texts = words();
    buttons.forEach((button) => {
      setText(button, texts.scopes[button.dataset.scope].title);
      setTitle(button, texts.scopes[button.dataset.scope].help);
      button.setAttribute("aria-pressed", String(button.dataset.scope === scope.chosen));
    });
    setText(work, stats.preparing?.size ? preparingText(stats.preparing, texts) : "");
    setTitle(work, stats.preparing?.size ? `${title(stats.preparing.model, stats, texts)} ${texts.preparing_help}` : "");
    return scope.part(stats);
  };
  return scope;
}

/** What a view says that has no table. */
export const emptyText = (stats) =>
  stats.models.some((model) => model.shapes.length) ? words().scopes.empty : words().empty;
