// nanovllm tokenize: text to token ids, and back.
#include <limits>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/jsonl/line_reader.h"
#include "cli/options.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

struct TokenizeOptions {
  std::string model;
  std::optional<std::string> text, file;
  std::optional<std::vector<int32_t>> ids;
  bool no_special = false, plain_special = false, show = false, json = false;
};

std::string text_to_encode(const TokenizeOptions& options) {
  if (options.text) return *options.text;
  if (!options.file || *options.file == "-") return read_standard_input();
  return read_file_of("--file", *options.file, kMaxTextBytes);
}

// "1,2,3" or "1 2 3", as this command prints them.
std::vector<int32_t> parse_ids(std::string text) {
  std::string commas;
  for (char c : text) {
    const bool separator = c == ' ' || c == ',' || c == '\n' || c == '[' || c == ']';
    if (!separator)
      commas += c;
    else if (!commas.empty() && commas.back() != ',')
      commas += ',';
  }
  if (!commas.empty() && commas.back() == ',') commas.pop_back();
  if (commas.empty()) return {};
  const auto values = parse_integers(commas, 0, std::numeric_limits<int32_t>::max());
  return {values.begin(), values.end()};
}

std::string json_string(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string show_pieces(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Table table({"id", "token", "text"});
  for (int32_t id : ids) {
    const std::string text = tokenizer.decode({&id, 1}, /*skip_special_tokens=*/false);
    table.add({std::to_string(id), json_string(tokenizer.id_to_token(id)), json_string(text)});
  }
  return table.markdown();
}

int run_tokenize(TokenizeOptions& options) {
  settle_model(options.model, options.text);
  check(!options.text + !options.file + !options.ids >= 2, ErrorKind::invalid_argument,
        "give only one of TEXT, --file and --ids");
  const Tokenizer tokenizer(options.model);
  const std::vector<int32_t> ids =
      options.ids
          ? *options.ids
          : tokenizer.encode(text_to_encode(options), !options.no_special, !options.plain_special);
  if (options.ids)
    for (const int32_t id : ids)
      check(!tokenizer.id_to_token(id).empty(), ErrorKind::invalid_argument,
            "--ids: the vocabulary has no token {}: ids are below {}", id, tokenizer.vocab_size());
  Output output;
  if (options.json) {
    Json json = {{"ids", ids}};
    Json tokens = Json::array();
    for (int32_t id : ids) tokens.push_back(std::string(tokenizer.id_to_token(id)));
    json["tokens"] = std::move(tokens);
    json["text"] = tokenizer.decode(ids, options.no_special);
    output.write(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (options.show) {
    output.write(show_pieces(tokenizer, ids));
  } else if (options.ids) {
    output.write(tokenizer.decode(ids, options.no_special) + "\n");
  } else {
    output.write(fmt::format("{}\n", fmt::join(ids, " ")));
  }
  output.close();
  return kExitDone;
}

}  // namespace

void add_tokenize(CLI::App& program, Action& action) {
  auto options = std::make_shared<TokenizeOptions>();
  TokenizeOptions& o = *options;
  CLI::App& command =
      add_command(program, "tokenize", "Turn text into token ids, or ids into text");
  add_model_and_text(command, o.model, o.text, "TEXT",
                     "the text; without it, --file or standard input");
  add_value(command, "--file,-f", "FILE", "a file of text; - is standard input",
            [&o](const std::string& s) { o.file = s; });
  add_value(command, "--ids", "IDS", "ids to turn into text, separated by commas or spaces",
            [&o](const std::string& s) { o.ids = parse_ids(s); });
  add_flag(command, "--no-special", o.no_special,
           "encoding: add no special tokens; decoding: leave them out");
  add_flag(command, "--no-parse-special", o.plain_special,
           "text that spells a special token stays text");
  add_flag(command, "--show", o.show, "a table of ids, tokens and their text");
  add_flag(command, "--json", o.json, "print JSON");
  set_action(command, action, [options] { return run_tokenize(*options); });
}

}  // namespace nanovllm::cli
