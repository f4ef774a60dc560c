#include "nanovllm/tokenizer.h"

#include <algorithm>

#include "core/check.h"
#include "io/tokenizer/state.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 30;  // positions are 32-bit integers

}  // namespace

std::string_view Tokenizer::State::text_of(int32_t id) const {
  const std::string_view text = vocabulary.text(id);
  return text.empty() ? added_vocabulary.text(id) : text;
}

std::optional<int32_t> Tokenizer::State::find(std::string_view token) const {
  int32_t id = added_vocabulary.find(token);
  if (id == Vocabulary::kNone) id = vocabulary.find(token);
  return id == Vocabulary::kNone ? std::nullopt : std::optional(id);
}

const AddedToken* Tokenizer::State::added_token(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= added_index.size()) return nullptr;
  const int32_t index = added_index[static_cast<size_t>(id)];
  return index < 0 ? nullptr : &added_tokens->tokens()[static_cast<size_t>(index)];
}

bool Tokenizer::State::is_special(int32_t id) const {
  const AddedToken* token = added_token(id);
  return token && token->special;
}

std::optional<std::string_view> Tokenizer::State::decoder_text_of(int32_t id) const {
  if (const AddedToken* token = added_token(id)) return token->decoded;
  if (vocabulary.contains(id)) return vocabulary.text(id);
  return std::nullopt;
}

int32_t Tokenizer::State::vocab_size() const {
  return std::max(vocabulary.size(), added_vocabulary.size());
}

void Tokenizer::State::encode(std::string_view text, const ByteMarks& literal, bool parse_special,
                              std::vector<int32_t>& ids) const {
  Job job{parse_special, ids, SearchBudget(text.size())};
  std::vector<AddedTokens::Part> parts;
  added_tokens->split_raw(text, literal, parse_special, parts);
  for (const AddedTokens::Part& part : parts) {
    if (part.id) {
      ids.push_back(*part.id);
    } else {
      const auto at = static_cast<size_t>(part.text.data() - text.data());
      encode_section(part.text, part_of(literal, at, part.text.size()), at == 0, job);
    }
  }
}

void Tokenizer::State::encode_section(std::string_view text, const ByteMarks& literal,
                                      bool starts_input, Job& job) const {
  MarkedText normalized{{}, literal};
  if (normalizer) {
    normalized.bytes = text;
    normalizer->normalize(normalized, job.budget);
    text = normalized.bytes;
  }
  if (!added_tokens->has_normalized()) return encode_text(text, starts_input, job);
  std::vector<AddedTokens::Part> parts;
  added_tokens->split_normalized(text, normalized.literal, job.parse_special, parts);
  for (const AddedTokens::Part& part : parts) {
    if (part.id) {
      job.ids.push_back(*part.id);
    } else {
      encode_text(part.text, starts_input && part.text.data() == text.data(), job);
    }
  }
}

void Tokenizer::State::encode_text(std::string_view text, bool starts_input, Job& job) const {
  if (text.empty()) return;
  Pieces pieces;
  pieces.text = text;
  pieces.spans.push_back({0, text.size()});
  pieces.starts_input = starts_input;
  for (const auto& step : pre_tokenizers.steps) {
    step->apply(pieces, job.budget);
    check(pieces.text.size() <= max_bytes_of(text.size()), ErrorKind::invalid_argument,
          "the tokenizer's pre-tokenizers make {} bytes of a piece of text, more than {}",
          pieces.text.size(), max_bytes_of(text.size()));
  }
  for (const Span& span : pieces.spans)
    bpe->encode(pieces.text.substr(span.begin, span.size()), job.ids, job.scratch);
}

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens,
                                       bool parse_special_tokens,
                                       std::span<const TextRange> literal) const {
  check(text.size() <= kMaxTextBytes, ErrorKind::invalid_argument,
        "the text has {} bytes, more than {}", text.size(), kMaxTextBytes);
  const size_t invalid = find_invalid_utf8(text);
  check(invalid == std::string_view::npos, ErrorKind::invalid_argument,
        "the text is not valid UTF-8 at byte {}", invalid);
  std::vector<int32_t> ids;
  const PostProcessor& post = state_->post_processor;
  if (add_special_tokens) ids = post.before();
  ByteMarks marks(literal.empty() ? 0 : text.size());
  for (const TextRange& range : literal)
    for (size_t i = range.begin; i < std::min(range.end, text.size()); ++i) marks[i] = true;
  state_->encode(text, marks, parse_special_tokens, ids);
  if (add_special_tokens) ids.insert(ids.end(), post.after().begin(), post.after().end());
  return ids;
}

int64_t Tokenizer::min_tokens(std::string_view text) const {
  const TokenBytes& token = state_->token_bytes;
  if (token.most == 0 || text.size() < token.most) return 0;
  size_t bytes = text.size();
  if (token.drops_space) {
    if (find_invalid_utf8(text) != std::string_view::npos) return 0;
    for (size_t at = 0; at < text.size();) {
      const DecodedChar c = decode_utf8(text.data() + at);
      if (state_->categories.is_white_space(c.value)) bytes -= c.length;
      at += c.length;
    }
  }
  return static_cast<int64_t>(bytes / token.most);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  IncrementalDetokenizer stream(*this, skip_special_tokens);
  std::string text;
  for (const int32_t id : ids) text += stream.add(id);
  return text += stream.flush();
}

int64_t Tokenizer::vocab_size() const { return state_->vocab_size(); }
std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  return state_->find(token);
}
std::string_view Tokenizer::id_to_token(int32_t id) const { return state_->text_of(id); }
std::string Tokenizer::token_bytes(int32_t id) const {
  const auto text = state_->decoder_text_of(id);
  return text ? state_->decoder->bytes_of(*text) : std::string();
}
bool Tokenizer::is_special(int32_t id) const { return state_->is_special(id); }
std::optional<int32_t> Tokenizer::bos_token_id() const { return state_->bos_id; }
std::optional<int32_t> Tokenizer::eos_token_id() const { return state_->eos_id; }
const std::string& Tokenizer::chat_template() const { return state_->chat_template; }
const std::string& Tokenizer::tool_template() const { return state_->tool_template; }
const std::string& Tokenizer::left_out() const { return state_->left_out; }
const std::vector<std::pair<std::string, std::string>>& Tokenizer::special_tokens() const {
  return state_->special_tokens;
}
const std::string& Tokenizer::chat_template_place() const { return state_->chat_template_place; }

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special_tokens,
                                               std::span<const int64_t> visible)
    : state_(tokenizer.state_.get()),
      skip_special_tokens_(skip_special_tokens),
      visible_(visible.begin(), visible.end()),
      stream_(state_->decoder->start()) {}

IncrementalDetokenizer::~IncrementalDetokenizer() = default;
IncrementalDetokenizer::IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept = default;
IncrementalDetokenizer& IncrementalDetokenizer::operator=(IncrementalDetokenizer&&) noexcept =
    default;

std::string IncrementalDetokenizer::add(int32_t id) {
  const auto text = state_->decoder_text_of(id);
  const bool is_hidden = skip_special_tokens_ && state_->is_special(id) &&
                         std::ranges::find(visible_, id) == visible_.end();
  if (!text || is_hidden) return {};
  stream_->push(*text);
  return stream_->take();
}

std::string IncrementalDetokenizer::flush() {
  stream_->finish();
  std::string rest = stream_->take();
  stream_ = state_->decoder->start();
  return rest;
}

}  // namespace nanovllm
