#include "io/tokenizer/patterns/string_matcher.h"

#include <algorithm>

namespace nanovllm {

StringMatcher::StringMatcher(const std::vector<std::string_view>& strings)
    : nodes_(1), ends_(strings.size()) {
  for (size_t i = 0; i < strings.size(); ++i) {
    if (strings[i].empty()) continue;
    uint32_t node = kRoot;
    for (const char c : strings[i]) node = add_child(node, static_cast<uint8_t>(c));
    ends_[i] = node;
    if (nodes_[node].string != kNone) continue;
    nodes_[node].string = static_cast<uint32_t>(i);
    nodes_[node].length = static_cast<uint32_t>(strings[i].size());
  }
  first_.fill(kNone);
  for (const auto& [byte, node] : nodes_[kRoot].children) first_[byte] = node;
  link_failures();
}

uint32_t StringMatcher::add_child(uint32_t node, uint8_t byte) {
  auto& children = nodes_[node].children;
  const auto at = std::lower_bound(children.begin(), children.end(), byte,
                                   [](const auto& c, uint8_t b) { return c.first < b; });
  if (at != children.end() && at->first == byte) return at->second;
  const auto created = static_cast<uint32_t>(nodes_.size());
  children.insert(at, {byte, created});
  const uint32_t depth = nodes_[node].depth + 1;
  nodes_.emplace_back().depth = depth;
  return created;
}

uint32_t StringMatcher::child(uint32_t node, uint8_t byte) const {
  if (node == kRoot) return first_[byte];
  const auto& children = nodes_[node].children;
  const auto at = std::lower_bound(children.begin(), children.end(), byte,
                                   [](const auto& c, uint8_t b) { return c.first < b; });
  return at != children.end() && at->first == byte ? at->second : kNone;
}

void StringMatcher::link_failures() {
  std::vector<uint32_t> queue = {kRoot};  // breadth first: a failure link leads to a smaller depth
  for (size_t i = 0; i < queue.size(); ++i) {
    const uint32_t parent = queue[i];
    for (const auto& [byte, node] : nodes_[parent].children) {
      uint32_t suffix = nodes_[parent].failure;
      uint32_t target = parent == kRoot ? kRoot : child(suffix, byte);
      while (target == kNone && suffix != kRoot) {
        suffix = nodes_[suffix].failure;
        target = child(suffix, byte);
      }
      Node& linked = nodes_[node];
      linked.failure = target == kNone ? kRoot : target;
      if (linked.string == kNone) {
        linked.string = nodes_[linked.failure].string;
        linked.length = nodes_[linked.failure].length;
      }
      queue.push_back(node);
    }
  }
}

uint32_t StringMatcher::next(uint32_t node, uint8_t byte) const {
  uint32_t found = child(node, byte);
  while (found == kNone && node != kRoot) {
    node = nodes_[node].failure;
    found = child(node, byte);
  }
  return found == kNone ? kRoot : found;
}

size_t StringMatcher::next_start(std::string_view text, size_t at) const {
  while (at < text.size() && first_[static_cast<uint8_t>(text[at])] == kNone) ++at;
  return at;
}

StringMatcher::Beginnings StringMatcher::find_beginnings(std::string_view text) const {
  Beginnings found;
  uint32_t node = kRoot;
  for (size_t end = 1; end <= text.size(); ++end) {
    if (node == kRoot) end = next_start(text, end - 1) + 1;
    if (end > text.size()) break;
    node = next(node, static_cast<uint8_t>(text[end - 1]));
    // A string, then the longest one that is a suffix of it, and so on.
    for (uint32_t at = node; nodes_[at].string != kNone;
         at = nodes_[ends_[nodes_[at].string]].failure)
      found.whole.push_back(end - nodes_[at].length);
  }
  for (; node != kRoot; node = nodes_[node].failure)
    found.cut.push_back(text.size() - nodes_[node].depth);
  return found;
}

std::optional<StringMatcher::Match> StringMatcher::find(std::string_view text, size_t from) const {
  std::optional<Match> best;
  uint32_t node = kRoot;
  for (size_t at = from; at < text.size(); ++at) {
    if (node == kRoot && !best) at = next_start(text, at);
    if (at == text.size()) break;
    node = next(node, static_cast<uint8_t>(text[at]));
    const size_t end = at + 1;
    // Matches that the automaton still follows begin after the best one: nothing better can come.
    if (best && end - nodes_[node].depth > best->span.begin) break;
    if (nodes_[node].string == kNone) continue;
    const size_t begin = end - nodes_[node].length;
    if (!best || begin <= best->span.begin) best = Match{{begin, end}, nodes_[node].string};
  }
  return best;
}

}  // namespace nanovllm
