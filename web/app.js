// The page: what belongs to which button.
import {by, h, button} from './dom.js';
import {Chats} from './chats.js';
import {ChatView} from './chat.js';
import {EngineView, modelName} from './engine.js';
import {initSettings, askForKey} from './settings.js';

function showProblem(error) {
  by('problem').hidden = !error;
  by('problem').textContent = error?.message ?? error ?? '';
  if (error?.status === 401) askForKey();
}

const chats = new Chats(showProblem, showList);
const view = new ChatView(chats, showList, showProblem);
const engine = new EngineView();

function toggle(id, name, isShown) {
  by(name).setAttribute('aria-expanded', String(isShown));
  by(id).classList.toggle('open', isShown);
}

function showList() {
  by('chats').replaceChildren(...chats.list.map((chat) => {
    const open = button(chat.title, () => choose(chat), {class: 'chat', 'aria-current': chat === chats.current ? 'true' : false});
    const remove = button('×', () => {
      if (chat === chats.current) view.stop();
      chats.remove(chat);
      showAll();
    }, {class: 'remove', 'aria-label': `Delete ${chat.title}`});
    return h('li', {}, open, remove);
  }));
}

function showAll() {
  showList();
  view.show();
}

function choose(chat) {
  view.stop();
  chats.current = chat;
  toggle('side', 'menu', false);
  showProblem(null);
  showAll();
  by('input').focus();
}

function submit() {
  const text = by('input').value;
  if (view.running || text.trim() === '') return;
  by('input').value = '';
  view.send(text);
}

async function greet() {
  by('model').textContent = await modelName(showProblem);
}

by('new-chat').addEventListener('click', () => choose(chats.add()));
by('menu').addEventListener('click', () => toggle('side', 'menu', !by('side').classList.contains('open')));
by('engine-button').addEventListener('click', () => {
  const isShown = by('engine').hidden;
  by('engine').hidden = !isShown;
  document.body.classList.toggle('with-engine', isShown);
  toggle('engine', 'engine-button', isShown);
  engine.show(isShown);
});
by('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  submit();
});
by('input').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
by('stop').addEventListener('click', () => view.stop());
addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && view.running) view.stop();
});
initSettings(() => {
  showProblem(null);
  greet();
  engine.reconnect();
});
showAll();
greet();
