// Elements of a page. Text from outside becomes text nodes, never markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else put(element, name, value);
  }
  element.append(...children);
  return element;
}

/** Set an attribute, unless it has this value; null and false remove it. */
export function put(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value === true ? "" : value)) {
    element.setAttribute(name, value === true ? "" : value);
  }
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function button(text, css, onclick, attributes = {}) {
  return h("button", { type: "button", class: css, onclick, ...attributes }, text);
}

let made = 0;
export const unique = (what) => `tfos-${what}-${(made += 1)}`;
