#include "cli/terminal/line_editor.h"

#include <array>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <cwchar>

#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <unistd.h>

#include "cli/terminal/output.h"
#include "core/check.h"

namespace nanovllm::cli {
namespace {

constexpr const char* kBracketedPasteOn = "\x1b[?2004h";
constexpr const char* kBracketedPasteOff = "\x1b[?2004l";
constexpr const char* kClearLine = "\r\x1b[J";
constexpr std::wstring_view kPasteEnd = L"\x1b[201~";
constexpr int kHistoryLines = 1000;

/// Says a sequence to a terminal that knows some.
void escape(const char* sequence) {
  if (takes_escapes(STDERR_FILENO)) say(sequence);
}

void on_change(int) {}  // a wait for keys ends, and the terminal is looked at again

/// Handlers of signals that change the terminal, while the editor lives.
class TerminalSignals {
 public:
  TerminalSignals() {
    struct sigaction action {};
    action.sa_handler = on_change;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_[i]);
  }
  ~TerminalSignals() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  TerminalSignals(const TerminalSignals&) = delete;
  TerminalSignals& operator=(const TerminalSignals&) = delete;

 private:
  static constexpr std::array kSignals = {SIGWINCH, SIGCONT};
  std::array<struct sigaction, kSignals.size()> before_{};
};

/// Characters are UTF-8 here, whatever the locale says or fails to say.
void use_utf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(::nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
}

}  // namespace

struct LineEditor::State {
  explicit State(const Interrupt& of) : interrupt(of) {}

  static State& of(EditLine* editor) {
    void* state = nullptr;
    el_get(editor, EL_CLIENTDATA, &state);
    return *static_cast<State*>(state);
  }
  static char* prompt_of(EditLine* editor) { return of(editor).prompt.data(); }
  static int next_key(EditLine* editor, wchar_t* key);
  static unsigned char take_paste(EditLine* editor, wint_t);

  const Interrupt& interrupt;
  TerminalSignals signals;
  std::string prompt;
  EditLine* editor = nullptr;
  History* history = nullptr;
};

/// One character from the terminal: 1, or -1 if a signal of `interrupt` came or reading fails, or 0
/// at the end.
int LineEditor::State::next_key(EditLine* editor, wchar_t* key) {
  const State& state = of(editor);
  std::mbstate_t decoding{};
  while (true) {
    pollfd polls[] = {{STDIN_FILENO, POLLIN, 0}, {state.interrupt.descriptor(), POLLIN, 0}};
    if (::poll(polls, 2, -1) < 0) {
      if (errno != EINTR || state.interrupt.requested()) return -1;
      // The window has another size, or the program was stopped and goes on.
      escape(kClearLine);
      el_set(editor, EL_PREP_TERM, 0);
      el_set(editor, EL_PREP_TERM, 1);
      el_resize(editor);
      el_set(editor, EL_REFRESH);
      continue;
    }
    if (polls[1].revents != 0) return -1;
    char byte = 0;
    const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return static_cast<int>(n);
    const size_t taken = std::mbrtowc(key, &byte, 1, &decoding);
    if (taken == static_cast<size_t>(-2)) continue;  // more bytes follow
    if (taken != static_cast<size_t>(-1)) return 1;
    decoding = {};  // no UTF-8: not a key
  }
}

/// Line ends of a paste are part of the text. A key of the user's ends the message.
unsigned char LineEditor::State::take_paste(EditLine* editor, wint_t) {
  std::wstring text;
  wchar_t key = 0;
  while (!text.ends_with(kPasteEnd)) {
    if (el_wgetc(editor, &key) != 1) return CC_EOF;
    text += key == L'\r' ? L'\n' : key;
  }
  text.resize(text.size() - kPasteEnd.size());
  std::erase_if(text,
                [](wchar_t c) { return (c < L' ' && c != L'\n' && c != L'\t') || c == 0x7f; });
  if (!text.empty()) el_winsertstr(editor, text.c_str());
  return CC_REFRESH;
}

LineEditor::LineEditor(const Interrupt& interrupt) : state_(std::make_unique<State>(interrupt)) {
  use_utf8();
  State& s = *state_;
  s.editor = el_init("nanovllm", stdin, stderr, stderr);
  s.history = history_init();
  check(s.editor && s.history, "the terminal's line editor cannot start");
  HistEvent event;
  history(s.history, &event, H_SETSIZE, kHistoryLines);
  history(s.history, &event, H_SETUNIQUE, 1);
  el_set(s.editor, EL_CLIENTDATA, &s);
  el_set(s.editor, EL_PROMPT, State::prompt_of);
  el_set(s.editor, EL_GETCFN, State::next_key);
  el_set(s.editor, EL_SIGNAL, 0);
  el_set(s.editor, EL_HIST, history, s.history);
  el_set(s.editor, EL_EDITOR, "emacs");
  el_set(s.editor, EL_ADDFN, "take-paste", "take pasted text as it is", State::take_paste);
  constexpr std::array<std::array<const char*, 2>, 13> kBindings = {{
      {"\\e[200~", "take-paste"},
      {"\\e[H", "ed-move-to-beg"},
      {"\\e[1~", "ed-move-to-beg"},
      {"\\eOH", "ed-move-to-beg"},
      {"\\e[F", "ed-move-to-end"},
      {"\\e[4~", "ed-move-to-end"},
      {"\\eOF", "ed-move-to-end"},
      {"\\e[3~", "ed-delete-next-char"},
      {"\\e[1;5C", "em-next-word"},
      {"\\e[1;5D", "ed-prev-word"},
      {"^R", "em-inc-search-prev"},
      {"^W", "ed-delete-prev-word"},
      {"^U", "vi-kill-line-prev"},
  }};
  for (const auto& [keys, command] : kBindings) el_set(s.editor, EL_BIND, keys, command, nullptr);
}

LineEditor::~LineEditor() {
  if (state_->history) history_end(state_->history);
  if (state_->editor) el_end(state_->editor);
}

LineEditor::Result LineEditor::read(const char* prompt, std::string& text) {
  State& s = *state_;
  s.prompt = prompt;
  text.clear();
  escape(kBracketedPasteOn);
  int length = 0;
  // Raw before the prompt is seen: what is typed at once would be the terminal's own to read.
  el_set(s.editor, EL_PREP_TERM, 1);
  const char* line = el_gets(s.editor, &length);
  escape(kBracketedPasteOff);
  if (line) {
    text.assign(line, static_cast<size_t>(length));
    if (text.ends_with('\n')) text.pop_back();
    return Result::text;
  }
  if (!s.interrupt.requested()) return Result::end;
  const LineInfo* typed = el_line(s.editor);
  text.assign(typed->buffer, typed->lastchar);
  return Result::interrupted;
}

void LineEditor::remember(const std::string& text) {
  HistEvent event;
  history(state_->history, &event, H_ENTER, text.c_str());
}

}  // namespace nanovllm::cli
