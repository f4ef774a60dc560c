// Conversations through the public API: a model's template over messages.
#include "nanovllm/tokenizer.h"

#include "llm_rig.h"

namespace nanovllm {
namespace {

TEST(ChatPrompt, IsTheModelsTemplateOverTheMessages) {
  LLM llm(demo(), demo_config());
  const char* messages =
      R"([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>\n\"you\""}])";
  const Prompt prompt = llm.chat_prompt(messages);
  EXPECT_EQ(std::get<std::string>(prompt.value),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi "
            "<b>\n\"you\"<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_FALSE(prompt.add_special_tokens);
  EXPECT_EQ(std::get<std::string>(llm.chat_prompt(R"([{"role": "user", "content": "x"}])",
                                                  R"({"add_generation_prompt": false})")
                                      .value),
            "<|im_start|>user\nx<|im_end|>\n");
  EXPECT_EQ(std::get<std::string>(llm.chat_prompt("[]").value), "<|im_start|>assistant\n");
}

TEST(ChatPrompt, TextPartsAreOneTextForATemplateThatKnowsNoParts) {
  LLM llm(demo(), demo_config());
  const char* parts =
      R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])";
  EXPECT_EQ(std::get<std::string>(llm.chat_prompt(parts).value),
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatPrompt, BadMessagesAndOptionsAreRefused) {
  LLM llm(demo(), demo_config());
  const char* good = R"([{"role": "user", "content": "x"}])";
  const std::vector<std::tuple<const char*, const char*, const char*>> rows = {
      {"", "{}", "messages"},
      {"[", "{}", "messages"},
      {"{}", "{}", "messages"},
      {"\"text\"", "{}", "messages"},
      {"[1]", "{}", "messages[0]"},
      {"[{\"role\": \"user\", \"content\": \"\xff\"}]", "{}", "messages"},
      {R"([{"role": "user"}])", "{}", "chat_template"},
      {R"([{"role": "user", "content": 5}])", "{}", "chat_template"},
      {R"([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])", "{}",
       "messages[0].content[0]: must be {\"type\": \"text\", \"text\": ...}"},
      {R"([{"role": "user", "content": ["x"]}])", "{}", "messages[0].content[0]"},
      {good, "[]", "options"},
      {good, "{", "options"},
      {good, R"({"add_generation_prompt": "yes"})", "add_generation_prompt"},
      {good, R"({"tools": 5})", "tools"},
      {good, R"({"messages": []})", "must not have messages"},
  };
  for (const auto& [messages, options, named] : rows) {
    SCOPED_TRACE(std::string(messages) + " with " + options);
    expect_invalid([&, m = messages, o = options] { llm.chat_prompt(m, o); }, {named});
  }
  LLM ids_only(golden("qwen3-tied-gqa"), config_for(kCpu));
  expect_invalid([&] { ids_only.chat_prompt(good); }, {"chat template"});
}

}  // namespace
}  // namespace nanovllm
