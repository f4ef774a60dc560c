// Requests made from our own /openapi.json, right ones and broken ones: none may cost more than its
// own answer.
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm {
namespace {

/// Values of a JSON schema, and now and then others.
class Generator {
 public:
  explicit Generator(unsigned seed) : random_(seed) {}

  Json value_of(const Json& schema) {
    if (one_in(12)) return any();
    if (const auto options = schema.find("anyOf"); options != schema.end())
      return value_of((*options)[below(options->size())]);
    if (const auto list = schema.find("enum"); list != schema.end())
      return (*list)[below(list->size())];
    const std::string type = schema.value("type", "");
    if (type == "string") return text();
    if (type == "boolean") return one_in(2);
    if (type == "integer" || type == "number")
      return schema.value("minimum", 0) + static_cast<int>(below(4));
    if (type == "array") return array_of(schema);
    if (type == "object") return object_of(schema);
    return any();
  }

  Json any() {
    static const std::vector<std::string> kOdd = {
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        "1.5",
        "2147483648",
        "9223372036854775807",
        "\"\"",
        "[]",
        "{}",
        "[[]]",
        "[null]",
        R"({"type": "text", "text": "x"})",
        R"([{"type": "x"}])",
        R"([{"role": "user", "content": [{"type": "input_text", "text": "x"}]}])",
        R"([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}])",
        R"([{"role": "assistant", "content": [{"type": "tool_use", "id": 5}]}])"};
    const Json odd = Json::parse(kOdd[below(kOdd.size())], nullptr, false);
    return odd.is_discarded() ? Json("1e400") : odd;
  }

  Json object_of(const Json& schema) {
    Json object = Json::object();
    if (!schema.contains("properties")) return one_in(2) ? Json::object() : any();
    std::set<std::string> required;
    if (schema.contains("required"))
      for (const Json& name : schema["required"]) required.insert(name);
    const size_t most = schema["properties"].size();
    for (const auto& [name, property] : schema["properties"].items())
      if ((required.count(name) > 0 && !one_in(20)) || below(most) < 3)
        object[name] = value_of(property);
    return object;
  }

  bool one_in(size_t n) { return below(n) == 0; }
  size_t below(size_t n) { return random_() % n; }

 private:
  Json array_of(const Json& schema) {
    Json list = Json::array();
    const size_t size = schema.value("minItems", size_t{0}) + below(3);
    for (size_t i = 0; i < size; ++i)
      list.push_back(value_of(schema.value("items", Json::object())));
    return list;
  }
  std::string text() {
    static const std::vector<std::string> kTexts = {"",     "x",          "What is 1 + 1?",
                                                    "demo", "<|im_end|>", "\xF0\x9F\x98\x80",
                                                    "\x01", "\"quoted\"", "auto"};
    if (one_in(10)) return std::string(below(5000), 'a');
    return kTexts[below(kTexts.size())];
  }

  std::mt19937 random_;
};

TEST(OpenApi, NoRequestMadeFromItCostsMoreThanItsOwnAnswer) {
  server::ServerOptions options;
  options.engine.max_model_len = 96;
  options.enable_admin = true;
  ServerOnThread server(options);
  const HttpAnswer page = server.get("/openapi.json");
  ASSERT_EQ(page.status, 200);
  const Json api = page.json();
  EXPECT_TRUE(api["openapi"].get<std::string>().starts_with("3."));
  Generator generator(20261123);
  int answered = 0, refused = 0;
  for (const auto& [path, operations] : api["paths"].items()) {
    EXPECT_EQ(operations.size(), 1u) << path;
    EXPECT_FALSE(operations.front()["summary"].get<std::string>().empty()) << path;
    if (path == "/engine/live") continue;  // it does not end
    if (operations.contains("get")) {
      EXPECT_LT(server.get(path).status, 500) << path;
      continue;
    }
    if (!operations["post"].contains("requestBody")) {
      EXPECT_EQ(server.post(path, Json::object()).status, 200) << path;
      continue;
    }
    const Json& schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"];
    for (int i = 0; i < 120; ++i) {
      Json body = generator.object_of(schema);
      if (!generator.one_in(20)) body["model"] = "demo";
      if (generator.one_in(2) && body.contains("messages")) body["max_tokens"] = 2;
      std::string text = dump_json(body);
      if (generator.one_in(15)) text.resize(generator.below(text.size() + 1));
      const HttpAnswer answer = server.post(path, text);
      EXPECT_GE(answer.status, 200) << path << " " << text;
      EXPECT_LT(answer.status, 500) << path << " " << text << answer.body;
      ++(answer.status == 200 ? answered : refused);
      if (answer.status != 200) {
        EXPECT_LT(answer.body.size(), 65536u) << path;
        EXPECT_TRUE(answer.json().contains("error")) << answer.body;
      }
    }
  }
  EXPECT_GT(answered, 100);
  EXPECT_GT(refused, 100);
  EXPECT_EQ(server.get("/load").json()["server_load"], 0);
  EXPECT_EQ(server.get("/health").status, 200);
}

TEST(OpenApi, NamesTheEndpointsThatAreThere) {
  ServerOnThread server;
  const Json paths = server.get("/openapi.json").json()["paths"];
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/v1/responses",
                           "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/v1/models",
                           "/v1/models/{id}", "/health", "/metrics", "/openapi.json"})
    EXPECT_TRUE(paths.contains(path)) << path;
  EXPECT_FALSE(paths.contains("/abort_requests"));
  const Json chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]
                         ["application/json"]["schema"]["properties"];
  for (const char* field : {"messages", "temperature", "stop", "min_p", "stream_options"})
    EXPECT_TRUE(chat.contains(field)) << field;
}

}  // namespace
}  // namespace nanovllm
