// The conversation: its messages, and the one answer that may be under way.
import {by, h, button, count, short} from './dom.js';
import {stream} from './api.js';
import {addCalls, callList} from './calls.js';
import {loadMarkdown, showMarkdown} from './markdown.js';
import {requestBody} from './settings.js';
import {showTokens, hideTip} from './tokens.js';

function statsText(stats) {
  if (!stats) return '';
  const parts = [];
  if (stats.prompt) parts.push(`${count(stats.prompt)} prompt tokens${stats.cached ? `, ${count(stats.cached)} cached` : ''}`);
  parts.push(`${stats.exact ? '' : 'about '}${count(stats.completion)} tokens`);
  if (stats.first) parts.push(`first after ${short(1000 * stats.first)} ms`);
  if (stats.seconds - stats.first > 0.03)  // less is not long enough to be measured
    parts.push(`${short((stats.completion - 1) / (stats.seconds - stats.first))} tokens/s`);
  if (stats.finish && stats.finish !== 'stop' && stats.finish !== 'tool_calls') parts.push(stats.finish === 'length' ? 'cut off by its limit' : stats.finish);
  return parts.join(' · ');
}

export class ChatView {
  /** `onChange` after every change to the list; `onRefusal` with what the server refused. */
  constructor(chats, onChange, onRefusal) {
    Object.assign(this, {chats, onChange, onRefusal, running: null});
    this.parts = new WeakMap();  // of a message, what is not kept: its element, its tokens, how it is shown
    loadMarkdown().then((loaded) => loaded && this.show());
    addEventListener('pagehide', () => this.chats.save());
  }

  of(message) {
    if (!this.parts.has(message)) this.parts.set(message, {element: null, tokens: null, asText: false, isPending: false});
    return this.parts.get(message);
  }

  show() {
    hideTip();
    const messages = this.chats.current.messages;
    const rows = messages.map((message, i) => this.row(message, i));
    const hint = 'The answers come from the model that this server runs; "Engine" shows it at work.';
    by('messages').replaceChildren(...(rows.length > 0 ? rows : [h('p', {class: 'note start'}, hint)]));
    by('messages').scrollTop = by('messages').scrollHeight;
    by('send').hidden = this.running !== null;
    by('stop').hidden = this.running === null;
  }

  row(message, i) {
    const isUser = message.role === 'user', isModel = message.role === 'assistant';
    const text = h('div', {class: 'text'});
    const footer = h('footer');
    const article = h('article', {class: `message ${message.role}`}, h('h2', {}, isUser ? 'You' : isModel ? 'Model' : 'Tool'), text, footer);
    this.of(message).element = article;
    if (isModel) {
      this.fill(message);
      return article;
    }
    text.classList.add('plain');
    text.textContent = message.content;
    if (isUser) footer.append(button('Edit', () => this.edit(i)));
    return article;
  }

  /** An answer's text, numbers and buttons. */
  fill(message) {
    const state = this.of(message);
    const [, text, footer] = state.element.children;
    const isRunning = this.running?.message === message;
    if (message.reasoning) this.fillReasoning(message.reasoning, state.element);
    if (state.tokens && !state.asText) showTokens(text, state.tokens);
    else showMarkdown(text, message.content);
    if (message.tool_calls) this.fillCalls(message, isRunning);
    if (isRunning) return;
    const others = [h('span', {class: 'stats'}, statsText(message.stats)),
      button('Regenerate', () => this.answer(this.chats.current.messages.indexOf(message)))];
    if (state.tokens)
      others.push(button(state.asText ? 'Show tokens' : 'Show text', () => {
        state.asText = !state.asText;
        text.replaceChildren();
        text.shown = [];
        this.fill(message);
      }));
    footer.replaceChildren(...others);
  }

  fillReasoning(reasoning, element) {
    let box = element.querySelector('.reasoning');
    if (!box) {
      box = h('details', {class: 'reasoning'}, h('summary', {}, 'Reasoning'), h('div', {class: 'plain'}));
      element.append(box);  // the style sheet has it before the text
    }
    box.lastChild.textContent = reasoning;
  }

  /** The last message's calls wait for their results. */
  fillCalls(message, isRunning) {
    const {element} = this.of(message), messages = this.chats.current.messages, calls = message.tool_calls;
    const take = (texts) => {
      messages.push(...texts.map((content, i) => ({role: 'tool', tool_call_id: calls[i].id, content})));
      this.answer(messages.length);
    };
    element.querySelector('.calls')?.remove();
    element.insertBefore(callList(calls, !isRunning && message === messages.at(-1) && take), element.querySelector('footer'));
  }

  edit(i) {
    const message = this.chats.current.messages[i];
    const [, text, footer] = this.of(message).element.children;
    const field = h('textarea', {rows: Math.min(12, message.content.split('\n').length + 1), 'aria-label': 'Edit the message'});
    field.value = message.content;
    const submit = () => {
      this.chats.current.messages.splice(i);
      this.send(field.value);
    };
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) event.preventDefault(), submit();
      if (event.key === 'Escape') this.show();
    });
    text.replaceChildren(field);
    footer.replaceChildren(button('Send', submit), button('Cancel', () => this.show()));
    field.focus();
  }

  send(content) {
    if (content.trim() === '') return;
    const messages = this.chats.current.messages;
    messages.push({role: 'user', content});
    this.answer(messages.length);
  }

  /** Makes message `at` of the conversation, and forgets those from there on. */
  async answer(at) {
    this.stop();
    const chat = this.chats.current;
    chat.messages.splice(at);
    let body;
    try {
      body = requestBody(chat.messages);
    } catch (error) {
      this.show();
      return this.onRefusal(error);
    }
    const message = {role: 'assistant', content: ''};
    chat.messages.push(message);
    const running = this.running = {chat, message, abort: new AbortController()};
    this.onRefusal(null);
    this.chats.save();
    this.onChange();
    this.show();
    by('messages').setAttribute('aria-busy', 'true');
    try {
      await this.take(running, body);
    } catch (error) {
      if (!running.abort.signal.aborted) this.onRefusal(error);
      if (running.abort.signal.aborted && message.stats) message.stats.finish = 'stopped';
    }
    by('messages').setAttribute('aria-busy', 'false');
    const isEmpty = message.content === '' && !message.reasoning && !message.tool_calls && !message.stats.exact;
    if (isEmpty) chat.messages = chat.messages.filter((other) => other !== message);
    if (this.running === running) this.running = null;
    this.chats.save();
    if (this.chats.current === chat) this.show();
  }

  async take({message, abort}, body) {
    const begin = performance.now();
    const seconds = () => (performance.now() - begin) / 1000;
    const stats = message.stats = {completion: 0, exact: false};
    for await (const event of stream('v1/chat/completions', abort.signal, body)) {
      const choice = event.choices?.[0];
      const reasoning = choice?.delta?.reasoning ?? choice?.delta?.reasoning_content;  // with --reasoning-content
      if (choice?.delta?.content || reasoning || choice?.delta?.tool_calls || choice?.logprobs) {
        stats.first ??= seconds();
        stats.seconds = seconds();
        ++stats.completion;
        message.content += choice.delta.content ?? '';
        if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
        if (choice.delta?.tool_calls) addCalls(message, choice.delta.tool_calls);
        if (choice.logprobs?.content) (this.of(message).tokens ??= []).push(...choice.logprobs.content);
        this.refresh(message);
      }
      if (choice?.finish_reason) stats.finish = choice.finish_reason;
      if (event.usage) {
        Object.assign(stats, {prompt: event.usage.prompt_tokens, completion: event.usage.completion_tokens, exact: true,
          cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0});
      }
    }
  }

  /** Shows an answer's news once a frame, and follows it where the end was in sight. */
  refresh(message) {
    const state = this.of(message);
    if (state.isPending) return;
    state.isPending = true;
    requestAnimationFrame(() => {
      state.isPending = false;
      if (this.running?.message !== message) return;
      const list = by('messages');
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      this.fill(message);
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    });
  }

  stop() {
    this.running?.abort.abort();
    this.running = null;
  }
}
