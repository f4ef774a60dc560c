// Published chat templates (shared/chat_templates) write calls; the parsers that their marks choose
// read them back.
#include <filesystem>
#include <map>

#include "io/jinja/chat_template.h"
#include "parse_rig.h"

namespace nanovllm {
namespace {

std::string source_of(const std::string& name) {
  return read_file(NANOVLLM_SOURCE_DIR "/../shared/chat_templates/" + name + ".jinja", 1 << 20);
}
bool has_templates() {
  return std::filesystem::exists(NANOVLLM_SOURCE_DIR "/../shared/chat_templates/cases.json");
}

struct Family {
  std::string source, tools, reasoning, begin, end;
  size_t most_calls = 3;
};

const Family kFamilies[] = {
    {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", "", "<|im_start|>assistant",
     "<|im_end|>"},
    {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "", "<|im_start|>assistant",
     "<|im_end|>"},
    {"Qwen-Qwen2.5-7B-Instruct", "hermes", "", "<|im_start|>assistant", "<|im_end|>"},
    {"Qwen-Qwen3-0.6B", "hermes", "qwen3", "<|im_start|>assistant", "<|im_end|>"},
    {"Qwen-Qwen3-30B-A3B-rev2", "hermes", "qwen3", "<|im_start|>assistant", "<|im_end|>"},
    {"Qwen-QwQ-32B", "hermes", "qwen3", "<|im_start|>assistant", "<|im_end|>"},
    {"Qwen3-Coder", "qwen3_coder", "", "<|im_start|>assistant", "<|im_end|>"},
    {"Qwen3.5-4B", "qwen3_coder", "qwen3", "<|im_start|>assistant", "<|im_end|>"},
    {"ByteDance-Seed-OSS", "seed_oss", "seed_oss", "assistant", "<seed:eos>"},
    {"meta-llama-Llama-3.1-8B-Instruct", "llama3_json", "", "assistant<|end_header_id|>",
     "<|eot_id|>", 1},
    {"meta-llama-Llama-3.2-3B-Instruct", "llama3_json", "", "assistant<|end_header_id|>",
     "<|eot_id|>", 1},
    {"meta-llama-Llama-3.3-70B-Instruct", "llama3_json", "", "assistant<|end_header_id|>",
     "<|eot_id|>", 1},
    {"mistralai-Mistral-Nemo-Instruct-2407", "mistral", "", "[/INST]", "</s>"},
    {"Mistral-Small-3.2-24B-Instruct-2506", "mistral", "", "[/INST]", "</s>"},
    {"unsloth-mistral-Devstral-Small-2507", "mistral", "", "[/INST]", "</s>"},
};

TEST(ToolTemplates, TheirMarksChooseTheParsers) {
  if (!has_templates()) GTEST_SKIP() << "no reference data beside this checkout";
  std::map<std::string, std::pair<std::string, std::string>> expected;
  for (const Family& f : kFamilies) expected[f.source] = {f.tools, f.reasoning};
  expected["ibm-granite-granite-3.3-2B-Instruct"] = {"", "granite"};
  expected["openai-gpt-oss-120b"] = {"", "openai_gptoss"};
  for (const char* name : {"llama-cpp-deepseek-r1", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                           "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1",
                           "GLM-4.6", "HuggingFaceTB-SmolLM3-3B", "NVIDIA-Nemotron-Nano-v2"})
    expected[name] = {"", "qwen3"};
  for (const auto& file :
       std::filesystem::directory_iterator(NANOVLLM_SOURCE_DIR "/../shared/chat_templates")) {
    if (file.path().extension() != ".jinja") continue;
    const std::string name = file.path().stem();
    const ChatFormat format = choose_chat_format(source_of(name), "", "");
    EXPECT_EQ(format.tools ? format.tools->name : "", expected[name].first) << name;
    EXPECT_EQ(format.reasoning ? format.reasoning->names.front() : "", expected[name].second)
        << name;
  }
}

/// The text that `family`'s template makes of an assistant's message with these calls.
std::string rendered(const Family& family, const ChatTemplate& chat_template, const Json& calls,
                     const std::vector<Tool>& tools) {
  ChatRequest request;
  request.messages = Json::array({{{"role", "user"}, {"content", "Hi"}}});
  request.messages.push_back({{"role", "assistant"}, {"content", ""}, {"tool_calls", calls}});
  request.tools = tools_for_template(tools);
  request.add_generation_prompt = false;
  request.special_tokens = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
  const std::string text = chat_template.render(chat_context(request));
  const size_t begin = text.rfind(family.begin) + family.begin.size();
  return text.substr(begin, text.rfind(family.end) - begin);
}

TEST(ToolTemplates, CallsThatTheyWriteParseBackHoweverTheyAreCut) {
  if (!has_templates()) GTEST_SKIP() << "no reference data beside this checkout";
  for (const Family& family : kFamilies) {
    SCOPED_TRACE(family.source);
    const std::string source = source_of(family.source);
    const ChatTemplate chat_template(source, family.source);
    const ChatFormat format = choose_chat_format(source, "", "");
    RandomJson random(7);
    for (int round = 0; round < 25 && !HasFailure(); ++round) {
      std::vector<Tool> tools;
      Json calls = Json::array();
      std::vector<Json> expected;
      for (size_t n = 1 + random.below(family.most_calls); n > 0; --n) {
        Json properties = Json::object(), arguments = Json::object();
        for (size_t k = random.below(4); k > 0; --k) {
          const std::string name = "p" + std::to_string(k), type = random.any_type();
          properties[name] = {{"description", "x"}};
          // Values are bare where types say what they are; Hermes' template recurses on arrays.
          if (family.begin.ends_with("assistant") && family.tools != "hermes")
            properties[name]["type"] = type;
          arguments[name] = random.value(type);
        }
        const std::string name = "tool_" + std::to_string(n);
        tools.push_back(
            {.name = name,
             .description = "d",
             .parameters =
                 Json{{"type", "object"}, {"properties", properties}, {"required", Json::array()}}
                     .dump()});
        calls.push_back({{"id", "abcDEF123"},
                         {"type", "function"},
                         {"function", {{"name", name}, {"arguments", arguments}}}});
        expected.push_back(std::move(arguments));
      }
      const std::string text = rendered(family, chat_template, calls, tools);
      const ChatMessage message = parse_everywhere(format, {.tools = tools, .id_seed = 1}, text);
      EXPECT_EQ(message.content, "") << text;
      EXPECT_EQ(message.reasoning, "") << text;
      ASSERT_EQ(message.tool_calls.size(), calls.size()) << text;
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(message.tool_calls[i].name, calls[i]["function"]["name"].get<std::string>());
        const Json found = Json::parse(message.tool_calls[i].arguments, nullptr, false);
        EXPECT_EQ(nlohmann::json(found), nlohmann::json(expected[i])) << text;
      }
    }
  }
}

}  // namespace
}  // namespace nanovllm
