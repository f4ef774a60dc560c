// The server, as the page sees it. The key lives in this tab's sessionStorage and travels in a header.

const kKey = 'nanovllm.key';
export const key = () => sessionStorage.getItem(kKey) ?? '';
export const setKey = (text) => (text ? sessionStorage.setItem(kKey, text) : sessionStorage.removeItem(kKey));

/** What the server refused: its status and its sentence. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = {...options.headers};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const response = await fetch(path, {...options, headers, cache: 'no-store', credentials: 'omit'});
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // a proxy's own page: the status has to do
  }
  throw new Refusal(response.status, message);
}

export const get = async (path) => (await ask(path)).json();

/** The JSON of a stream's events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  while (true) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) continue;
      const text = line.slice(6);
      if (text === '[DONE]') return;
      const event = JSON.parse(text);
      if (event.error) throw new Refusal(event.error.code, event.error.message);
      yield event;
    }
  }
}

export async function* stream(path, signal, body) {
  const post = {method: 'POST', body: JSON.stringify(body), headers: {'Content-Type': 'application/json'}};
  yield* events(await ask(path, {signal, ...(body ? post : {})}));
}
