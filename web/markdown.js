// Markdown as nodes. marked cuts text into tokens, highlight.js names the words of code; both are asked for when the first answer needs
// them, and where the server was built without them text stays as it is.
import {h, button} from './dom.js';

let marked, hljs, highlight;

/** Loads what can be loaded; true if anything new has come. */
export async function loadMarkdown() {
  if (marked !== undefined) return false;
  marked = null;
  await import('./marked.js');
  marked = globalThis.marked ?? null;
  return marked !== null;
}
/** One load for all code that waits for it: an answer that streams is drawn anew many times before it ends. */
function loadHighlight() {
  return highlight ??= import('./highlight.js').then(() => {
    hljs = globalThis.hljs ?? null;
  });
}

const kEntities = {amp: '&', lt: '<', gt: '>', quot: '"', '#39': "'", '#x27': "'", apos: "'", nbsp: '\u00a0', copy: '©', hellip: '…',
  mdash: '—', ndash: '–', times: '×', rarr: '→', larr: '←', deg: '°'};
const decode = (text) => text.replace(/&(#?\w+);/g, (all, name) => {
  if (Object.hasOwn(kEntities, name)) return kEntities[name];
  const code = /^#x([0-9a-f]{1,6})$/i.exec(name) ? parseInt(name.slice(2), 16) : /^#(\d{1,7})$/.exec(name) ? Number(name.slice(1)) : 0;
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
});

/** Only what a person would follow: no script, no data, no file. */
function link(href, ...children) {
  const url = URL.canParse?.(href) ? new URL(href) : null;
  if (!url || !['http:', 'https:', 'mailto:'].includes(url.protocol)) return h('span', {}, ...children);
  return h('a', {href: url.href, rel: 'noopener noreferrer', target: '_blank'}, ...children);
}

function inline(tokens) {
  return (tokens ?? []).map((t) => {
    switch (t.type) {
      case 'strong': case 'em': case 'del': return h(t.type, {}, ...inline(t.tokens));
      case 'codespan': return h('code', {}, decode(t.text));
      case 'br': return h('br');
      case 'link': return link(decode(t.href), ...inline(t.tokens));
      case 'image': return link(decode(t.href), `[image: ${decode(t.text) || t.href}]`);  // nothing is fetched from elsewhere
      case 'html': return t.raw;
      default: return t.tokens ? h('span', {}, ...inline(t.tokens)) : decode(t.text ?? t.raw);
    }
  });
}

// highlight.js answers in markup of one kind alone, spans with a class and four entities: it is taken apart, and anything else in it
// stays text.
function coloured(markup) {
  const root = h('code');
  const open = [root];
  for (const part of markup.split(/(<span class="[\w -]*">|<\/span>)/)) {
    const top = open[open.length - 1];
    const name = /^<span class="([\w -]*)">$/.exec(part);
    if (name) {
      const span = h('span', {class: name[1]});
      top.append(span);
      open.push(span);
    } else if (part === '</span>' && open.length > 1) {
      open.pop();
    } else if (part) {
      top.append(decode(part));
    }
  }
  return root;
}

function code(token) {
  const language = (token.lang ?? '').split(/\s/)[0];
  const pre = h('pre', {tabindex: '0', 'aria-label': language ? `Code, ${language}` : 'Code'}, h('code', {}, token.text));
  const paint = () => {
    if (!hljs || token.text.length > 50000) return;
    const known = language && hljs.getLanguage(language);
    if (known) pre.replaceChildren(coloured(hljs.highlight(language, token.text, true).value));
  };
  if (language) hljs ? paint() : loadHighlight().then(paint);
  const copy = button('Copy', () => navigator.clipboard.writeText(token.text), {class: 'copy'});
  return h('div', {class: 'code'}, pre, ...(navigator.clipboard ? [copy] : []));  // browsers have it on HTTPS and localhost alone
}

function cells(tag, row, align) {
  return h('tr', {}, ...row.map((cell, i) => h(tag, {class: align[i] ? `align-${align[i]}` : false}, ...inline(cell.tokens))));
}

function block(t) {
  switch (t.type) {
    case 'space': return null;
    case 'heading': return h(`h${Math.min(6, t.depth + 2)}`, {}, ...inline(t.tokens));  // h1 and h2 are the page's
    case 'code': return code(t);
    case 'hr': return h('hr');
    case 'blockquote': return h('blockquote', {}, ...blocks(t.tokens));
    case 'list': return h(t.ordered ? 'ol' : 'ul', t.ordered && t.start !== 1 ? {start: t.start} : {},
      ...t.items.map((item) => h('li', {}, item.task ? (item.checked ? '☑ ' : '☐ ') : '', ...blocks(item.tokens))));
    case 'table': return h('div', {class: 'table', tabindex: '0'}, h('table', {}, h('thead', {}, cells('th', t.header, t.align)),
      h('tbody', {}, ...t.rows.map((row) => cells('td', row, t.align)))));
    case 'text': return t.tokens ? h('span', {}, ...inline(t.tokens)) : h('span', {}, decode(t.text));
    case 'paragraph': return h('p', {}, ...inline(t.tokens));
    default: return h('p', {}, t.raw);  // html, and what marked may add
  }
}
const blocks = (tokens) => tokens.map(block).filter(Boolean);

/** Shows `text` in `element`; blocks that have not changed since the last call stay what they are. */
export function showMarkdown(element, text) {
  if (!marked) {
    element.classList.add('plain');
    element.textContent = text;
    return;
  }
  element.classList.remove('plain');
  const tokens = marked.lexer(text, {gfm: true}).filter((t) => t.type !== 'space' && t.type !== 'def');
  const shown = element.shown ?? [];
  let same = 0;
  while (same < shown.length && same < tokens.length && shown[same] === tokens[same].raw) ++same;
  if (shown.length === 0) element.replaceChildren();
  while (element.children.length > same) element.lastChild.remove();
  element.append(...blocks(tokens.slice(same)));
  element.shown = tokens.map((t) => t.raw);
}
