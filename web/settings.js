// The settings beside the conversation. An empty field leaves the choice to the server.
import {by} from './dom.js';
import {key, setKey} from './api.js';

const kPlace = 'nanovllm.settings';
const kTexts = ['system', 'tools'];
const kNumbers = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];

export function initSettings(onKey) {
  let saved = {};
  try {
    saved = JSON.parse(localStorage.getItem(kPlace) ?? '{}');
  } catch {
    // what cannot be read is forgotten
  }
  for (const name of [...kTexts, ...kNumbers]) by(name).value = saved[name] ?? '';
  by('logprobs').checked = saved.logprobs ?? false;
  by('key').value = key();
  by('settings').addEventListener('change', (event) => {
    if (event.target.id === 'key') {
      setKey(event.target.value.trim());
      return onKey();
    }
    const values = Object.fromEntries([...kTexts, ...kNumbers].map((name) => [name, by(name).value]));
    localStorage.setItem(kPlace, JSON.stringify({...values, logprobs: by('logprobs').checked}));
  });
}

export function askForKey() {
  by('side').classList.add('open');
  by('menu').setAttribute('aria-expanded', 'true');
  by('settings').open = true;
  by('key').focus();
}

/** The tools that the model may call, if any. Throws where their text is no JSON. */
function givenTools() {
  const text = by('tools').value.trim();
  try {
    return text ? {tools: JSON.parse(text)} : {};
  } catch (error) {
    throw new Error(`Settings, tools: ${error.message}`);
  }
}

/** The body of a request for these messages. */
export function requestBody(messages) {
  const system = by('system').value.trim();
  const body = {
    messages: [...(system ? [{role: 'system', content: system}] : []),
      ...messages.map(({role, content, reasoning, tool_calls, tool_call_id}) => ({role, content, reasoning, tool_calls, tool_call_id}))],
    stream: true,
    stream_options: {include_usage: true},
    ...givenTools(),
  };
  for (const name of kNumbers) {
    const value = by(name).value;
    if (value !== '' && !Number.isNaN(Number(value))) body[name] = Number(value);
  }
  if (by('logprobs').checked) Object.assign(body, {logprobs: true, top_logprobs: 5});
  return body;
}
