// Work on text that methods, filters and tests share.
#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

std::string replace_text(Runtime& runtime, std::string_view text, std::string_view old,
                         std::string_view replacement, Int count) {
  runtime.budget().spend_bytes(text.size());
  TextBuilder out(runtime.budget());
  Int left = count < 0 ? static_cast<Int>(text.size()) + 1 : count;
  size_t at = 0;
  if (old.empty()) {  // before each code point, and at the end
    while (left-- > 0) {
      out.append(replacement);
      if (at >= text.size()) return out.take();
      const size_t size = decode_at(text, at).size;
      out.append(text.substr(at, size));
      at += size;
    }
  } else {
    for (size_t found = text.find(old); found != std::string_view::npos && left > 0;
         found = text.find(old, at)) {
      out.append(text.substr(at, found - at));
      out.append(replacement);
      at = found + old.size();
      --left;
    }
  }
  out.append(text.substr(at));
  return out.take();
}

std::string pad_text(Runtime& runtime, std::string_view text, Int width, std::string_view fill,
                     int side) {
  const auto length = static_cast<Int>(length_of(text));
  if (width <= length) return std::string(text);
  const auto missing = static_cast<size_t>(clamp_index(width - length));
  // Python puts the odd one of a centred text to the left where the width is odd.
  const size_t left =
      side > 0 ? missing
               : (side < 0 ? 0 : missing / 2 + (missing & static_cast<size_t>(width) & 1));
  runtime.budget().expect_room(missing);
  runtime.budget().spend_bytes(missing);
  TextBuilder out(runtime.budget());
  for (size_t i = 0; i < left; ++i) out.append(fill);
  out.append(text);
  for (size_t i = left; i < missing; ++i) out.append(fill);
  return out.take();
}

bool has_case(Runtime& runtime, std::string_view text, bool (*has)(char32_t),
              bool (*has_not)(char32_t)) {
  runtime.budget().spend_bytes(text.size());
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    if (has_not(c.value)) return false;
    any |= has(c.value);
    at += c.size;
  }
  return any;
}

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace nanovllm::jinja
