// A chat with a tool, and its stream, for the tests of calls.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/json.h"

namespace nanovllm {

inline Json tools_of(const std::string& name = "get_weather") {
  return Json::array(
      {{{"type", "function"},
        {"function",
         {{"name", name},
          {"description", "Weather"},
          {"parameters",
           {{"type", "object"}, {"properties", {{"city", {{"type", "string"}}}}}}}}}}});
}

inline Json body_with_tools(bool stream = false) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "Weather?"}}})},
               {"temperature", 0},
               {"tools", tools_of()},
               {"stream", stream}};
  if (stream) body["stream_options"] = {{"include_usage", true}};
  return body;
}

/// A stream's deltas put together as clients do.
inline Json accumulated(const std::vector<Json>& events) {
  Json message = {{"content", ""}, {"reasoning", ""}, {"tool_calls", Json::array()}};
  for (const Json& event : events) {
    if (event["choices"].empty()) {
      message["usage"] = event["usage"];
      continue;
    }
    const Json& choice = event["choices"][0];
    for (const char* field : {"content", "reasoning"})
      if (choice["delta"].contains(field))
        message[field] =
            message[field].get<std::string>() + choice["delta"][field].get<std::string>();
    for (const Json& call : choice["delta"].value("tool_calls", Json::array())) {
      if (call["index"] == message["tool_calls"].size()) {
        EXPECT_EQ(call["type"], "function");
        message["tool_calls"].push_back({{"id", call["id"]},
                                         {"name", call["function"]["name"]},
                                         {"arguments", ""},
                                         {"pieces", 0}});
      }
      Json& known = message["tool_calls"][call["index"].get<size_t>()];
      known["arguments"] =
          known["arguments"].get<std::string>() + call["function"]["arguments"].get<std::string>();
      known["pieces"] = known["pieces"].get<int>() + 1;
    }
    if (!choice["finish_reason"].is_null()) message["finish_reason"] = choice["finish_reason"];
  }
  return message;
}

}  // namespace nanovllm
