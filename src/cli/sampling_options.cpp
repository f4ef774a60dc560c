// The options that say how requests are sampled.
#include <algorithm>
#include <cmath>
#include <limits>

#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "constrain/limits.h"
#include "core/check.h"
#include "core/limits.h"
#include "core/sampling_fields.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

/// llama.cpp's way to write a token's bias: 15043+1 or 15043-1.
std::pair<int64_t, double> parse_bias(const std::string& text) {
  const size_t sign = text.find_first_of("+-");
  check(sign != 0 && sign != text.npos, kBad, "must be a token id, + or -, and a number, got {}",
        quote(text));
  const double bias = parse_number(text.substr(sign + (text[sign] == '+' ? 1 : 0)));
  check(std::abs(bias) <= kMaxBias, kBad, "must add from -100 to 100, got {}", quote(text));
  return {parse_integer(text.substr(0, sign), 0, std::numeric_limits<int32_t>::max()), bias};
}

}  // namespace

void SamplingOptions::apply(SamplingParams& params) const {
  for (const auto& change : changes_) change(params);
}

void SamplingOptions::add(
    CLI::App& command, const std::string& names, const std::string& type, const std::string& help,
    std::function<std::function<void(SamplingParams&)>(const std::string&)> parse) {
  add_value(command, names, type, help, [this, parse = std::move(parse)](const std::string& text) {
    changes_.push_back(parse(text));
  })->group("Sampling");
}

void SamplingOptions::add_to(CLI::App& command, Use use) {
  using P = SamplingParams;
  for (const NumberField& field : kNumberFields) {
    std::string name = fmt::format("--{}", field.name);
    std::replace(name.begin(), name.end(), '_', '-');
    if (name == "--temperature") name += ",--temp";
    if (name == "--repetition-penalty") name += ",--repeat-penalty";
    add(command, name, "X", field.help, [&field](const std::string& s) {
      const double value = parse_number(s);
      check(field.allows(value), kBad, "must be {}, got {}", field.rule, s);
      return [value, to = field.value](P& p) { p.*to = value; };
    });
  }
  add(command, "--top-k", "K", "the K likeliest tokens; 0 or -1: all (0)",
      [](const std::string& s) { return [v = parse_integer(s, -1)](P& p) { p.top_k = v; }; });
  add(command, "--max-tokens,-n", "N",
      use == Use::chat ? "tokens of an answer at most (what the context has room for)"
                       : "tokens to generate at most (16)",
      [](const std::string& s) { return [v = parse_integer(s, 1)](P& p) { p.max_tokens = v; }; });
  add(command, "--min-tokens", "N", "tokens before the text may end (0)",
      [](const std::string& s) { return [v = parse_integer(s, 0)](P& p) { p.min_tokens = v; }; });
  // Newer versions of CLI11 do not tell --n from -n. A conversation goes on from one answer.
  if (use != Use::chat)
    add(command, "--num-answers", "N", "answers to each prompt, n in JSON, 128 at most (1)",
        [](const std::string& s) {
          return [v = static_cast<int>(parse_integer(s, 1, kMaxAnswers))](P& p) { p.n = v; };
        });
  add(command, "--truncate-prompt-tokens", "N",
      "the prompt's last N tokens; -1: what the context has room for", [](const std::string& s) {
        return [v = parse_integer(s, -1)](P& p) { p.truncate_prompt_tokens = v; };
      });
  add_rules(command);
  if (use != Use::chat) add_structure(command);
  const auto flag = [&](const char* name, bool value, bool P::*field, const char* help) {
    command
        .add_flag_callback(
            name, [=, this] { changes_.push_back([=](P& p) { p.*field = value; }); }, help)
        ->group("Sampling");
  };
  flag("--ignore-eos", true, &P::ignore_eos, "go on after the end-of-text token");
  flag("--include-stop-str-in-output", true, &P::include_stop_str_in_output,
       "keep the stop string in the text");
  flag("--no-skip-special-tokens", false, &P::skip_special_tokens,
       "show special tokens in the text");
  if (use == Use::chat) return;
  const auto top = [&](const char* name, const char* help, std::optional<int> P::*field) {
    add(command, name, "K", help, [field](const std::string& s) {
      return
          [field, k = static_cast<int>(parse_integer(s, 0, kMaxLogprobs))](P& p) { p.*field = k; };
    });
  };
  top("--logprobs", "the K likeliest of each generated token, 20 at most", &P::logprobs);
  top("--prompt-logprobs", "the K likeliest of each prompt token, 20 at most", &P::prompt_logprobs);
}

// The structure of the answers, named as in vLLM's structured_outputs and, for files, in llama.cpp.
void SamplingOptions::add_structure(CLI::App& command) {
  using P = SamplingParams;
  const auto file = [](const std::string& path) {
    return read_option_file(path, kMaxStructureBytes);
  };
  add(command, "--json-schema", "FILE", "the text is JSON as this schema asks",
      [file](const std::string& s) {
        return [v = file(s)](P& p) { p.structured_outputs.json = v; };
      });
  add(command, "--regex", "PATTERN", "the text matches this as a whole", [](const std::string& s) {
    check(!s.empty(), kBad, "must not be empty");
    return [s](P& p) { p.structured_outputs.regex = s; };
  });
  add(command, "--choice", "TEXT", "the text is this one, or that of another --choice",
      [](const std::string& s) { return [s](P& p) { p.structured_outputs.choice.push_back(s); }; });
  add(command, "--grammar", "FILE", "the text follows this EBNF, from its rule root on",
      [file](const std::string& s) {
        return [v = file(s)](P& p) { p.structured_outputs.grammar = v; };
      });
}

void SamplingOptions::add_rules(CLI::App& command) {
  using P = SamplingParams;
  const auto texts = [&](const char* name, const char* help, std::vector<std::string> P::*field) {
    add(command, name, "TEXT", help, [field](const std::string& s) {
      check(!s.empty(), kBad, "must not be empty");
      return [field, s](P& p) { (p.*field).push_back(s); };
    });
  };
  const auto ids = [&](const char* name, const char* help, std::vector<int64_t> P::*field) {
    add(command, name, "IDS", help, [field](const std::string& s) {
      const auto list = parse_integers(s, 0, std::numeric_limits<int32_t>::max());
      return [field, list](P& p) { (p.*field).insert((p.*field).end(), list.begin(), list.end()); };
    });
  };
  texts("--stop", "ends the text before TEXT; repeatable", &P::stop);
  ids("--stop-token-ids", "ids that end the text, separated by commas", &P::stop_token_ids);
  ids("--allowed-token-ids", "no others are sampled; ids, separated by commas",
      &P::allowed_token_ids);
  texts("--bad-words", "no answer contains TEXT; repeatable", &P::bad_words);
  add(command, "--logit-bias", "ID+X", "adds X, or -X, to the logit of token ID; repeatable",
      [](const std::string& s) {
        const auto [id, bias] = parse_bias(s);
        return [id = id, bias = bias](P& p) { p.logit_bias[id] = bias; };
      });
}

}  // namespace nanovllm::cli
