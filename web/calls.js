// Calls of tools: the model asks, and whoever sits at the page answers in the tool's place.
import {h} from './dom.js';

/** Adds what a stream brought of its calls to a message. */
export function addCalls(message, pieces) {
  message.tool_calls ??= [];
  for (const {index, id, function: part} of pieces) {
    const call = (message.tool_calls[index] ??= {id, type: 'function', function: {name: '', arguments: ''}});
    call.function.name += part?.name ?? '';
    call.function.arguments += part?.arguments ?? '';
  }
}

/** The calls; with `onResults`, which takes a text for each, a field for the result of each. */
export function callList(calls, onResults) {
  const fields = [];
  const rows = calls.map(({function: {name, arguments: given}}) => {
    const row = h('li', {}, h('code', {}, `${name}(${given})`));
    if (onResults) row.append(fields[fields.push(h('input', {'aria-label': `Result of ${name}`, placeholder: 'its result'})) - 1]);
    return row;
  });
  if (!onResults) return h('div', {class: 'calls'}, h('ul', {}, ...rows));
  const submit = (event) => {
    event.preventDefault();
    onResults(fields.map((field) => field.value));
  };
  return h('form', {class: 'calls', submit}, h('ul', {}, ...rows), h('button', {type: 'submit'}, 'Send results'));
}
