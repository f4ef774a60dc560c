#include "io/tokenizer/stages/normalizer.h"

#include "io/tokenizer/nesting.h"
#include "io/tokenizer/stages/replace.h"
#include "io/utf8.h"

namespace nanovllm {

/// One step; immutable and thread-safe.
class Normalizer::Step {
 public:
  virtual ~Step() = default;
  virtual void apply(MarkedText& text, SearchBudget& budget, size_t max_bytes) const = 0;
};

namespace {

class PrependStep final : public Normalizer::Step {
 public:
  explicit PrependStep(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply(MarkedText& text, SearchBudget&, size_t) const override {
    if (text.bytes.empty()) return;
    text.bytes.insert(0, prefix_);
    if (!text.literal.empty()) text.literal.insert(text.literal.begin(), prefix_.size(), false);
  }

 private:
  std::string prefix_;
};

class ReplaceStep final : public Normalizer::Step {
 public:
  explicit ReplaceStep(Replacement replacement) : replacement_(std::move(replacement)) {}
  void apply(MarkedText& text, SearchBudget& budget, size_t max_bytes) const override {
    replacement_.apply(text, budget, max_bytes);
  }

 private:
  Replacement replacement_;
};

class UnicodeStep final : public Normalizer::Step {
 public:
  explicit UnicodeStep(NormalForm form) : form_(form) {}
  void apply(MarkedText& text, SearchBudget&, size_t) const override {
    if (ascii_prefix(text.bytes) < text.bytes.size()) text = normalize_unicode(text, form_);
  }

 private:
  NormalForm form_;
};

class LowercaseStep final : public Normalizer::Step {
 public:
  void apply(MarkedText& text, SearchBudget&, size_t) const override {
    MarkedText out;
    out.bytes.reserve(text.bytes.size());
    std::string lower;
    for (size_t at = 0; at < text.bytes.size();) {
      const DecodedChar c = decode_utf8(text.bytes.data() + at);
      lower.clear();
      append_lower(lower, c.value);
      out.append(lower, text.has_mark(at, at + c.length));
      at += c.length;
    }
    text = std::move(out);
  }
};

class StripStep final : public Normalizer::Step {
 public:
  StripStep(bool left, bool right, const CategoryTable& categories)
      : left_(left), right_(right), categories_(categories) {}

  void apply(MarkedText& text, SearchBudget&, size_t) const override {
    const std::string_view all = text.bytes;
    size_t begin = 0, end = all.size();
    while (left_ && begin < end) {
      const DecodedChar c = decode_utf8(all.data() + begin);
      if (!categories_.is_white_space(c.value)) break;
      begin += c.length;
    }
    while (right_ && begin < end) {
      size_t last = end - 1;
      while (is_utf8_continuation(all[last])) --last;
      if (!categories_.is_white_space(decode_utf8(all.data() + last).value)) break;
      end = last;
    }
    text = {text.bytes.substr(begin, end - begin), part_of(text.literal, begin, end - begin)};
  }

 private:
  bool left_, right_;
  const CategoryTable& categories_;
};

std::unique_ptr<const Normalizer::Step> make_step(const Entry& entry,
                                                  const CategoryTable& categories) {
  const std::string& type = entry.type();
  if (type == "NFC") return std::make_unique<UnicodeStep>(NormalForm::nfc);
  if (type == "NFD") return std::make_unique<UnicodeStep>(NormalForm::nfd);
  if (type == "NFKC") return std::make_unique<UnicodeStep>(NormalForm::nfkc);
  if (type == "NFKD") return std::make_unique<UnicodeStep>(NormalForm::nfkd);
  if (type == "Lowercase") return std::make_unique<LowercaseStep>();
  if (type == "Prepend") return std::make_unique<PrependStep>(entry.string("prepend"));
  if (type == "Replace") return std::make_unique<ReplaceStep>(Replacement(entry, categories));
  if (type == "Strip")
    return std::make_unique<StripStep>(entry.flag("strip_left", true),
                                       entry.flag("strip_right", true), categories);
  entry.refuse_type("Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip");
}

}  // namespace

Normalizer::Normalizer(const Entry& entry, const CategoryTable& categories) {
  std::vector<Entry> entries;
  flatten_sequence(entry, "normalizers", entries);
  for (const Entry& step : entries) steps_.push_back(make_step(step, categories));
}

Normalizer::~Normalizer() = default;

void Normalizer::normalize(MarkedText& text, SearchBudget& budget) const {
  const size_t max_bytes = max_bytes_of(text.bytes.size());
  for (const auto& step : steps_) {
    step->apply(text, budget, max_bytes);
    check(text.bytes.size() <= max_bytes, ErrorKind::invalid_argument,
          "the tokenizer's normalizer makes {} bytes of a piece of text, more than {}",
          text.bytes.size(), max_bytes);
  }
}

std::string Normalizer::normalize(std::string text) const {
  SearchBudget budget(text.size());
  MarkedText marked{std::move(text)};
  normalize(marked, budget);
  return std::move(marked.bytes);
}

}  // namespace nanovllm
