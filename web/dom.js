// Elements without markup: whatever a model or a file says becomes text, never HTML.

export const by = (id) => document.getElementById(id);

/** An element with attributes (functions become listeners, false leaves one out) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') element.addEventListener(name, value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children);
  return element;
}

export const button = (text, click, attributes = {}) => h('button', {type: 'button', click, ...attributes}, text);

/** "12,345", and "0.0123" with three digits. */
export const count = (n) => Math.round(n).toLocaleString('en');
export const short = (n) => (n === 0 ? '0' : Math.abs(n) >= 100 ? count(n) : Number(n.toPrecision(3)).toString());
