// The files that the tokenizer refuses, and the places where it must stay linear.
#include "nanovllm/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "nanovllm/error.h"

#include "io/json.h"
#include "io/utf8.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

/// A tiny byte-less BPE that each test spoils in its own way.
Json small_tokenizer() {
  return Json::parse(R"({
    "added_tokens": [{"id": 5, "content": "<s>", "special": true, "normalized": false}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<unk>": 3, "<0x41>": 4},
              "merges": [["a", "b"]], "unk_token": "<unk>", "byte_fallback": true}})");
}

std::string refusal(const Json& json) {
  try {
    Tokenizer::from_json(json.dump());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "accepted";
}

void expect_refused(const std::function<void(Json&)>& spoil,
                    const std::vector<std::string>& mentions) {
  Json json = small_tokenizer();
  spoil(json);
  const std::string message = refusal(json);
  for (const std::string& part : mentions)
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
}

TEST(TokenizerJson, SmallOneIsAccepted) {
  const auto tokenizer = Tokenizer::from_json(small_tokenizer().dump());
  EXPECT_EQ(tokenizer.encode("ab<s>A?b"), (std::vector<int32_t>{2, 5, 4, 3, 1}));
  EXPECT_EQ(tokenizer.vocab_size(), 6);
  EXPECT_EQ(tokenizer.id_to_token(6), "");
  EXPECT_EQ(tokenizer.id_to_token(-1), "");
}

TEST(TokenizerJson, UnknownKindsAreRefusedByName) {
  const auto set = [](const char* key, const char* value) {
    return [=](Json& json) { json[key] = Json::parse(value); };
  };
  expect_refused(set("normalizer", R"({"type": "Nmt"})"), {"tokenizer.json: normalizer", "Nmt"});
  expect_refused(set("normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Oops"}]})"),
                 {"normalizer.normalizers[0]", "Oops"});
  expect_refused(set("pre_tokenizer", R"({"type": "BertPreTokenizer"})"),
                 {"pre_tokenizer", "BertPreTokenizer"});
  expect_refused(set("post_processor", R"({"type": "Best"})"), {"post_processor", "Best"});
  expect_refused(set("decoder", R"({"type": "CTC"})"), {"decoder", "CTC"});
  expect_refused([](Json& json) { json["model"]["type"] = "Unigram"; }, {"model", "Unigram"});
  expect_refused([](Json& json) { json["model"]["dropout"] = 0.1; }, {"model.dropout"});
  expect_refused([](Json& json) { json["model"]["end_of_word_suffix"] = "</w>"; },
                 {"model.end_of_word_suffix"});
}

TEST(TokenizerJson, ContradictionsAreRefusedWithTheEntry) {
  expect_refused([](Json& json) { json["model"]["vocab"]["b"] = 0; }, {"\"a\"", "\"b\"", "id 0"});
  expect_refused([](Json& json) { json["model"]["vocab"]["b"] = -1; }, {"vocab[\"b\"]"});
  expect_refused([](Json& json) { json["model"]["vocab"]["b"] = 4000000000; }, {"vocab[\"b\"]"});
  expect_refused([](Json& json) { json["model"]["vocab"]["b"] = 1.5; }, {"vocab[\"b\"]"});
  expect_refused(
      [](Json& json) {
        json["model"]["merges"][0] = {"a", "c"};
      },
      {"merges[0]", "\"c\"", "not in the vocabulary"});
  expect_refused(
      [](Json& json) {
        json["model"]["merges"][0] = {"b", "a"};
      },
      {"merges[0]", "\"ba\""});
  expect_refused([](Json& json) { json["model"]["merges"][0] = "a b c"; }, {"merges[0]"});
  expect_refused([](Json& json) { json["model"]["merges"][0] = {"", "a"}; }, {"merges[0]"});
  expect_refused([](Json& json) { json["model"]["unk_token"] = "<none>"; },
                 {"unk_token", "<none>"});
  expect_refused([](Json& json) { json["model"].erase("merges"); }, {"model.merges is missing"});
  expect_refused([](Json& json) { json["model"]["vocab"] = Json::object(); }, {"model.vocab"});
  expect_refused([](Json& json) { json["added_tokens"][0]["id"] = 2; },
                 {"added_tokens[0]", "\"ab\""});
  expect_refused([](Json& json) { json["added_tokens"][0]["content"] = "a"; }, {"added_tokens[0]"});
  expect_refused([](Json& json) { json["added_tokens"][0]["id"] = 1 << 30; },
                 {"added_tokens[0].id"});
  expect_refused(
      [](Json& json) {
        json["added_tokens"].push_back(json["added_tokens"][0]);
        json["added_tokens"][1]["content"] = "</s>";
      },
      {"added_tokens[1]", "used twice"});
}

TEST(TokenizerJson, WrongTypesAreRefusedWithWhatWasFound) {
  const auto set_token = [](const char* key, const char* value) {
    return [=](Json& json) { json["added_tokens"][0][key] = Json::parse(value); };
  };
  const std::string token = "tokenizer.json: added_tokens[0].";
  expect_refused(set_token("id", "-1"), {token + "id must be an integer from 0 to ", ", got -1"});
  expect_refused(set_token("id", "18446744073709551615"), {"got 18446744073709551615"});
  expect_refused(set_token("id", "1.0"), {token + "id must be an integer", ", got 1.0"});
  expect_refused(set_token("content", "[1]"),
                 {token + "content must be a string, got a list of 1"});
  expect_refused(set_token("content", "null"), {token + "content is missing"});
  expect_refused(set_token("special", "1"), {token + "special must be true or false, got 1"});
  expect_refused([](Json& json) { json["added_tokens"] = 5; },
                 {"tokenizer.json: added_tokens must be an array, got 5"});
  expect_refused([](Json& json) { json["decoder"] = "ByteLevel"; },
                 {"tokenizer.json: decoder must be an object, got \"ByteLevel\""});
}

TEST(TokenizerJson, BadPatternsAreRefusedWithTheEntry) {
  const auto with_regex = [](const char* regex) {
    return [=](Json& json) {
      json["pre_tokenizer"] = {{"type", "Split"},
                               {"pattern", {{"Regex", regex}}},
                               {"behavior", "Isolated"},
                               {"invert", false}};
    };
  };
  for (const char* regex :
       {"(", "[a-", "a{2,1}", "(?<x", "[a&&b]", "\\h", "[[a]]", "\\C", "(*FAIL)", "(a)\\1",
        "(?<x>a)\\k<x>", "(?P<x>a)(?P=x)", "(?C1)a", "x(ab){2,1001}"})
    expect_refused(with_regex(regex), {"pre_tokenizer.pattern.Regex"});
  expect_refused(
      [](Json& json) {
        json["pre_tokenizer"] = {{"type", "Split"}};
      },
      {"pre_tokenizer.pattern is missing"});
  expect_refused(
      [](Json& json) {
        json["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "x"}};
      },
      {"normalizer.pattern.String", "empty"});
}

TEST(TokenizerJson, ByteTokensAreExactlyTwoHexDigits) {
  Json json = small_tokenizer();
  json["decoder"] = {{"type", "ByteFallback"}};
  json["model"]["vocab"] =
      Json::parse(R"({"<0x-1>": 0, "<0x41>": 1, "<0x4g>": 2, "<0x+1>": 3, "<unk>": 4})");
  json["model"]["merges"] = Json::array();
  const auto tokenizer = Tokenizer::from_json(json.dump());
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{0, 1, 2, 3}), "<0x-1>A<0x4g><0x+1>");
}

// The texts are those of the Hugging Face library.
TEST(TokenizerJson, RunsOfBytesAndStripsOverSeveralTokensDecodeAsInTheLibrary) {
  Json json = small_tokenizer();
  json["added_tokens"] = Json::array();
  json["model"] = Json::parse(R"({"type": "BPE", "byte_fallback": true, "merges": [], "vocab":
      {"a": 0, " ": 1, " b ": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<0x41>": 6}})");
  json["decoder"] = Json::parse(R"({"type": "Sequence", "decoders": [{"type": "ByteFallback"},
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 3, "stop": 2}]})");
  const auto tokenizer = Tokenizer::from_json(json.dump());
  for (const auto& [ids, text] : std::vector<std::pair<std::vector<int32_t>, std::string>>{
           {{1, 1, 2, 0}, "b a"},
           {{1, 1, 1, 1, 0}, " a"},
           {{0, 2, 1, 1}, "a b "},
           {{0, 1}, "a"},
           {{2, 2, 1}, "b  b"},
           {{1, 2, 0, 1, 1, 1, 0, 1, 1, 1}, "b a   a "},
           {{3, 4, 5}, "\u20AC"},
           {{3, 4}, "\uFFFD\uFFFD"},
           {{3, 4, 0}, "\uFFFD\uFFFDa"},
           {{3, 4, 5, 3}, "\uFFFD\uFFFD\uFFFD\uFFFD"},
           {{3, 4, 6}, "\uFFFD\uFFFD\uFFFD"},
           {{6, 3, 0, 3, 4, 5}, "\uFFFD\uFFFDa\u20AC"}})
    EXPECT_EQ(tokenizer.decode(ids), text) << text;
}

TEST(TokenizerDirectory, MissingFileIsAModelError) {
  try {
    Tokenizer tokenizer("/nonexistent");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_NE(std::string(error.what()).find("/nonexistent: no such directory"), std::string::npos);
  }
}

TEST(TokenizerDirectory, ChatTemplateFileWinsOverTheConfiguration) {
  const auto directory = std::filesystem::temp_directory_path() /
                         ("nanovllm_tokenizer_test_" + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  std::ofstream(directory / "tokenizer.json") << small_tokenizer().dump();
  std::ofstream(directory / "tokenizer_config.json")
      << R"({"bos_token": "<s>", "eos_token": {"content": "b"}, "chat_template": "old"})";
  EXPECT_EQ(Tokenizer(directory.string()).chat_template(), "old");
  std::ofstream(directory / "chat_template.jinja") << "new";
  const Tokenizer tokenizer(directory.string());
  EXPECT_EQ(tokenizer.chat_template(), "new");
  EXPECT_EQ(tokenizer.bos_token_id(), 5);
  EXPECT_EQ(tokenizer.eos_token_id(), 1);
  std::filesystem::remove_all(directory);
}

TEST(TokenizerDirectory, ADanglingLinkIsNamed) {
  TempDirectory directory;
  std::ofstream(directory.path() / "tokenizer.json") << small_tokenizer().dump();
  for (const char* name : {"tokenizer_config.json", "chat_template.jinja"}) {
    std::filesystem::create_symlink("blobs/none", directory.path() / name);
    try {
      const Tokenizer tokenizer(directory.path());
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      EXPECT_NE(std::string(error.what()).find(std::string(name) + ": cannot be read: No such"),
                std::string::npos)
          << error.what();
    }
    std::filesystem::remove(directory.path() / name);
  }
}

TEST(TokenizerDirectory, OtherFormsAreNamedWithTheWayToConvertThem) {
  TempDirectory directory;
  for (const char* name :
       {"vocab.json", "tokenizer.model", "tiktoken.model", "tekken.json", "qwen.tiktoken"}) {
    std::ofstream(directory.path() / name) << "x";
    try {
      const Tokenizer tokenizer(directory.path());
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(" is not read: this engine reads tokenizer.json"), std::string::npos)
          << message;
      EXPECT_NE(message.find("save_pretrained"), std::string::npos) << message;
    }
    std::filesystem::remove(directory.path() / name);
  }
}

TEST(TokenizerInput, InvalidUtf8IsRefusedWithItsOffset) {
  const auto tokenizer = Tokenizer::from_json(small_tokenizer().dump());
  for (const char* text :
       {"ab\xFFz", "ab\xC0\x80", "ab\xED\xA0\x80", "ab\xF4\x90\x80\x80", "ab\xE2\x82"}) {
    try {
      tokenizer.encode(text);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(error.what()).find("byte 2"), std::string::npos) << error.what();
    }
  }
}

TEST(TokenizerInput, SpecialTextStaysPlainOnRequest) {
  const auto tokenizer = Tokenizer::from_json(small_tokenizer().dump());
  for (const int32_t id : tokenizer.encode("a<s>b", true, false)) EXPECT_NE(id, 5);
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{0, 5, -7, 1 << 30, 1}), "ab");
}

/// Half a megabyte of one character: a quadratic step anywhere would take hours.
TEST(TokenizerInput, LongRunsOfOneCharacterStayLinear) {
  for (const char* name :
       {"gpt2", "qwen2", "deepseek", "llama", "metaspace", "added", "normalizers", "splits"}) {
    const Tokenizer tokenizer(std::string(NANOVLLM_SOURCE_DIR "/tests/data/tokenizers/") + name);
    for (const std::string unit : {"a", " ", "_", "\n", "😀", "\u0323\u0307", "right ", "<|im_"}) {
      std::string text;
      while (text.size() < (1u << 19)) text += unit;
      const auto ids = tokenizer.encode(text, false);
      EXPECT_LE(ids.size(), text.size() + 2);
      tokenizer.decode(ids, false);
    }
  }
}

/// Whether an encode or a load fails with a request's or a model's error, within its budget.
std::string failure(const std::function<void()>& action, ErrorKind kind) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "nothing failed";
}

TEST(HostileTokenizer, ReplacementsThatGrowWithoutEndAreRefused) {
  Json doubling = Json::parse(R"({"type": "Sequence", "normalizers": []})");
  for (int i = 0; i < 40; ++i)
    doubling["normalizers"].push_back(
        {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  Json json = small_tokenizer();
  json["normalizer"] = doubling;
  const auto tokenizer = Tokenizer::from_json(json.dump());
  EXPECT_NE(failure([&] { tokenizer.encode("a"); }, ErrorKind::invalid_argument).find("Replace"),
            std::string::npos);
  EXPECT_EQ(tokenizer.encode("b"), (std::vector<int32_t>{1}));

  json = small_tokenizer();
  json["added_tokens"][0] = {{"id", 5}, {"content", "a!"}, {"normalized", true}};
  json["normalizer"] = doubling;
  EXPECT_NE(refusal(json).find("added token \"a!\""), std::string::npos) << refusal(json);

  json = small_tokenizer();
  json["decoder"] = {{"type", "Sequence"}, {"decoders", doubling["normalizers"]}};
  EXPECT_NE(refusal(json).find("decoders[6]: the decoder can make more than 64"), std::string::npos)
      << refusal(json);

  json = small_tokenizer();
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array()}};
  for (int i = 0; i < 40; ++i)
    json["pre_tokenizer"]["pretokenizers"].push_back(
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  const auto spelling = Tokenizer::from_json(json.dump());
  EXPECT_NE(failure([&] { spelling.encode("\u00e9"); }, ErrorKind::invalid_argument).find("make"),
            std::string::npos);
  while (json["pre_tokenizer"]["pretokenizers"].size() < 257)
    json["pre_tokenizer"]["pretokenizers"].push_back(json["pre_tokenizer"]["pretokenizers"][0]);
  EXPECT_NE(refusal(json).find("more than 256 steps"), std::string::npos) << refusal(json);
}

/// The work of all pieces together is bounded: every one of these would take minutes at least.
TEST(HostileTokenizer, PatternsThatBacktrackStopForTheWholeText) {
  const std::string letters(100'000, 'a');
  std::string words;
  while (words.size() < 100'000) words += "aaaaaaaaaaaaaaaaaaaaaaaa ";
  for (const auto& [regex, text] : std::vector<std::pair<std::string, std::string>>{
           {"(?:a|a)*b|a", letters},      // exponential at every letter
           {"(?:a|a)*b|a", words},        // the same in each of many pieces
           {"(?:(?=a)a)++b|a", letters},  // quadratic without going back
           {"a*a*a*a*b|a", letters},      // our own matcher
           {"a*b|a", letters}}) {
    for (const bool in_pieces : {false, true}) {
      Json json = small_tokenizer();
      const Json split = {
          {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
      json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array()}};
      if (in_pieces)
        json["pre_tokenizer"]["pretokenizers"].push_back({{"type", "WhitespaceSplit"}});
      json["pre_tokenizer"]["pretokenizers"].push_back(split);
      const auto tokenizer = Tokenizer::from_json(json.dump());
      const std::string reason =
          failure([&, &t = text] { tokenizer.encode(t); }, ErrorKind::invalid_argument);
      EXPECT_NE(reason.find("too many steps"), std::string::npos) << regex << ": " << reason;
      EXPECT_FALSE(tokenizer.encode("aaa b").empty());
    }
  }
}

TEST(Unicode, IncompleteAndInvalidBytesBecomeOneReplacementEach) {
  const auto lossy = [](std::string_view bytes) {
    std::string out;
    EXPECT_EQ(append_utf8_lossy(out, bytes, true), bytes.size());
    return out;
  };
  // The examples of the Unicode standard, table 3-8 and following.
  EXPECT_EQ(lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), "��������A");
  EXPECT_EQ(lossy("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), "�����A��B");
  EXPECT_EQ(lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "����A");
  std::string out;
  EXPECT_EQ(append_utf8_lossy(out, "a\xE2\x82", false), 1u);
}

}  // namespace
}  // namespace nanovllm
