/** The texts of both languages. */

import { readFileSync } from "node:fs";

const read = (language) =>
  JSON.parse(readFileSync(new URL(`../../locales/${language}/main.json`, import.meta.url))).anyshape;
export const EN = read("en");
export const ZH = read("zh");
