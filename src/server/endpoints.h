// The endpoints that generate: which reader and which writer each of them has.
#pragma once

#include <memory>
#include <string_view>

#include "server/answer_writer.h"
#include "server/http/error_body.h"

namespace nanovllm::server {

struct GenerationEndpoint {
  std::string_view path, id_prefix;
  /// Throws as read_chat() does.
  GenerationRequest (*read)(const Json& body, const RequestDefaults& defaults);
  std::unique_ptr<AnswerWriter> (*make_writer)(const WriterContext& context);
  ErrorStyle error_style = ErrorStyle::openai;
};

/// Null where the path has none.
const GenerationEndpoint* find_generation_endpoint(std::string_view path);

}  // namespace nanovllm::server
