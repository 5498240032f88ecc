/** Phrases of locales/<language>/main.json with what they leave open filled in. Pure, as format.js. */

/** "{n} of {all}" and {n: 1, all: 2} -> "1 of 2"; what is not given stays as it is. */
export function fill(template, values) {
  return template.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** The form of a counted noun that `n` wants: forms {one, other}. */
export function count(forms, n, language = "en") {
  const form = new Intl.PluralRules(language).select(n) === "one" ? forms.one : forms.other;
  return fill(form, { n });
}
