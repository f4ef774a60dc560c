// The map of the KV cache: a square for each block, filled as far as its tokens are computed.
import {count} from './dom.js';

export const kFree = 0, kCached = 1;  // BlockState: free, cached, used, used_and_cached

const expand = (runs, put) => {
  for (let i = 0; i < runs.length; i += 2) put(runs[i], runs[i + 1]);
};

/** The block table of a sequence, from its runs. */
export function blockTable(sequence) {
  const table = [];
  expand(sequence.blocks, (first, n) => {
    for (let i = 0; i < n; ++i) table.push(first + i);
  });
  return table;
}

export class BlockMap {
  constructor(canvas, onPoint) {
    Object.assign(this, {canvas, onPoint, states: [], owners: new Map(), shown: 256, selected: null, cursor: null});
    canvas.addEventListener('mousemove', (event) => this.point(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener('mouseleave', () => this.point(null));
    canvas.addEventListener('blur', () => this.point(null));
    canvas.addEventListener('keydown', (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns}[event.key];
      if (!step) return;
      event.preventDefault();
      const next = this.cursor === null ? 0 : this.cursor + step;
      if (next >= 0 && next < Math.min(this.shown, this.states.length)) this.point(next);
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  at(x, y) {
    const column = Math.floor(x / this.cell), block = Math.floor(y / this.cell) * this.columns + column;
    return column < this.columns && block < Math.min(this.shown, this.states.length) ? block : null;
  }

  point(block) {
    this.cursor = block;
    this.draw();
    this.onPoint(block);
  }

  update({info, blocks, running}) {
    this.states = [];
    expand(blocks, (state, n) => {
      for (let i = 0; i < n; ++i) this.states.push(state);
    });
    this.owners = new Map();  // of a block: [sequence, place in its table]
    this.shared = 0;
    for (const sequence of running) {
      for (const [place, block] of blockTable(sequence).entries()) {
        const list = this.owners.get(block);
        if (list?.length === 1) ++this.shared;
        if (list) list.push([sequence, place]);
        else this.owners.set(block, [[sequence, place]]);
      }
    }
    this.blockSize = info.block_size;
    // Blocks are taken from the front at first: those behind the last that was ever used are left out.
    const last = this.states.findLastIndex((state) => state !== kFree);
    while (this.shown <= last && this.shown < this.states.length) this.shown *= 2;
    this.draw();
  }

  describe(block) {
    const state = this.states[block];
    const owners = this.owners.get(block) ?? [];
    if (state === kFree) return `Block ${block}: free.`;
    if (state === kCached) return `Block ${block}: cached. No sequence uses it; a prompt that begins with its tokens may.`;
    if (owners.length === 0) return `Block ${block}: in use.`;
    const place = owners[0][1], from = place * this.blockSize;
    const who = owners.length === 1 ? 'one sequence' : `${owners.length} sequences, which share it`;
    return `Block ${block}: tokens ${count(from)} to ${count(from + this.blockSize - 1)} of ${who}.`;
  }

  layout() {
    const width = this.canvas.clientWidth, n = Math.min(this.shown, Math.max(this.states.length, 1));
    for (this.cell = 20; this.cell > 3; --this.cell) {
      this.columns = Math.max(1, Math.floor(width / this.cell));
      if (Math.ceil(n / this.columns) * this.cell <= 260) break;
    }
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const height = Math.ceil(n / this.columns) * this.cell, scale = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    return n;
  }

  draw() {
    if (this.canvas.clientWidth === 0) return;
    const n = this.layout(), context = this.canvas.getContext('2d'), style = getComputedStyle(this.canvas);
    const colours = ['--free', '--cached', '--used', '--text'].map((name) => style.getPropertyValue(name));
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    for (let block = 0; block < n; ++block) this.drawBlock(context, block, colours);
  }

  drawBlock(context, block, [free, cached, used, text]) {
    const gap = this.cell > 6 ? 2 : 1, size = this.cell - gap;
    const x = (block % this.columns) * this.cell, y = Math.floor(block / this.columns) * this.cell;
    const state = this.states[block], owners = this.owners.get(block) ?? [];
    const isDim = this.selected !== null && !owners.some(([sequence]) => sequence.hue === this.selected);
    context.globalAlpha = isDim ? 0.3 : 1;
    if (state === kFree || state === kCached || owners.length === 0) {
      context.fillStyle = state === kFree || state === undefined ? free : state === kCached ? cached : used;
      context.fillRect(x, y, size, size);
    } else {
      const [sequence, place] = owners.find(([s]) => s.hue === this.selected) ?? owners[0];
      const filled = Math.max(0, Math.min(1, (sequence.computed - place * this.blockSize) / this.blockSize));
      context.fillStyle = `hsl(${sequence.hue} 62% 52% / 0.3)`;
      context.fillRect(x, y, size, size);
      context.fillStyle = `hsl(${sequence.hue} 62% 52%)`;
      context.fillRect(x, y + size * (1 - filled), size, size * filled);
      if (owners.length > 1) {  // shared: a window of the text's colour
        const inset = Math.max(1, Math.round(size / 3));
        context.fillStyle = text;
        context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
      }
    }
    context.globalAlpha = 1;
    if (block === this.cursor) {
      context.strokeStyle = text;
      context.lineWidth = 2;
      context.strokeRect(x, y, size, size);
    }
  }
}
