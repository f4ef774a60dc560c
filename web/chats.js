// The conversations, in this browser's localStorage: {id, title, messages: [{role, content, stats}]}, the newest first.

const kPlace = 'nanovllm.chats';
const kMost = 50;

function saved() {
  try {
    return JSON.parse(localStorage.getItem(kPlace) ?? '[]').filter((chat) => Array.isArray(chat.messages));
  } catch {
    return [];
  }
}

export class Chats {
  /** `onNews` after another tab has changed the list. */
  constructor(onProblem, onNews) {
    this.onProblem = onProblem;
    this.list = saved();
    if (this.list.length === 0) this.add();
    this.current = this.list[0];
    addEventListener('storage', (event) => {
      if (event.key !== kPlace) return;
      this.list = [this.current, ...saved().filter(({id}) => id !== this.current.id)];  // the one that is open here is this tab's
      onNews();
    });
  }

  add() {
    const empty = this.list.find((chat) => chat.messages.length === 0);
    const chat = empty ?? {id: crypto.getRandomValues(new Uint32Array(2)).join('-'), title: 'New conversation', messages: []};
    this.list = [chat, ...this.list.filter((other) => other !== chat)].slice(0, kMost);
    this.current = chat;
    return chat;
  }

  remove(chat) {
    this.list = this.list.filter((other) => other !== chat);
    if (this.list.length === 0) this.add();
    if (this.current === chat) this.current = this.list[0];
    this.save();
  }

  save() {
    for (const chat of this.list) {
      const first = chat.messages.find((message) => message.role === 'user');
      if (first) chat.title = first.content.trim().slice(0, 60) || 'Conversation';
    }
    try {
      localStorage.setItem(kPlace, JSON.stringify(this.list));
    } catch {
      this.onProblem('This browser has no room for more conversations: delete some.');
    }
  }
}
