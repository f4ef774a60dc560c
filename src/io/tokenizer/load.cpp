// Reading tokenizer.json and tokenizer_config.json.
#include <algorithm>
#include <filesystem>
#include <optional>
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

/// A string, or a list of named templates of which "default" counts.
std::string read_chat_template(const Entry& entry) {
  if (entry.json().is_string()) return entry.string();
  check(entry.json().is_array(), ErrorKind::model,
        "{} must be a string or a list of named templates", entry.place());
  for (const Entry& named : entry.elements())
    if (named.string("name") == "default") return named.string("template");
  return "";
}

}  // namespace

Tokenizer::State::State(const Json& tokenizer_json, const std::string& place) {
  const Entry root(tokenizer_json, place + ":");
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

std::optional<int32_t> Tokenizer::State::configured_token(const Entry& config,
                                                          std::string_view key) const {
  const auto entry = config.member(key);
  if (!entry) return std::nullopt;
  return find(entry->json().is_object() ? entry->string("content") : entry->string());
}

void Tokenizer::State::read_config(const Json& tokenizer_config_json, const std::string& place) {
  const Entry config(tokenizer_config_json, place + ":");
  chat_template_place = config.place_of("chat_template");
  bos_id = configured_token(config, "bos_token");
  eos_id = configured_token(config, "eos_token");
  if (const auto entry = config.member("chat_template")) chat_template = read_chat_template(*entry);
}

Tokenizer::Tokenizer(std::unique_ptr<const State> state) : state_(std::move(state)) {}

Tokenizer::Tokenizer(const std::string& model_directory) {
  constexpr size_t kMaxTemplateBytes = size_t{4} << 20;
  check_present(model_directory);
  const std::string path = model_directory + "/tokenizer.json";
  auto state = std::make_unique<State>(read_json_file(path), path);
  const std::string config_path = model_directory + "/tokenizer_config.json";
  state->chat_template_place = config_path + ": chat_template";
  if (is_listed(config_path)) state->read_config(read_json_file(config_path), config_path);
  const std::string template_path = model_directory + "/chat_template.jinja";
  if (is_listed(template_path)) {
    state->chat_template = read_file(template_path, kMaxTemplateBytes);
    state->chat_template_place = template_path;
  }
  state_ = std::move(state);
}

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json,
                               std::string_view tokenizer_config_json) {
  const std::string name = "tokenizer.json", config_name = "tokenizer_config.json";
  auto state = std::make_unique<State>(parse_json(tokenizer_json, name, ErrorKind::model), name);
  if (!tokenizer_config_json.empty())
    state->read_config(parse_json(tokenizer_config_json, config_name, ErrorKind::model),
                       config_name);
  return Tokenizer(std::move(state));
}

}  // namespace nanovllm
