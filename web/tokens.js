// An answer as its tokens, tinted by how likely each was; the candidates appear on hover, and by keyboard.
import {by, h, short} from './dom.js';

const kLevels = [0.9, 0.5, 0.2, 0.05];  // a class for each step down

const percent = (logprob) => `${short(100 * Math.exp(logprob))} %`;
const visible = (token) => (token === '' ? '∅' : token.replaceAll('\n', '⏎').replaceAll('\t', '⇥').replaceAll(' ', '␣'));

function showTip(span, entry) {
  const others = (entry.top_logprobs ?? []).map((candidate) => h('tr', {class: candidate.token === entry.token ? 'chosen' : false},
    h('td', {}, visible(candidate.token)), h('td', {}, percent(candidate.logprob)), h('td', {}, candidate.logprob.toFixed(3))));
  const tip = by('tip');
  tip.replaceChildren(h('p', {}, h('b', {}, visible(entry.token)), ` ${percent(entry.logprob)}, log probability ${entry.logprob.toFixed(3)}`),
    h('table', {}, h('tbody', {}, ...others)));
  tip.hidden = false;
  const place = span.getBoundingClientRect();
  const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - tip.offsetHeight - 6)}px`;
  span.setAttribute('aria-describedby', 'tip');
}

export function hideTip() {
  by('tip').hidden = true;
}

/** Adds those of `entries` (OpenAI's logprobs.content) that `element` does not show yet. */
export function showTokens(element, entries) {
  const shown = element.querySelectorAll('.token').length;
  if (shown === 0) element.replaceChildren();
  element.classList.add('plain');
  for (const [i, entry] of entries.entries()) {
    if (i < shown) continue;
    const level = kLevels.findIndex((limit) => Math.exp(entry.logprob) >= limit);
    const show = (event) => showTip(event.currentTarget, entry);
    element.append(h('span', {class: `token level-${level < 0 ? kLevels.length : level}`, tabindex: i === 0 ? '0' : '-1', mouseenter: show,
      focus: show, mouseleave: hideTip, blur: hideTip}, entry.token));
  }
  element.onkeydown = (event) => {
    const step = {ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling'}[event.key];
    if (event.key === 'Escape') hideTip();
    const next = step && document.activeElement[step];
    if (!next?.classList.contains('token')) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
}
