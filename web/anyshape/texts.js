/** The texts of locales/<language>/main.json, in the language of the setting Comfy.Locale, English otherwise. */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const SETTING = "Comfy.Locale";
let translations = {};

/** Fetches all languages; where the server has none, the frontend is too old for this pack. */
export async function load() {
  const response = await api.fetchApi("/i18n").catch(() => null);
  translations = response?.ok ? await response.json() : {};
  return Boolean(translations.en?.anyshape);
}

/** Frontends before the extension manager's settings have the older ones. */
export function language() {
  const settings = app.extensionManager?.setting;
  return settings?.get?.(SETTING) ?? app.ui?.settings?.getSettingValue?.(SETTING) ?? "en";
}

/** zh-TW -> zh-TW, else zh, else en. */
function translation() {
  const wanted = language();
  const found = [wanted, wanted.split("-")[0], "en"].find((name) => translations[name]?.anyshape);
  return translations[found];
}

export const words = () => translation().anyshape;

/** The texts of a node's class, as locales/<language>/nodeDefs.json has them; undefined if it is none of ours. */
export const nodeTexts = (type) => (type?.startsWith("AnyShape") ? translation().nodeDefs?.[type] : undefined);

export function onLanguage(changed) {
  app.ui?.settings?.addEventListener?.(`${SETTING}.change`, () => setTimeout(changed)); // after the setting itself
}
