#include "io/tokenizer/normalizer.h"

#include <vector>

#include "io/tokenizer/nesting.h"
#include "io/tokenizer/replace.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

class SequenceNormalizer final : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> steps)
      : steps_(std::move(steps)) {}
  std::string normalize(std::string text) const override {
    for (const auto& step : steps_) text = step->normalize(std::move(text));
    return text;
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> steps_;
};

class PrependNormalizer final : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}
  std::string normalize(std::string text) const override {
    return text.empty() ? text : prefix_ + text;
  }

 private:
  std::string prefix_;
};

class ReplaceNormalizer final : public Normalizer {
 public:
  explicit ReplaceNormalizer(Replacement replacement) : replacement_(std::move(replacement)) {}
  std::string normalize(std::string text) const override {
    return replacement_.apply(std::move(text));
  }

 private:
  Replacement replacement_;
};

class UnicodeNormalizer final : public Normalizer {
 public:
  explicit UnicodeNormalizer(NormalForm form) : form_(form) {}
  std::string normalize(std::string text) const override {
    if (ascii_prefix(text) == text.size()) return text;
    return normalize_unicode(text, form_);
  }

 private:
  NormalForm form_;
};

class LowercaseNormalizer final : public Normalizer {
 public:
  std::string normalize(std::string text) const override {
    std::string out;
    out.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      const DecodedChar c = decode_utf8(text.data() + at);
      append_lower(out, c.value);
      at += c.length;
    }
    return out;
  }
};

class StripNormalizer final : public Normalizer {
 public:
  StripNormalizer(bool left, bool right, const CategoryTable& categories)
      : left_(left), right_(right), categories_(categories) {}

  std::string normalize(std::string text) const override {
    const std::string_view all = text;
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
    return std::string(all.substr(begin, end - begin));
  }

 private:
  bool left_, right_;
  const CategoryTable& categories_;
};

std::unique_ptr<Normalizer> make_step(const Entry& entry, const CategoryTable& categories) {
  const std::string& type = entry.type();
  if (type == "NFC") return std::make_unique<UnicodeNormalizer>(NormalForm::nfc);
  if (type == "NFD") return std::make_unique<UnicodeNormalizer>(NormalForm::nfd);
  if (type == "NFKC") return std::make_unique<UnicodeNormalizer>(NormalForm::nfkc);
  if (type == "NFKD") return std::make_unique<UnicodeNormalizer>(NormalForm::nfkd);
  if (type == "Lowercase") return std::make_unique<LowercaseNormalizer>();
  if (type == "Prepend") return std::make_unique<PrependNormalizer>(entry.string("prepend"));
  if (type == "Replace") return std::make_unique<ReplaceNormalizer>(Replacement(entry, categories));
  if (type == "Strip")
    return std::make_unique<StripNormalizer>(entry.flag("strip_left", true),
                                             entry.flag("strip_right", true), categories);
  entry.refuse_type("Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip");
}

}  // namespace

std::unique_ptr<Normalizer> make_normalizer(const Entry& entry, const CategoryTable& categories) {
  std::vector<Entry> entries;
  flatten_sequence(entry, "normalizers", entries);
  std::vector<std::unique_ptr<Normalizer>> steps;
  for (const Entry& step : entries) steps.push_back(make_step(step, categories));
  return std::make_unique<SequenceNormalizer>(std::move(steps));
}

}  // namespace nanovllm
