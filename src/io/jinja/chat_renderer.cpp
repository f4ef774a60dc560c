#include "io/jinja/chat_renderer.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr char32_t kFirst = 0x100000, kLast = 0x10FFFD;  // plane 16: for private use

struct Spelled {
  char32_t character;
  size_t length;  // bytes of its spelling
};

std::optional<char32_t> hexadecimal(std::string_view digits) {
  uint32_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

/// A character of plane 16 at the start of `text`: itself, as Python's repr() spells it
/// ("\U00101234"), or as JSON in ASCII does ("\udbc4\ude34").
std::optional<Spelled> plane_16(std::string_view text) {
  std::optional<char32_t> character;
  size_t length = 4;
  if (text.starts_with('\xF4') && text.size() >= length) {
    character = decode_utf8(text.data()).value;
  } else if (text.starts_with("\\U0010") && text.size() >= 10) {
    character = hexadecimal(text.substr(2, 8));
    length = 10;
  } else if (text.starts_with("\\ud") && text.size() >= 12 && text.substr(6).starts_with("\\ud")) {
    const auto high = hexadecimal(text.substr(2, 4)), low = hexadecimal(text.substr(8, 4));
    if (high && low) character = 0x10000 + ((*high & 0x3FF) << 10 | (*low & 0x3FF));
    length = 12;
  }
  if (!character || *character < kFirst || *character > kLast) return std::nullopt;
  return Spelled{*character, length};
}

/// Private characters that stand for others while a template runs.
class Placeholders {
 public:
  explicit Placeholders(const FindControlText& find) : find_(find) {}

  /// Characters that occur in `text` stand for themselves.
  void keep(std::string_view text) {
    for_each(
        text, [](std::string_view) {},
        [this](const Spelled& s, std::string_view) { kept_.insert(s.character); });
  }
  void keep(const Json& value) {
    if (value.is_string()) return keep(std::string_view(value.get_ref<const std::string&>()));
    if (!value.is_structured()) return;
    for (const auto& [key, member] : value.items()) {
      if (value.is_object()) keep(std::string_view(key));
      keep(member);
    }
  }

  /// `text` with placeholders where it has text of control tokens.
  std::string put(std::string_view text) {
    std::string out;
    size_t done = 0;
    for (const size_t at : find_(text)) {
      const DecodedChar c = decode_utf8(text.data() + at);
      out += text.substr(done, at - done);
      append_utf8(out, placeholder_for(c.value));
      done = at + c.length;
    }
    return out += text.substr(done);
  }
  /// All texts of a value, the keys of objects too.
  Json put(const Json& value) {
    if (value.is_string()) return put(std::string_view(value.get_ref<const std::string&>()));
    if (!value.is_structured()) return value;
    Json out = value.is_array() ? Json::array() : Json::object();
    if (value.is_array()) {
      for (const Json& member : value) out.push_back(put(member));
      return out;
    }
    // Distinct keys stay distinct, and looking each one up would be quadratic.
    Json::object_t::Container& members = out.get_ref<Json::object_t&>();
    for (const auto& [key, member] : value.get_ref<const Json::object_t&>())
      members.emplace_back(put(std::string_view(key)), put(member));
    return out;
  }

  RenderedChat restore(std::string_view rendered) const {
    RenderedChat chat;
    for_each(
        rendered, [&chat](std::string_view text) { chat.text += text; },
        [&](const Spelled& spelled, std::string_view text) {
          const auto original = originals_.find(spelled.character);
          if (original == originals_.end()) {
            chat.text += text;
            return;
          }
          const size_t begin = chat.text.size();
          append_utf8(chat.text, original->second);
          chat.literal.push_back({begin, chat.text.size()});
        });
    return chat;
  }

 private:
  /// Where the next spelling may begin. (find_first_of() calls a function for each character.)
  static size_t next_candidate(std::string_view text, size_t at) {
    while (at < text.size() && text[at] != '\xF4' && text[at] != '\\') ++at;
    return at;
  }

  /// Walks through `text`, by the characters of plane 16 and what is between them.
  template <class Other, class Private>
  static void for_each(std::string_view text, Other other, Private take) {
    size_t done = 0;
    for (size_t at = 0; (at = next_candidate(text, at)) < text.size();) {
      const auto spelled = plane_16(text.substr(at));
      if (!spelled) {
        ++at;
        continue;
      }
      other(text.substr(done, at - done));
      take(*spelled, text.substr(at, spelled->length));
      done = at += spelled->length;
    }
    other(text.substr(done));
  }

  char32_t placeholder_for(char32_t original) {
    const auto known = placeholders_.find(original);
    if (known != placeholders_.end()) return known->second;
    while (kept_.contains(next_)) ++next_;
    check(next_ <= kLast, ErrorKind::invalid_argument,
          "messages use too many characters of Unicode's plane 16 beside text of control tokens");
    placeholders_[original] = next_;
    originals_[next_] = original;
    return next_++;
  }

  const FindControlText& find_;
  std::set<char32_t> kept_;
  char32_t next_ = kFirst;
  std::map<char32_t, char32_t> placeholders_, originals_;
};

/// Whether a message is taken as it is: the application wrote it, or the model did.
bool is_trusted(const Json& message) {
  const auto role = message.find("role");
  return role != message.end() &&
         (*role == "system" || *role == "developer" || *role == "assistant");
}

}  // namespace

void end_in_final_message(RenderedChat& chat, const Json& messages) {
  const Json* content = nullptr;
  if (messages.is_array() && !messages.empty() && messages.back().contains("content"))
    content = &messages.back()["content"];
  if (content && content->is_array() && !content->empty() && content->back().contains("text"))
    content = &content->back()["text"];
  check(content && content->is_string(), ErrorKind::invalid_argument,
        "continue_final_message needs a last message with a text");
  std::string_view text = content->get_ref<const std::string&>();
  constexpr std::string_view kSpace = " \t\n\r\v\f";
  const size_t begin = text.find_first_not_of(kSpace);
  check(begin != text.npos, ErrorKind::invalid_argument,
        "continue_final_message needs a last message with a text");
  text.remove_prefix(begin);
  // Templates may trim a text.
  const std::string_view trimmed = text.substr(0, text.find_last_not_of(kSpace) + 1);
  const size_t at = chat.text.rfind(trimmed);
  check(at != chat.text.npos, ErrorKind::invalid_argument,
        "continue_final_message: the chat template leaves the last message's text out");
  const bool is_whole = chat.text.compare(at, text.size(), text) == 0;
  chat.text.resize(at + (is_whole ? text.size() : trimmed.size()));
  std::erase_if(chat.literal, [&](const TextRange& range) { return range.end > chat.text.size(); });
}

ChatRenderer::ChatRenderer(std::string source, std::string name, FindControlText find_control_text,
                           ChatClock clock, const std::string& tool_source)
    : source_(std::move(source)),
      template_(source_, name, clock),
      find_control_text_(std::move(find_control_text)) {
  if (tool_source.empty()) return;
  with_tools_.emplace(tool_source, name + ", tool_use", std::move(clock));
  source_ += tool_source;
}

RenderedChat ChatRenderer::render(Json context) const {
  const ChatTemplate& chosen = chat_template(context["tools"]);
  if (!find_control_text_) return {chosen.render(context)};
  Placeholders placeholders(find_control_text_);
  placeholders.keep(std::string_view(source_));
  placeholders.keep(context);
  for (Json& message : context["messages"])
    if (!is_trusted(message)) message = placeholders.put(message);
  context["documents"] = placeholders.put(context["documents"]);
  std::string text;
  try {
    text = chosen.render(context);
  } catch (const Error& error) {  // which may quote a message
    throw Error(error.kind(), placeholders.restore(error.what()).text);
  }
  return placeholders.restore(text);
}

}  // namespace nanovllm
