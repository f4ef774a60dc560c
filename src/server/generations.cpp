#include "server/generations.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "server/http/error_body.h"

namespace nanovllm::server {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

double since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool is_request_id(const std::string& id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
}

}  // namespace

Generations::Generations(const ServerOptions& options, const RequestDefaults& defaults,
                         HttpServer& http, AsyncLLM& llm, Pool& pool, Metrics& metrics,
                         Answer answer, Log log)
    : options_(options),
      defaults_(defaults),
      http_(http),
      llm_(llm),
      pool_(pool),
      metrics_(metrics),
      answer_(std::move(answer)),
      log_(std::move(log)) {}

void Generations::keep_alive() {
  for (auto& [id, generation] : generations_) generation->keep_alive();
}

void Generations::abort_all() {
  for (const auto& [id, generation] : generations_) llm_.abort_request(id);
}

void Generations::fail_all(const std::string& message) {
  for (auto& [id, generation] : generations_) generation->fail(503, message);
  generations_.clear();
  places_.clear();
  jobs_.clear();
}

void Generations::add(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
  auto job = std::make_shared<Job>();
  const auto* given = request.header("x-request-id");
  const bool is_chat = request.path == "/v1/chat/completions";
  job->id =
      (is_chat ? "chatcmpl-" : "cmpl-") + (given && is_request_id(*given) ? *given : new_id());
  job->request = std::move(request);
  job->exchange = std::move(exchange);
  pool_.add([this, job = std::move(job), is_chat]() mutable { read(std::move(job), is_chat); });
}

std::string Generations::new_id() { return fmt::format("{:016x}{:016x}", random_(), random_()); }

// On the pool: everything that can be wrong with a request is found before it is answered.
void Generations::read(std::shared_ptr<Job> job, bool is_chat) {
  Json body;
  try {
    body = parse_json(job->request.body, "request body", kBad,
                      {.max_bytes = options_.http.max_body_bytes});
    job->request.body.clear();
    job->request.body_ticket.reset();
    GenerationRequest request =
        is_chat ? read_chat(body, defaults_) : read_completion(body, defaults_);
    const LLM& llm = llm_.llm();
    if (is_chat) request.prompts = {llm.chat_prompt(request.messages, request.template_options)};
    std::vector<std::vector<int32_t>> prompts;
    for (const Prompt& prompt : request.prompts) {
      prompts.push_back(llm.tokenize(prompt));
      check_length(std::ssize(prompts.back()), request.max_tokens);
      llm.check_request(prompts.back(), request.params);
    }
    start(std::move(job), std::move(request), std::move(prompts));
  } catch (const UnknownModel& error) {
    refuse(std::move(job), 404, error.what(), "model");
  } catch (const Error& error) {
    refuse(std::move(job), status_of(error.kind()), error.what(),
           field_at_fault(body, error.what()));
  } catch (const std::exception& error) {
    refuse(std::move(job), 500, error.what(), "");
  }
}

void Generations::check_length(int64_t prompt, std::optional<int64_t> max_tokens) const {
  const int64_t most = defaults_.max_model_len;
  check(!max_tokens || prompt + *max_tokens <= most, kBad,
        "max_tokens is {}: with the prompt's {} tokens that is more than the context of {}",
        max_tokens.value_or(0), prompt, most);
}

void Generations::refuse(std::shared_ptr<Job>&& job, int status, std::string message,
                         std::string param) {
  http_.post(
      [this, job = std::move(job), status, message = std::move(message), param = std::move(param)] {
        if (status == 503) metrics_.add_rejection(message.find("tokens wait") != message.npos);
        log(*job, status, {});
        answer_(job->request, job->exchange, error_response(status, message, param));
        job->exchange.reset();
      });
}

// The generation is known to the I/O thread before the engine hears of it, so that no output
// comes too early. From then on errors reach it by its first request's id.
void Generations::start(std::shared_ptr<Job>&& job, GenerationRequest&& request,
                        std::vector<std::vector<int32_t>>&& prompts) {
  std::vector<int64_t> ids;
  for (size_t p = 0; p < prompts.size(); ++p) ids.push_back(llm_.new_request_id());
  const SamplingParams params = request.params;
  auto tokens = prompts;
  auto generation = std::make_shared<Generation>(std::move(request), job->id, std::move(prompts),
                                                 std::move(job->exchange), llm_.llm().tokenizer(),
                                                 options_.enable_prompt_tokens_details);
  generation->engine_ids = ids;
  http_.post([this, job = std::move(job), generation = std::move(generation), params]() mutable {
    enlist(std::move(job), std::move(generation), params);
  });
  try {
    for (size_t p = 0; p < ids.size(); ++p)
      llm_.add_request(ids[p], Prompt(std::move(tokens[p])), params,
                       {.timeout = options_.request_timeout});
  } catch (const Error& error) {
    const int status = status_of(error.kind());
    http_.post([this, id = ids.front(), status, message = std::string(error.what())] {
      if (status == 503) metrics_.add_rejection(message.find("tokens wait") != message.npos);
      end(id, status, message);
    });
  }
}

void Generations::enlist(std::shared_ptr<Job> job, std::shared_ptr<Generation> generation,
                         const SamplingParams& params) {
  for (size_t p = 0; p < generation->engine_ids.size(); ++p) {
    generations_[generation->engine_ids[p]] = generation;
    places_[generation->engine_ids[p]] = p;
  }
  metrics_.add_request(generation->summary().prompt_tokens, params);
  jobs_[generation->engine_ids.front()] = std::move(job);
  generation->watch(
      [this, id = generation->engine_ids.front()] { end(id, 499, "the client left"); });
}

void Generations::deliver(std::vector<RequestOutput>& outputs) {
  for (RequestOutput& output : outputs) {
    metrics_.add_output(output);
    const auto found = generations_.find(output.request_id);
    if (found == generations_.end()) continue;
    const std::shared_ptr<Generation> generation = found->second;
    generation->take(places_[output.request_id], output);
    if (!generation->is_done()) continue;
    for (const int64_t id : generation->engine_ids) llm_.abort_request(id);
    forget(*generation);
  }
}

/// Ends a generation from our side: the client has gone, or the engine did not take it.
void Generations::end(int64_t id, int status, const std::string& message) {
  const auto found = generations_.find(id);
  if (found == generations_.end()) return;
  const std::shared_ptr<Generation> generation = found->second;
  for (const int64_t engine_id : generation->engine_ids) llm_.abort_request(engine_id);
  generation->fail(status, message);
  forget(*generation);
}

void Generations::forget(const Generation& generation) {
  const int64_t first = generation.engine_ids.front();
  if (const auto job = jobs_.find(first); job != jobs_.end()) {
    log(*job->second, generation.summary().status, generation.summary());
    metrics_.add_http(job->second->request.path, "POST", generation.summary().status,
                      since(job->second->begin));
    jobs_.erase(job);
  }
  for (const int64_t id : std::vector<int64_t>(generation.engine_ids)) {
    places_.erase(id);
    generations_.erase(id);
  }
}

void Generations::log(const Job& job, int status, const GenerationSummary& summary) {
  log_(fmt::format("{} {} id={} model={} prompt={} completion={} cached={} {:.3f}s", status,
                   job.request.path, job.id, quote(summary.model.substr(0, 64)),
                   summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens,
                   since(job.begin)));
}

}  // namespace nanovllm::server
