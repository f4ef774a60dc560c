// Reading tokenizer.json and tokenizer_config.json.
#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include <sys/stat.h>

#include "io/model_directory.h"
#include "io/tokenizer/state.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

Vocabulary read_vocabulary(const Entry& entry) {
  check(entry.json().is_object() && !entry.json().empty(), ErrorKind::model,
        "{} must be an object with at least one token", entry.place());
  Vocabulary vocabulary(entry.json().size());
  for (const auto& [text, value] : entry.json().items()) {
    if (!is_integer_in(value, 0, Vocabulary::kMaxId))
      Entry(value, fmt::format("{}[\"{}\"]", entry.place(), text)).integer(Vocabulary::kMaxId);
    const auto id = value.get<int32_t>();
    check(!vocabulary.contains(id), ErrorKind::model, "{}: \"{}\" and \"{}\" have the same id {}",
          entry.place(), vocabulary.text(id), text, id);
    check(vocabulary.add(text, id), ErrorKind::model, "{}: \"{}\" occurs twice", entry.place(),
          text);
  }
  return vocabulary;
}

/// Merges are ["a", "b"] or, in older files, "a b".
std::vector<Bpe::Merge> read_merges(const Entry& entry) {
  check(entry.json().is_array(), ErrorKind::model, "{} must be an array", entry.place());
  std::vector<Bpe::Merge> merges;
  merges.reserve(entry.json().size());
  for (const Json& merge : entry.json()) {
    const auto fail_here = [&] {
      fail(ErrorKind::model, "{}[{}] must be two tokens: [\"a\", \"b\"] or \"a b\"", entry.place(),
           merges.size());
    };
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      merges.push_back(
          {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()});
    } else if (merge.is_string()) {
      const std::string_view line = merge.get_ref<const std::string&>();
      const size_t space = line.find(' ');
      if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
        fail_here();
      merges.push_back({line.substr(0, space), line.substr(space + 1)});
    } else {
      fail_here();
    }
  }
  return merges;
}

BpeOptions read_bpe_options(const Entry& model, bool byte_level) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    check(!model.find(key) || model.string(key).empty(), ErrorKind::model,
          "{} is not supported: it must be empty or null", model.place_of(key));
  if (const auto dropout = model.member("dropout"))
    check(dropout->json().is_number() && dropout->json().get<double>() == 0, ErrorKind::model,
          "{} is not supported: it must be null", dropout->place());
  BpeOptions options;
  if (const auto unk = model.member("unk_token")) options.unk_token = unk->string();
  options.fuse_unk = model.flag("fuse_unk", false);
  options.byte_fallback = model.flag("byte_fallback", false);
  options.ignore_merges = model.flag("ignore_merges", false);
  options.byte_level = byte_level;
  return options;
}

bool exists(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0;
}

/// The same of a name, whatever it leads to: a link to nothing, as a cleared cache leaves it, is an
/// error of its reading, and no file to do without.
bool is_listed(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

/// The first of a directory's files that hold a tokenizer in a form that is not read.
std::optional<std::string> other_tokenizer(const std::string& directory) {
  std::optional<std::string> found;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = file.path().filename();
    const bool is_one = name == "tokenizer.model" || name == "vocab.json" ||
                        name == "tekken.json" || name == "tiktoken.model" ||
                        name.ends_with(".tiktoken");
    if (is_one && (!found || name < *found)) found = name;
  }
  return found;
}

void check_present(const std::string& directory) {
  if (exists(directory + "/tokenizer.json")) return;
  check_model_directory(directory);
  if (const auto other = other_tokenizer(directory))
    fail(ErrorKind::model,
         "{}/tokenizer.json is missing, and {} is not read: this engine reads tokenizer.json "
         "(byte-pair "
         "encoding); transformers makes one: "
         "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
         directory, *other);
  fail(ErrorKind::model,
       "{}/tokenizer.json is missing: complete the download; token ids alone need none "
       "(skip_tokenizer_init)",
       directory);
}

/// A template: a string is the default one, an object or a list has several with names.
std::string read_chat_template(const Entry& entry, std::string_view name) {
  if (entry.json().is_string()) return name == "default" ? entry.string() : "";
  if (entry.json().is_object()) return entry.find(name) ? entry.string(name) : "";
  check(entry.json().is_array(), ErrorKind::model,
        "{} must be a string, an object or a list of named templates", entry.place());
  for (const Entry& named : entry.elements())
    if (named.string("name") == name) return named.string("template");
  return "";
}

/// The special tokens that tokenizer_config.json gives names, in transformers' order: those of all
/// models, then a model's own, such as image_token.
std::vector<std::pair<std::string, Entry>> named_tokens(const Entry& config) {
  constexpr std::array kOfAllModels{"bos_token", "eos_token", "unk_token", "sep_token",
                                    "pad_token", "cls_token", "mask_token"};
  std::vector<std::pair<std::string, Entry>> tokens;
  for (const char* name : kOfAllModels)
    if (const auto token = config.member(name)) tokens.emplace_back(name, *token);
  const auto add_own = [&](const Entry& names, std::string_view ending) {
    for (const auto& [name, value] : names.json().items())
      if (name.ends_with(ending) && (value.is_string() || value.contains("content")) &&
          std::ranges::find(kOfAllModels, name) == kOfAllModels.end())
        tokens.emplace_back(name, Entry(value, names.place_of(name)));
  };
  add_own(config, "_token");
  const auto extra = config.member("extra_special_tokens");
  if (extra && extra->json().is_object()) add_own(*extra, "");
  return tokens;
}

/// A token's text, which stands alone or beside flags.
const std::string& content_of(const Entry& token) {
  return token.json().is_object() ? token.string("content") : token.string();
}

/// The added tokens of tokenizer.json, and what tokenizer_config.json says of them and of others.
/// As in transformers: added_tokens_decoder in the order of its numbers, whose flags stand above
/// those of tokenizer.json, then the special ones. A new token's id is the vocabulary's, or the
/// next one.
class ConfiguredTokens {
 public:
  ConfiguredTokens(const std::vector<Entry>& added, const Entry& config,
                   const Vocabulary& vocabulary)
      : vocabulary_(vocabulary), next_(vocabulary.size()) {
    for (const Entry& entry : added) {
      next_ = std::max(next_, entry.required("id").integer(Vocabulary::kMaxId) + 1);
      places_.emplace(entry.string("content"), tokens_.size());
      tokens_.emplace_back(entry.json(), entry.place());
    }
    if (const auto decoder = config.member("added_tokens_decoder")) take_decoder(*decoder);
    for (const auto& [name, token] : named_tokens(config)) take(token, true);
    const Json* extra = config.find("extra_special_tokens");
    const bool has_list = extra && extra->is_array() && !extra->empty();
    const auto more =
        config.member(has_list ? "extra_special_tokens" : "additional_special_tokens");
    if (!more || !more->json().is_array()) return;
    for (const Entry& token : more->elements())
      if (!places_.contains(content_of(token))) take(token, token.json().is_string());
  }

  /// In the form of tokenizer.json, and where they stand.
  const std::vector<std::pair<Json, std::string>>& list() const { return tokens_; }

 private:
  void take_decoder(const Entry& decoder) {
    check(decoder.json().is_object(), ErrorKind::model, "{} must be an object", decoder.place());
    std::map<int64_t, Entry> tokens;
    for (const auto& [key, value] : decoder.json().items()) {
      int64_t id = 0;
      std::from_chars(key.data(), key.data() + key.size(), id);
      tokens.emplace(id, Entry(value, decoder.place_of(key)));
    }
    for (const auto& [id, token] : tokens) take(token, false);
  }

  /// Of a token that is known, a name changes no flag but `special`, which stays once it is set.
  void take(const Entry& given, bool is_named) {
    const std::string& content = content_of(given);
    if (content.empty()) return;
    const auto [place, is_new] = places_.emplace(content, tokens_.size());
    if (is_new) {
      const int32_t id = vocabulary_.find(content);
      tokens_.emplace_back(
          Json::object({{"id", id == Vocabulary::kNone ? next_++ : id}, {"content", content}}),
          given.place());
    }
    Json& token = tokens_[place->second].first;
    if (given.json().is_object() && (is_new || !is_named)) {
      is_named |= given.flag("special", false);
      for (const char* flag : {"lstrip", "rstrip", "single_word", "normalized"})
        if (given.find(flag)) token[flag] = given.flag(flag, false);
    }
    if (is_named) token["special"] = true;
  }

  const Vocabulary& vocabulary_;
  int64_t next_;
  std::unordered_map<std::string, size_t> places_;  // in tokens_, by content
  std::vector<std::pair<Json, std::string>> tokens_;
};

}  // namespace

Tokenizer::State::State(const Json& tokenizer_json, const std::string& place,
                        const Json& config_json, const std::string& config_place,
                        int64_t model_vocab_size) {
  const Entry root(tokenizer_json, place + ":"), config(config_json, config_place + ":");
  const Entry model = root.required("model");
  // Before its vocabulary: other kinds have theirs in another form.
  check(!model.find("type") || model.type() == "BPE", ErrorKind::model,
        "{}: type \"{}\" is not supported (supported: BPE)", model.place(),
        model.find("type") ? model.type() : "");
  vocabulary = read_vocabulary(model.required("vocab"));
  if (const auto entry = root.member("normalizer"))
    normalizer = std::make_unique<const Normalizer>(*entry, categories);
  if (const auto entry = root.member("pre_tokenizer"))
    pre_tokenizers = make_pre_tokenizers(*entry, categories, alphabet);
  const BpeOptions options = read_bpe_options(model, pre_tokenizers.byte_level);
  bpe = std::make_unique<Bpe>(vocabulary, read_merges(model.required("merges")), options, alphabet,
                              model.place());
  std::vector<Entry> added;
  if (const auto entry = root.member("added_tokens")) added = entry->elements();
  const ConfiguredTokens configured(added, config, vocabulary);
  added.clear();
  for (const auto& [json, where] : configured.list()) {
    const Entry token(json, where);
    if (token.required("id").integer(Vocabulary::kMaxId) < model_vocab_size)
      added.push_back(token);
    else
      left_out += (left_out.empty() ? "" : ", ") + token.string("content");
  }
  added_tokens = std::make_unique<AddedTokens>(added, vocabulary, normalizer.get(), categories);
  for (const AddedToken& token : added_tokens->tokens())
    added_vocabulary.add(token.content, token.id);
  added_index.assign(static_cast<size_t>(vocab_size()), -1);
  for (size_t i = 0; i < added_tokens->tokens().size(); ++i)
    added_index[static_cast<size_t>(added_tokens->tokens()[i].id)] = static_cast<int32_t>(i);
  if (const auto entry = root.member("post_processor"))
    post_processor = PostProcessor(*entry, vocab_size());
  const auto entry = root.member("decoder");
  decoder = std::make_unique<Decoder>(entry ? &*entry : nullptr, categories, alphabet);
  token_bytes = bytes_of_longest_token(root, longest_token(options));
  for (const AddedToken& token : added_tokens->tokens())
    token_bytes.drops_space |= token.lstrip || token.rstrip;
  read_config(config);
}

/// Bytes of the longest token; 0 where the model drops characters that it does not know, or makes
/// one token of any number of them.
size_t Tokenizer::State::longest_token(const BpeOptions& options) const {
  bool knows_all_bytes = true;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    const std::string token =
        options.byte_level ? alphabet.spell({&text, 1}) : fmt::format("<0x{:02X}>", byte);
    knows_all_bytes &= vocabulary.find(token) != Vocabulary::kNone;
  }
  const bool covers_all = options.byte_level ? knows_all_bytes
                                             : (options.byte_fallback && knows_all_bytes) ||
                                                   (options.unk_token && !options.fuse_unk);
  if (!covers_all) return 0;
  size_t longest = 4;  // a character as unk_token
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);  // a character for each byte, or the bytes
    const auto continues = std::ranges::count_if(text, is_utf8_continuation);
    longest = std::max(longest, text.size() - (options.byte_level ? size_t(continues) : 0));
  }
  for (const AddedToken& token : added_tokens->tokens())
    longest = std::max(longest, token.content.size());
  return longest;
}

void Tokenizer::State::read_config(const Entry& config) {
  for (const auto& [name, token] : named_tokens(config))
    special_tokens.emplace_back(name, content_of(token));
  for (const auto& [name, token] : special_tokens) {
    if (name == "bos_token") bos_id = find(token);
    if (name == "eos_token") eos_id = find(token);
  }
  chat_template_place = config.place_of("chat_template");
  if (const auto entry = config.member("chat_template")) {
    chat_template = read_chat_template(*entry, "default");
    tool_template = read_chat_template(*entry, "tool_use");
  }
}

Tokenizer::Tokenizer(std::unique_ptr<const State> state) : state_(std::move(state)) {}

Tokenizer::Tokenizer(const std::string& model_directory, int64_t vocab_size) {
  constexpr size_t kMaxTemplateBytes = size_t{4} << 20;
  check_present(model_directory);
  const std::string path = model_directory + "/tokenizer.json",
                    config_path = model_directory + "/tokenizer_config.json",
                    template_path = model_directory + "/chat_template.jinja",
                    tool_path = model_directory + "/additional_chat_templates/tool_use.jinja";
  Json config = is_listed(config_path) ? read_json_file(config_path) : Json::object();
  // As transformers reads directories of 2023, which have no added_tokens_decoder.
  const std::string names_path = model_directory + "/special_tokens_map.json";
  if (config.is_object() && !config.contains("added_tokens_decoder") && is_listed(names_path)) {
    const Json names = read_json_file(names_path);
    check(names.is_object(), ErrorKind::model, "{} must be an object", names_path);
    config.update(names);
  }
  auto state = std::make_unique<State>(read_json_file(path), path, config, config_path, vocab_size);
  if (is_listed(template_path)) {
    state->chat_template = read_file(template_path, kMaxTemplateBytes);
    state->tool_template.clear();
    state->chat_template_place = template_path;
  }
  if (is_listed(tool_path)) state->tool_template = read_file(tool_path, kMaxTemplateBytes);
  state_ = std::move(state);
}

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json,
                               std::string_view tokenizer_config_json) {
  const std::string name = "tokenizer.json", config_name = "tokenizer_config.json";
  const Json config = tokenizer_config_json.empty()
                          ? Json::object()
                          : parse_json(tokenizer_config_json, config_name, ErrorKind::model);
  return Tokenizer(std::make_unique<State>(parse_json(tokenizer_json, name, ErrorKind::model), name,
                                           config, config_name,
                                           std::numeric_limits<int64_t>::max()));
}

}  // namespace nanovllm
