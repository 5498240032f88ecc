/** Elements: made, and kept in step with a list without being made again, so that focus, selection and scrolling stay. */

/** A new element; `props` are its properties, or attributes where a name has a dash or is "role". */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "role" || name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Sets a text only if it differs: an unchanged page is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setTitle(element, title) {
  if (element.title !== title) element.title = title;
}

/**
 * Gives `parent` one child for each item, in order. A child is kept for as long as its item's key is there.
 * make(): a new child. update(child, item): its content.
 */
export function sync(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    const child = old.get(name) ?? make();
    old.delete(name);
    child.dataset.key = name;
    update(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  old.forEach((child) => child.remove());
}
