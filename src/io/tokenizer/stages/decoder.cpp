#include "io/tokenizer/stages/decoder.h"

#include <optional>
#include <utility>

#include "io/tokenizer/nesting.h"
#include "io/tokenizer/stages/replace.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

class JoinWithSpaces final : public DecodeStage {
 public:
  void push(std::string_view piece) override {
    if (!first_) pass(" ");
    first_ = false;
    pass(piece);
  }

 private:
  bool first_ = true;
};

/// Decoder bounds what comes of it.
std::string replaced(const Replacement& replacement, std::string_view piece) {
  MarkedText text{std::string(piece)};
  SearchBudget budget(piece.size());
  replacement.apply(text, budget, text.bytes.max_size());
  return std::move(text.bytes);
}

class ReplaceTokens final : public DecodeStage {
 public:
  explicit ReplaceTokens(std::shared_ptr<const Replacement> replacement)
      : replacement_(std::move(replacement)) {}
  void push(std::string_view piece) override { next_->push(replaced(*replacement_, piece)); }

 private:
  std::shared_ptr<const Replacement> replacement_;
};

/// On a fused text a match may span any number of parts: all of it has to wait.
class ReplaceInText final : public DecodeStage {
 public:
  explicit ReplaceInText(std::shared_ptr<const Replacement> replacement)
      : replacement_(std::move(replacement)) {}
  void push(std::string_view piece) override { text_ += piece; }
  void finish() override {
    pass(replaced(*replacement_, std::exchange(text_, {})));
    next_->finish();
  }

 private:
  std::shared_ptr<const Replacement> replacement_;
  std::string text_;
};

/// The byte that "<0x0A>" stands for: two hexadecimal digits, nothing else.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9') {
      value = value * 16 + (c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value * 16 + (lower - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return static_cast<char>(value);
}

/// A run of byte tokens is text if all of it is valid UTF-8, else each byte becomes U+FFFD: only
/// the end of the run decides.
class ByteFallback final : public DecodeStage {
 public:
  void push(std::string_view piece) override {
    if (const auto byte = fallback_byte(piece)) {
      run_ += *byte;
      return;
    }
    flush();
    next_->push(piece);
  }
  void finish() override {
    flush();
    next_->finish();
  }

 private:
  void flush() {
    if (find_invalid_utf8(run_) == std::string::npos) {
      pass(run_);
    } else {
      for (size_t i = 0; i < run_.size(); ++i) pass(kReplacementCharacter);
    }
    run_.clear();
  }
  std::string run_;
};

struct StripOptions {
  std::string content;  // one character
  size_t start = 0;     // at most so many at the start
  size_t stop = 0;      // and at the end
};

class StripTokens final : public DecodeStage {
 public:
  explicit StripTokens(StripOptions options) : options_(std::move(options)) {}
  void push(std::string_view piece) override {
    for (size_t i = 0; i < options_.start && piece.starts_with(options_.content); ++i)
      piece.remove_prefix(options_.content.size());
    for (size_t i = 0; i < options_.stop && piece.ends_with(options_.content); ++i)
      piece.remove_suffix(options_.content.size());
    next_->push(piece);
  }

 private:
  StripOptions options_;
};

class StripText final : public DecodeStage {
 public:
  explicit StripText(StripOptions options)
      : options_(std::move(options)), to_skip_(options_.start) {}

  void push(std::string_view piece) override {
    // Parts are whole characters, so that the content never straddles two of them.
    while (to_skip_ > 0 && !piece.empty()) {
      if (!piece.starts_with(options_.content)) {
        to_skip_ = 0;
        break;
      }
      piece.remove_prefix(options_.content.size());
      --to_skip_;
    }
    if (options_.stop == 0) return pass(piece);
    size_t end = piece.size(), trailing = 0;
    while (piece.substr(0, end).ends_with(options_.content)) {
      end -= options_.content.size();
      ++trailing;
    }
    if (end > 0) {
      release(held_);
      pass(piece.substr(0, end));
    }
    held_ += trailing;
    if (held_ > options_.stop) release(held_ - options_.stop);
  }

  void finish() override {
    held_ = 0;
    next_->finish();
  }

 private:
  void release(size_t count) {
    for (size_t i = 0; i < count; ++i) pass(options_.content);
    held_ -= count;
  }
  StripOptions options_;
  size_t to_skip_;
  size_t held_ = 0;  // contents at the end so far, which may have to go
};

class MetaspaceDecoder final : public DecodeStage {
 public:
  MetaspaceDecoder(std::string replacement, bool strip_first)
      : replacement_(std::move(replacement)), strip_(strip_first) {}
  void push(std::string_view piece) override {
    std::string out;
    while (!piece.empty()) {
      if (piece.starts_with(replacement_)) {
        if (!strip_) out += ' ';
        piece.remove_prefix(replacement_.size());
      } else {
        out += piece.front();
        piece.remove_prefix(1);
      }
    }
    strip_ = false;
    next_->push(out);
  }

 private:
  std::string replacement_;
  bool strip_;  // in the first token the replacement character is the space that was prepended
};

class ByteLevelDecoder final : public DecodeStage {
 public:
  explicit ByteLevelDecoder(const ByteAlphabet& alphabet) : alphabet_(alphabet) {}
  void push(std::string_view piece) override {
    if (const auto bytes = alphabet_.bytes_of(piece)) {
      bytes_ += *bytes;
    } else {
      bytes_ += piece;  // an added token
    }
    put_out(false);
  }
  void finish() override {
    put_out(true);
    next_->finish();
  }

 private:
  void put_out(bool at_end) {
    std::string text;
    bytes_.erase(0, append_utf8_lossy(text, bytes_, at_end));
    pass(text);
  }
  const ByteAlphabet& alphabet_;
  std::string bytes_;  // an incomplete character: at most three bytes between calls
};

/// Options in characters, such as {"content": " ", "start": 1, "stop": 0}.
std::string one_character(const Entry& entry, std::string_view key) {
  const std::string& text = entry.string(key);
  check(!text.empty() && decode_utf8(text.data()).length == text.size(), ErrorKind::model,
        "{} must be one character", entry.place_of(key));
  return text;
}

}  // namespace

class DecodeStream::Output final : public DecodeStage {
 public:
  void push(std::string_view piece) override { text += piece; }
  void finish() override {}
  std::string text;
};

DecodeStream::DecodeStream(std::vector<std::unique_ptr<DecodeStage>> stages)
    : stages_(std::move(stages)), output_(std::make_unique<Output>()) {
  first_ = output_.get();
  for (size_t i = stages_.size(); i-- > 0;) {
    stages_[i]->set_next(first_);
    first_ = stages_[i].get();
  }
}

DecodeStream::~DecodeStream() = default;

std::string DecodeStream::take() { return std::exchange(output_->text, {}); }

Decoder::Decoder(const Entry* entry, const CategoryTable& categories,
                 const ByteAlphabet& alphabet) {
  if (!entry) {
    steps_.push_back([] { return std::make_unique<JoinWithSpaces>(); });
    return;
  }
  std::vector<Entry> entries;
  flatten_sequence(*entry, "decoders", entries);
  for (const Entry& step : entries) add_step(step, categories, alphabet);
}

void Decoder::add_step(const Entry& entry, const CategoryTable& categories,
                       const ByteAlphabet& alphabet) {
  const std::string& type = entry.type();
  if (type == "Replace") {
    // Known beforehand, unlike a prompt's growth in the normalizer: an answer cannot be refused.
    constexpr double kMaxGrowth = 64;
    auto replacement = std::make_shared<const Replacement>(entry, categories);
    growth_ *= replacement->growth();
    check(growth_ <= kMaxGrowth, ErrorKind::model,
          "{}: the decoder can make more than {} bytes of one byte", entry.place(), kMaxGrowth);
    if (fused_) {
      steps_.push_back([replacement] { return std::make_unique<ReplaceInText>(replacement); });
    } else {
      steps_.push_back([replacement] { return std::make_unique<ReplaceTokens>(replacement); });
    }
  } else if (type == "Fuse") {
    fused_ = true;
  } else if (type == "Strip") {
    add_strip(entry);
  } else if (type != "ByteFallback" && type != "ByteLevel" && type != "Metaspace") {
    entry.refuse_type("Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace");
  } else {
    check(!fused_, ErrorKind::model, "{}: {} after Fuse or ByteLevel is not supported",
          entry.place(), type);
    if (type == "ByteFallback") {
      byte_fallback_ = true;
      steps_.push_back([] { return std::make_unique<ByteFallback>(); });
    } else if (type == "ByteLevel") {
      byte_level_ = &alphabet;
      steps_.push_back([&alphabet] { return std::make_unique<ByteLevelDecoder>(alphabet); });
      fused_ = true;
    } else {
      const Json* scheme = entry.find("prepend_scheme");
      const bool strip = scheme ? *scheme != "never" : entry.flag("add_prefix_space", true);
      steps_.push_back([strip, replacement = one_character(entry, "replacement")] {
        return std::make_unique<MetaspaceDecoder>(replacement, strip);
      });
    }
  }
}

void Decoder::add_strip(const Entry& entry) {
  constexpr int64_t kMaxCount = 1 << 20;
  StripOptions options;
  options.content = one_character(entry, "content");
  options.start = static_cast<size_t>(entry.required("start").integer(kMaxCount));
  options.stop = static_cast<size_t>(entry.required("stop").integer(kMaxCount));
  if (fused_) {
    steps_.push_back([options] { return std::make_unique<StripText>(options); });
  } else {
    steps_.push_back([options] { return std::make_unique<StripTokens>(options); });
  }
}

std::unique_ptr<DecodeStream> Decoder::start() const {
  std::vector<std::unique_ptr<DecodeStage>> stages;
  for (const auto& step : steps_) stages.push_back(step());
  return std::make_unique<DecodeStream>(std::move(stages));
}

std::string Decoder::bytes_of(std::string_view token) const {
  const auto byte = byte_fallback_ ? fallback_byte(token) : std::nullopt;
  if (byte) return std::string(1, *byte);
  if (byte_level_) return byte_level_->bytes_of(token).value_or(std::string(token));
  const std::string_view before = "a";  // some decoders treat the first token otherwise
  const auto stream = start();
  stream->push(before);
  stream->push(token);
  stream->finish();
  return stream->take().substr(before.size());
}

}  // namespace nanovllm
