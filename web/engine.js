// The engine, live: the server's updates as numbers, a map of blocks and a list of sequences. The stream is open only while the view is
// shown and the tab is in sight.
import {by, h, count, short} from './dom.js';
import {get, stream} from './api.js';
import {BlockMap, blockTable} from './blocks.js';

const kMostRows = 48;
// Long enough for the answers to share blocks of their prompt.
const kStory = 'Tell me a story. It has a brave animal that lives in the middle of a forest, and a friend who comes to help when the night is dark. ' +
  'There are fireflies in the grass that look like little lamps, a strange noise outside the door, and a witch who is kind after all. ' +
  'Nobody is afraid for long, everybody learns that a kind deed is never too small, and at the end all of them are the best of friends.';
const kSpan = 60000;  // milliseconds that the lines go back
const kTiles = {speed: 'Tokens/s', step: 'Time of a step', batch: 'Running, waiting', prompts: 'Prompt tokens/s', preemptions: 'Preemptions',
  usage: 'Cache in use', shared: 'Shared blocks', hits: 'Prefix hits'};

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

export class EngineView {
  constructor() {
    this.history = [];
    this.rows = [];
    this.isShown = false;
    this.map = new BlockMap(by('blocks'), (block) => {
      by('block-text').textContent = block === null ? 'Point at a block, or move with the arrow keys.' : this.map.describe(block);
    });
    this.tiles = {};
    for (const [name, label] of Object.entries(kTiles)) {
      this.tiles[name] = h('dd', {}, '–');
      by('tiles').append(h('div', {id: `tile-${name}`}, h('dt', {}, label), this.tiles[name]));
    }
    for (const name of ['speed', 'step']) {
      this.tiles[`${name}Line`] = h('canvas', {class: 'line', 'aria-hidden': 'true'});
      this.tiles[name].after(this.tiles[`${name}Line`]);
    }
    const legend = [['free', 'free'], ['cached', 'cached, no user'], ['own', 'in use, one colour a sequence'], ['shared', 'shared']];
    by('legend').append(...legend.map(([name, text]) => h('li', {}, h('span', {class: `swatch ${name}`}), text)));
    by('load').addEventListener('click', () => this.sendLoad());
    document.addEventListener('visibilitychange', () => this.connect());
  }

  show(isShown) {
    this.isShown = isShown;
    this.connect();
  }

  say(text) {
    if (by('engine-state').textContent !== text) by('engine-state').textContent = text;
  }

  /** Opens or closes the stream, as what is in sight asks for. */
  async connect() {
    const isWanted = this.isShown && document.visibilityState === 'visible';
    if (!isWanted || this.abort) {
      if (!isWanted) this.abort?.abort();
      return;
    }
    const abort = this.abort = new AbortController();
    this.history = [];
    while (!abort.signal.aborted) {
      try {
        for await (const update of stream('engine/live', abort.signal)) this.update(update);
      } catch (error) {
        if (!abort.signal.aborted) this.say(`No updates: ${error.message}`);
      }
      if (!abort.signal.aborted) await sleep(2000);
    }
    this.abort = null;
    this.connect();  // wanted again while it was closing
  }

  /** The view after a new key: the stream begins anew. */
  reconnect() {
    this.abort?.abort();
  }

  async sendLoad() {
    const body = {messages: [{role: 'user', content: kStory}], n: 8, temperature: 1, max_tokens: 300, ignore_eos: true, stream: true};
    by('load').disabled = true;
    try {
      for await (const event of stream('v1/chat/completions', undefined, body)) void event;  // only its traces matter here
    } catch (error) {
      this.say(`Not sent: ${error.message}`);
    }
    by('load').disabled = false;
  }

  update(update) {
    const {info, stats} = update, now = performance.now();
    this.say(`${info.model} on ${info.device}: ${count(stats.steps)} steps so far`);
    by('block-size').textContent = info.block_size;
    this.map.update(update);
    this.showTiles(update, now);
    this.showSequences(update);
    const shown = Math.min(this.map.shown, info.num_blocks);
    by('cache-size').textContent = `${count(info.num_blocks)} blocks of ${info.block_size} tokens` +
      (shown < info.num_blocks ? `, the first ${count(shown)} shown` : '');
  }

  showTiles({info, stats}, now) {
    const before = this.history.findLast((sample) => now - sample.now >= 1000);
    const sample = {now, ...stats};
    if (before) {
      const seconds = (now - before.now) / 1000, steps = stats.steps - before.steps;
      sample.speed = (stats.generated_tokens - before.generated_tokens) / seconds;
      sample.prompts = (stats.prompt_tokens - before.prompt_tokens) / seconds;
      sample.step = steps > 0 ? (1000 * (stats.step_seconds - before.step_seconds)) / steps : 0;
    }
    this.history.push(sample);
    while (now - this.history[0].now > kSpan) this.history.shift();
    const used = info.num_blocks - stats.free_blocks;
    const put = (name, text) => {
      this.tiles[name].textContent = text;
    };
    put('speed', sample.speed === undefined ? '–' : short(sample.speed));
    put('prompts', sample.prompts === undefined ? '–' : short(sample.prompts));
    put('step', sample.step ? `${short(sample.step)} ms` : '–');
    put('batch', `${count(stats.running)}, ${count(stats.waiting)}`);
    put('usage', `${short((100 * used) / info.num_blocks)} %`);
    put('shared', count(this.map.shared));
    put('hits', stats.prompt_tokens > 0 ? `${short((100 * stats.cached_prompt_tokens) / stats.prompt_tokens)} %` : '–');
    put('preemptions', count(stats.preemptions));
    for (const name of ['speed', 'step']) this.drawLine(this.tiles[`${name}Line`], name, now);
  }

  drawLine(canvas, name, now) {
    const width = canvas.clientWidth, height = canvas.clientHeight, context = canvas.getContext('2d');
    if (width === 0) return;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    context.scale(devicePixelRatio, devicePixelRatio);
    const samples = this.history.filter((sample) => sample[name] !== undefined);
    const most = Math.max(1e-9, ...samples.map((sample) => sample[name]));
    const span = Math.max(kSpan / 6, now - this.history[0].now);
    context.beginPath();
    for (const sample of samples)
      context.lineTo(width * (1 - (now - sample.now) / span), height - 1 - (sample[name] / most) * (height - 2));
    context.strokeStyle = getComputedStyle(canvas).color;
    context.lineWidth = 1.5;
    context.stroke();
  }

  showSequences({running, waiting, stats}) {
    const all = [...running, ...waiting].slice(0, kMostRows);
    while (this.rows.length < all.length) this.addRow();
    this.rows.forEach((row, i) => {
      row.button.hidden = i >= all.length;
      if (i < all.length) this.fillRow(row, all[i], i < running.length);
    });
    this.more.textContent = stats.running + stats.waiting > all.length ? `and ${count(stats.running + stats.waiting - all.length)} more`
      : all.length === 0 ? 'No sequence runs or waits.' : '';
    if (this.map.selected !== null && !running.some((s) => s.hue === this.map.selected)) this.select(null);
    const chosen = running.find((s) => s.hue === this.map.selected);
    if (chosen) by('block-text').textContent = `Block table: ${blockTable(chosen).slice(0, 64).join(' → ')}${chosen.blocks.length > 64 ? ' …' : ''}`;
  }

  get more() {
    return this.moreText ??= by('sequences').appendChild(h('p', {class: 'note'}));
  }

  addRow() {
    const row = {swatch: h('span', {class: 'swatch'}), phase: h('span', {class: 'phase'}), bar: h('span', {class: 'bar'}), number: h('span', {class: 'number'})};
    row.bar.append(h('i', {class: 'from-cache'}), h('i', {class: 'read'}), h('i', {class: 'made'}));
    row.button = h('button', {type: 'button', class: 'sequence', 'aria-pressed': 'false',
      click: () => this.select(this.map.selected === row.hue ? null : row.hue)}, row.swatch, row.phase, row.bar, row.number);
    this.more.before(row.button);
    this.rows.push(row);
  }

  select(hue) {
    this.map.selected = hue;
    this.map.draw();
    by('block-text').textContent = hue === null ? 'Point at a block, or move with the arrow keys.' : by('block-text').textContent;
  }

  fillRow(row, s, isRunning) {
    row.hue = isRunning ? s.hue : null;
    row.button.disabled = !isRunning;
    row.button.setAttribute('aria-pressed', String(isRunning && this.map.selected === s.hue));
    const colour = `hsl(${s.hue} 62% 52%)`, known = s.prompt + s.generated;
    row.swatch.style.background = isRunning ? colour : 'transparent';
    row.swatch.style.borderColor = colour;
    const isDecoding = s.computed >= s.prompt && s.computed >= known - 1;
    const phase = !isRunning ? (s.preemptions > 0 ? 'preempted' : 'waiting') : isDecoding ? 'decode' : s.generated > 0 ? 'recompute' : 'prefill';
    row.phase.textContent = phase;
    row.number.textContent = !isRunning ? `${count(known)} tokens`
      : isDecoding ? `${count(s.generated)} of ${count(s.max)}` : `${count(s.computed)} of ${count(known)}${s.step > 1 ? `, +${count(s.step)}` : ''}`;
    const whole = s.prompt + s.max, cached = Math.min(s.cached, s.computed);
    const [fromCache, read, made] = row.bar.children;
    const part = (element, tokens, opacity) => {
      element.style.width = `${(100 * Math.max(0, tokens)) / whole}%`;
      element.style.background = `hsl(${s.hue} 62% 52% / ${opacity})`;
    };
    part(fromCache, cached, 0.3);
    part(read, Math.min(s.computed, s.prompt) - cached, 0.6);
    part(made, isRunning ? s.computed - s.prompt : 0, 1);
  }
}

/** The name of what is served; waits for the model to be loaded. */
export async function modelName(onRefusal) {
  while (true) {
    try {
      return (await get('v1/models')).data[0].id;
    } catch (error) {
      if (error.status !== 503) return onRefusal(error), '';
      await sleep(1000);
    }
  }
}
