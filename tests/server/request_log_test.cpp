// The log: a line a request, as text or as JSON, and no text of anybody in it.
#include "server/monitor/request_log.h"

#include <gtest/gtest.h>

#include "server/client.h"

namespace nanovllm::server {
namespace {

TEST(RequestLog, ALineNamesWhatWasAskedAndWhatItTook) {
  const RequestLine line{.status = 200,
                         .path = "/v1/completions",
                         .generated = {{"cmpl-1", "a \"model\"\n", 5, 7, 2, 0.25}}};
  EXPECT_EQ(request_line(line, false),
            "200 POST /v1/completions id=cmpl-1 model=\"a \\\"model\\\"\\n\" prompt=5 completion=7 "
            "cached=2 0.250s");
  const Json json = Json::parse(request_line(line, true));
  EXPECT_EQ(json["status"], 200);
  EXPECT_EQ(json["id"], "cmpl-1");
  EXPECT_EQ(json["model"], "a \"model\"\n");
  EXPECT_EQ(json["completion_tokens"], 7);
  EXPECT_EQ(json["seconds"], 0.25);
  EXPECT_EQ(request_line({.status = 404, .method = "GET", .path = "other"}, false),
            "404 GET other");
}

TEST(RequestLog, HasOneLineForEachRequestAndNeverItsText) {
  for (const bool json : {false, true}) {
    ServerOptions options;
    options.json_log = json;
    ServerOnThread server(options);
    Json body = chat_body("What is canary 37 + 45?");
    for (const bool stream : {false, true}) {
      body["stream"] = stream;
      EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200);
    }
    body["temperature"] = "canary";
    EXPECT_EQ(server.post("/v1/chat/completions", body).status, 400);
    EXPECT_EQ(server.get("/canary").status, 404);
    EXPECT_EQ(server.post("/tokenize", Json{{"prompt", "canary"}}).status, 200);
    EXPECT_EQ(server.post("/detokenize", Json{{"tokens", "canary"}}).status, 400);
    const auto lines = server.requests();
    ASSERT_EQ(lines.size(), 6u);
    for (const std::string& line : lines) {
      EXPECT_EQ(line.find("canary"), std::string::npos) << line;
      EXPECT_EQ(line.starts_with("{\"time\":\"20"), json) << line;
    }
    EXPECT_EQ(json ? Json::parse(lines[2])["status"].get<int>() : std::stoi(lines[2]), 400);
  }
}

}  // namespace
}  // namespace nanovllm::server
