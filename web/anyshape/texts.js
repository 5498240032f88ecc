/** The texts of locales/<language>/main.json, in the language of the setting Comfy.Locale, English otherwise. */

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const SETTING = "Comfy.Locale";
const OWN_SETTING = "AnyShape.Language";
let translations = {};

/** Fetches all languages; where the server has none, the frontend is too old for this pack. */
export async function load() {
  const response = await api.fetchApi("/i18n").catch(() => null);
  translations = response?.ok ? await response.json() : {};
  return Boolean(translations.en?.anyshape);
}

/** Frontends before the extension manager's settings have the older ones. */
export function setting(id) {
  const settings = app.extensionManager?.setting;
  return settings?.get?.(id) ?? app.ui?.settings?.getSettingValue?.(id);
}

const frontendLanguage = () => setting(SETTING) ?? "en";

/** Of what we say; the user may have chosen another one than the frontend's. */
export const language = () => (translations[setting(OWN_SETTING)] ? setting(OWN_SETTING) : frontendLanguage());

/** zh-TW -> zh-TW, else zh, else en. */
function translation(wanted) {
  const found = [wanted, wanted.split("-")[0], "en"].find((name) => translations[name]?.anyshape);
  return translations[found];
}

/** Also where the page's language is none of ours. */
export const isEnglish = () => translation(language()) === translations.en;

export const words = () => translation(language()).anyshape;

/** The texts of the settings' page, which stands among the frontend's own. */
export const settingTexts = () => translation(frontendLanguage()).anyshape.settings;

/** The texts of a node's class, as locales/<language>/nodeDefs.json has them; undefined if it is none of ours. */
export const nodeTexts = (type) => (type?.startsWith("AnyShape") ? translation(frontendLanguage()).nodeDefs?.[type] : undefined);

export function onLanguage(changed) {
  for (const id of [SETTING, OWN_SETTING]) {
    app.ui?.settings?.addEventListener?.(`${id}.change`, () => setTimeout(changed)); // after the setting itself
  }
}
