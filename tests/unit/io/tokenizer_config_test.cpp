// tokenizer_config.json's additions to tokenizer.json; the ids and texts are those of transformers
// 5.24 (AutoTokenizer) for the same two files.
#include <filesystem>
#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "io/json.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

const std::string kDemo = NANOVLLM_SOURCE_DIR "/models/demo/";

Json demo(const char* name) { return read_json_file(kDemo + name); }

Tokenizer tokenizer_of(const Json& tokenizer, const Json& config) {
  return Tokenizer::from_json(tokenizer.dump(), config.dump());
}

using Ids = std::vector<int32_t>;

TEST(TokenizerConfig, ATokenThatTokenizerJsonLacksIsAdded) {
  Json tokenizer = demo("tokenizer.json");
  Json& added = tokenizer["added_tokens"];
  added.erase(2);  // <|im_end|>
  const Tokenizer made = tokenizer_of(tokenizer, demo("tokenizer_config.json"));
  EXPECT_EQ(made.encode("a<|im_end|><|im_start|>"), (Ids{64, 1535, 1534}));
  EXPECT_EQ(made.decode(made.encode("a<|im_end|>b")), "ab");
  EXPECT_EQ(made.eos_token_id(), 1535);
}

TEST(TokenizerConfig, MissingTokensHaveTheIdsThatTransformersGives) {
  Json config = demo("tokenizer_config.json");
  config["added_tokens_decoder"]["1600"] = {{"content", "<tool>"}, {"special", false},
                                            {"lstrip", true},      {"rstrip", false},
                                            {"normalized", false}, {"single_word", false}};
  config["added_tokens_decoder"]["1599"] = {{"content", "<other>"}, {"special", true}};
  config["pad_token"] = "[PAD]";
  config["additional_special_tokens"] = {"[X]", "<|im_end|>", "the"};
  const Tokenizer made = tokenizer_of(demo("tokenizer.json"), config);
  EXPECT_EQ(made.encode("a <tool> b"), (Ids{64, 1537, 269}));
  EXPECT_EQ(made.decode(made.encode("a <tool> b")), "a<tool> b");
  EXPECT_EQ(made.encode("<other>"), (Ids{1536}));
  EXPECT_EQ(made.encode("[PAD]"), (Ids{1538}));
  EXPECT_EQ(made.encode("[X]"), (Ids{1539}));
  EXPECT_EQ(made.encode("of the"), (Ids{936, 220, 1540}));
  EXPECT_EQ(made.decode(made.encode("of the<other>")), "of ");
}

TEST(TokenizerConfig, ANamedTokenOfTheVocabularyBecomesSpecial) {
  Json config = demo("tokenizer_config.json");
  config.erase("added_tokens_decoder");
  config["eos_token"] = "Ġthe";
  const Tokenizer made = tokenizer_of(demo("tokenizer.json"), config);
  EXPECT_EQ(made.eos_token_id(), 262);
  EXPECT_EQ(made.encode("of the"), (Ids{936, 262}));
  EXPECT_EQ(made.decode(made.encode("of the")), "of");
}

TEST(TokenizerConfig, FlagsOfAddedTokensDecoderStandAboveThoseOfTokenizerJson) {
  Json tokenizer = demo("tokenizer.json"), config = demo("tokenizer_config.json");
  config["added_tokens_decoder"]["1534"].update({{"special", false}, {"lstrip", true}});
  config["eos_token"] = {{"content", "<|im_end|>"}, {"rstrip", true}};
  tokenizer["added_tokens"][0]["special"] = false;
  config["added_tokens_decoder"].erase("1533");
  config["pad_token"] = nullptr;
  const Tokenizer made = tokenizer_of(tokenizer, config);
  EXPECT_EQ(made.encode("a <|im_start|> b"), (Ids{64, 1534, 269}));
  EXPECT_EQ(made.decode(Ids{64, 1534, 269}), "a b");  // once special, always special
  EXPECT_EQ(made.encode("<|im_end|> c"), (Ids{1535, 287}));
  EXPECT_EQ(made.decode(made.encode("x <|endoftext|> y")), "x <|endoftext|> y");
}

TEST(TokenizerConfig, NamesOfSpecialTokensMapCountWithoutAddedTokensDecoder) {
  TempDirectory directory;
  const auto write = [&](const char* name, const Json& json) {
    std::ofstream(directory.path() / name) << json.dump();
  };
  write("tokenizer.json", demo("tokenizer.json"));
  write("special_tokens_map.json",
        {{"eos_token", {{"content", "<|im_end|>"}, {"lstrip", false}, {"normalized", false}}},
         {"bos_token", "<|endoftext|>"},
         {"additional_special_tokens", {"[X]"}}});
  Json config = demo("tokenizer_config.json");
  config["eos_token"] = "<|endoftext|>";
  write("tokenizer_config.json", config);
  EXPECT_EQ(Tokenizer(directory.path()).eos_token_id(), 1533);
  config.erase("added_tokens_decoder");
  write("tokenizer_config.json", config);
  const Tokenizer made(directory.path());
  EXPECT_EQ(made.eos_token_id(), 1535);
  EXPECT_EQ(made.bos_token_id(), 1533);
  EXPECT_EQ(made.encode("a [X] b<|im_end|>"), (Ids{64, 220, 1536, 269, 1535}));
  EXPECT_EQ(made.decode(made.encode("a[X]b")), "ab");
  write("special_tokens_map.json", Json::array());
  EXPECT_THROW(Tokenizer(directory.path()), Error);
}

TEST(TokenizerConfig, AModelsOwnNamedTokensAreSpecialAndTemplatesKnowThem) {
  Json config = demo("tokenizer_config.json");
  config["think_token"] = "<think>";
  config["extra_special_tokens"] = {{"a_token", "<y>"}, {"start_token", "<|im_start|>"}};
  config["additional_special_tokens"] = {"<z>"};
  const Tokenizer made = tokenizer_of(demo("tokenizer.json"), config);
  const Ids ids{1538, 64, 1537, 65, 1536, 1534, 66};
  EXPECT_EQ(made.encode("<z>a<y>b<think><|im_start|>c"), ids);
  EXPECT_EQ(made.decode(ids), "abc");
  std::map<std::string, std::string> named(made.special_tokens().begin(),
                                           made.special_tokens().end());
  EXPECT_EQ(named, (std::map<std::string, std::string>{{"eos_token", "<|im_end|>"},
                                                       {"pad_token", "<|endoftext|>"},
                                                       {"think_token", "<think>"},
                                                       {"a_token", "<y>"},
                                                       {"start_token", "<|im_start|>"}}));
}

TEST(TokenizerConfig, AListOfTokensChangesNoneThatIsKnown) {
  Json tokenizer = demo("tokenizer.json"), config = demo("tokenizer_config.json");
  tokenizer["added_tokens"][1]["special"] = false;
  config["added_tokens_decoder"]["1534"]["special"] = false;
  const Json list = {"<|im_start|>", "[X]", {{"content", "[Y]"}, {"lstrip", true}}};
  for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
    Json given = config;
    given[key] = list;
    const Tokenizer made = tokenizer_of(tokenizer, given);
    const Ids ids{64, 1534, 65, 1536, 66, 1537};
    EXPECT_EQ(made.encode("a<|im_start|>b[X]c [Y]"), ids) << key;
    EXPECT_EQ(made.decode(ids), "a<|im_start|>bc[Y]") << key;
  }
}

TEST(TokenizerConfig, AddedTokensBeyondTheModelsVocabularyAreText) {
  TempDirectory directory;
  Json config = demo("tokenizer_config.json");
  config["pad_token"] = "[PAD]";
  std::ofstream(directory.path() / "tokenizer.json") << demo("tokenizer.json").dump();
  std::ofstream(directory.path() / "tokenizer_config.json") << config.dump();
  EXPECT_EQ(Tokenizer(directory.path()).encode("[PAD]"), (Ids{1536}));
  const Tokenizer made(directory.path(), 1536);
  EXPECT_EQ(made.left_out(), "[PAD]");
  EXPECT_EQ(made.vocab_size(), 1536);
  EXPECT_EQ(made.encode("[PAD]"), Tokenizer(kDemo).encode("[PAD]"));
  EXPECT_EQ(made.decode(made.encode("[PAD]")), "[PAD]");
  EXPECT_EQ(Tokenizer(directory.path(), 1537).left_out(), "");
}

TEST(TokenizerConfig, ConversationsWithToolsMayHaveATemplateOfTheirOwn) {
  TempDirectory directory;
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(directory.path() / name) << text;
  };
  const auto templates = [&] {
    const Tokenizer made(directory.path());
    return made.chat_template() + "|" + made.tool_template();
  };
  write("tokenizer.json", demo("tokenizer.json").dump());
  write("tokenizer_config.json", R"({"chat_template": "one"})");
  EXPECT_EQ(templates(), "one|");
  write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "tools"},
    {"name": "rag", "template": "x"}, {"name": "default", "template": "plain"}]})");
  EXPECT_EQ(templates(), "plain|tools");
  write("tokenizer_config.json", R"({"chat_template": {"default": "plain", "tool_use": "tools"}})");
  EXPECT_EQ(templates(), "plain|tools");
  write("chat_template.jinja", "file");  // as transformers saves them from 4.51 on
  EXPECT_EQ(templates(), "file|");
  std::filesystem::create_directory(directory.path() / "additional_chat_templates");
  write("additional_chat_templates/tool_use.jinja", "tools of a file");
  EXPECT_EQ(templates(), "file|tools of a file");
}

}  // namespace
}  // namespace nanovllm
