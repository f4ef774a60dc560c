#include "chat/tool_calls.h"

#include <utility>

#include <fmt/format.h>

namespace nanovllm {

ToolCallParser::ToolCallParser(const ToolFormat& format, const ChatParserOptions& options)
    : format_(format), options_(options), finder_(format.marks) {}

void ToolCallParser::add(std::string_view text, ChatDelta& delta) {
  for (const char c : text) {
    if (reader_)
      take_block(c, delta);
    else
      take_text(c, delta);
  }
}

void ToolCallParser::take_text(char c, ChatDelta& delta) {
  if (at_start_ && !is_space(c) && finder_.holds_only_space()) {
    if (format_.first.find(c) != std::string_view::npos) {
      open("");
      return take_block(c, delta);
    }
  }
  const size_t size = delta.content.size();
  const auto mark = finder_.take(c, delta.content);
  if (mark) return open(*mark);
  if (delta.content.size() > size) at_start_ = false;
}

void ToolCallParser::open(std::string_view mark) {
  if (mark.empty()) raw_ = finder_.take_space();
  raw_ += mark;
  at_start_ = false;
  reader_ = format_.make_reader(mark, options_.tools);
}

void ToolCallParser::take_block(char c, ChatDelta& delta) {
  delta_ = &delta;
  raw_ += c;
  const CallReader::Step step = reader_->take(c, *this);
  if (step == CallReader::Step::more) return;
  if (step == CallReader::Step::last) return end_block(delta, false);
  if (!raw_.empty()) raw_.pop_back();
  end_block(delta, step == CallReader::Step::refused);
  take_text(c, delta);
}

/// The block has ended, or is none: its text that no call has is content then.
void ToolCallParser::end_block(ChatDelta& delta, bool refused) {
  reader_.reset();
  if (refused) delta.content += raw_;
  raw_.clear();
  if (std::exchange(in_call_, false) && options_.whole_calls) --num_calls_;
  call_ = {};
  is_left_out_ = false;
}

void ToolCallParser::finish(ChatDelta& delta) {
  delta_ = &delta;
  if (reader_) return end_block(delta, !reader_->finish(*this));
  if (num_calls_ > 0 && finder_.holds_only_space()) return;
  finder_.flush(delta.content);
}

void ToolCallParser::begin_call(std::string name) {
  is_left_out_ = options_.only_one_call && num_calls_ > 0;
  if (is_left_out_) return;
  in_call_ = true;
  give({.index = num_calls_, .id = new_id(), .name = std::move(name)});
  ++num_calls_;
}

void ToolCallParser::add_arguments(std::string_view json) {
  if (is_left_out_) return;
  if (options_.whole_calls) {
    call_.arguments += json;
    return;
  }
  give({.index = num_calls_ - 1, .arguments = std::string(json)});
}

void ToolCallParser::end_call() {
  in_call_ = false;
  raw_.clear();
  if (std::exchange(is_left_out_, false) || !options_.whole_calls) return;
  std::string arguments = std::move(call_.arguments);
  const size_t index = call_.index;
  call_.arguments.clear();
  delta_->tool_calls.push_back(std::exchange(call_, {}));
  delta_->tool_calls.push_back({.index = index, .arguments = std::move(arguments)});
}

/// Pieces of one call that came with one piece of text are one.
void ToolCallParser::give(ToolCallDelta&& news) {
  if (options_.whole_calls) {
    call_ = std::move(news);
    return;
  }
  raw_.clear();
  auto& list = delta_->tool_calls;
  if (news.name.empty() && !list.empty() && list.back().index == news.index &&
      list.back().name.empty())
    list.back().arguments += news.arguments;
  else
    list.push_back(std::move(news));
}

std::string ToolCallParser::new_id() const {
  // SplitMix64 over (seed, index): the calls of an answer differ, and those of two seeds.
  const auto mixed = [](uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  };
  uint64_t bits = mixed(mixed(options_.id_seed) + num_calls_);
  if (!format_.short_ids) return fmt::format("call_{:016x}{:08x}", bits, mixed(bits) >> 32);
  std::string id;
  for (; id.size() < 9; bits /= 62)
    id += "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[bits % 62];
  return id;
}

}  // namespace nanovllm
