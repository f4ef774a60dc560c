#include "server/openai/logprobs.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace nanovllm::server {
namespace {

constexpr double kLowestLogprob = -9999.0;  // JSON has no -inf; vLLM's floor

double number(float logprob) {
  return std::isfinite(logprob) ? std::max<double>(logprob, kLowestLogprob) : kLowestLogprob;
}

}  // namespace

std::string LogprobsJson::token_text(int32_t id) const {
  if (tokens_as_ids || !tokenizer) return fmt::format("token_id:{}", id);
  return tokenizer->decode(std::span(&id, 1), false);
}

// Bytes, not the text: a token may be part of a character, and its text no more than U+FFFD.
Json LogprobsJson::chat(const std::vector<PositionLogprobs>& positions) const {
  const auto entry = [this](const TokenLogprob& candidate) {
    Json json = {{"token", token_text(candidate.token_id)},
                 {"logprob", number(candidate.logprob)},
                 {"bytes", nullptr}};
    if (!tokenizer) return json;
    json["bytes"] = Json::array();
    for (const char c : tokenizer->token_bytes(candidate.token_id))
      json["bytes"].push_back(static_cast<unsigned char>(c));
    return json;
  };
  Json content = Json::array();
  for (const PositionLogprobs& position : positions) {
    Json token = entry(position.front());
    token["top_logprobs"] = Json::array();
    for (size_t i = 1; i < position.size(); ++i)
      token["top_logprobs"].push_back(entry(position[i]));
    content.push_back(std::move(token));
  }
  return {{"content", std::move(content)}};
}

// Offsets count characters, as clients' strings do; a token that goes on with a character lies
// where that one begins. A prompt's first token has no log probability. Tokens of one text, such as
// bytes of a character, share an entry, the likeliest's: harnesses compare the largest of a
// position with its token's own.
Json LogprobsJson::completion(const std::vector<int32_t>& ids,
                              const std::vector<PositionLogprobs>& positions,
                              size_t& offset) const {
  Json tokens = Json::array(), logprobs = Json::array(), top = Json::array(),
       offsets = Json::array();
  for (size_t i = 0; i < ids.size() && i < positions.size(); ++i) {
    const std::string bytes = tokenizer ? tokenizer->token_bytes(ids[i]) : std::string();
    const auto goes_on = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
    tokens.push_back(token_text(ids[i]));
    offsets.push_back(offset - (offset > 0 && !bytes.empty() && goes_on(bytes.front())));
    offset += bytes.size() - static_cast<size_t>(std::ranges::count_if(bytes, goes_on));
    if (positions[i].empty()) {
      logprobs.push_back(nullptr);
      top.push_back(nullptr);
      continue;
    }
    logprobs.push_back(number(positions[i].front().logprob));
    Json candidates = Json::object();
    for (const TokenLogprob& candidate : positions[i]) {
      const double logprob = number(candidate.logprob);
      const auto [known, is_new] = candidates.emplace(token_text(candidate.token_id), logprob);
      if (!is_new) *known = std::max(known->get<double>(), logprob);
    }
    top.push_back(std::move(candidates));
  }
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(logprobs)},
          {"tokens", std::move(tokens)},
          {"top_logprobs", std::move(top)}};
}

Json LogprobsJson::prompt(const std::vector<PositionLogprobs>& positions) const {
  Json list = Json::array();
  for (const PositionLogprobs& position : positions) {
    Json& candidates = list.emplace_back();
    for (const TokenLogprob& candidate : position)
      candidates[std::to_string(candidate.token_id)] = {
          {"logprob", number(candidate.logprob)},
          {"rank", candidate.rank},
          {"decoded_token", token_text(candidate.token_id)}};
  }
  return list;
}

}  // namespace nanovllm::server
