#include "server/generations.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/seconds.h"
#include "io/json_object.h"
#include "server/monitor/request_log.h"
#include "server/prompts.h"

namespace nanovllm::server {
namespace {

constexpr size_t kMaxLogprobsAtOnce = 4096;  // some 10 ms
constexpr size_t kMaxNotedFields = 64, kMaxNotedBytes = 64;

bool is_request_id(const std::string& id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
}

/// Anthropic's clients look for the id under a name of their own.
void add_request_id(Headers& headers, const GenerationEndpoint& endpoint, const std::string& id) {
  headers.emplace_back("X-Request-Id", id);
  if (endpoint.error_style == ErrorStyle::anthropic) headers.emplace_back("Request-Id", id);
}

/// Names what an answer's bytes depend on beside the model's files and the request: the program and
/// the kind of device, not its number or threads (docs/contract.md).
std::string fingerprint(const ServerOptions& options, const EngineInfo& info) {
  std::string_view device = info.device;
  if (const size_t at = device.find_last_of(','); device.starts_with("cpu") && at != device.npos)
    device.remove_prefix(at);
  else
    device.remove_prefix(std::min(device.size(), device.find(' ')));
  const std::string facts =
      fmt::format("{} {} {} {} {} {} {} {} {} {}", options.version, options.commit,
                  info.architecture, info.num_parameters, info.dtype, info.kv_cache_dtype,
                  info.quantization, options.engine.dequantize, info.ranks.size(), device);
  return fmt::format("fp_{:016x}", std::hash<std::string>{}(facts));
}

}  // namespace

Generations::Generations(const ServerOptions& options, const RequestDefaults& defaults,
                         HttpServer& http, AsyncLLM& llm, Pool& pool, Pool& grammars,
                         Metrics& metrics, Answer answer, const ServerLog& log)
    : options_(options),
      defaults_(defaults),
      http_(http),
      llm_(llm),
      pool_(pool),
      grammars_(grammars),
      metrics_(metrics),
      answer_(std::move(answer)),
      log_(log),
      answer_options_{options.enable_prompt_tokens_details, options.reasoning_content,
                      fingerprint(options, llm.llm().info())} {}

void Generations::keep_alive() {
  for (const auto& [id, place] : places_)
    if (place.prompt == 0) place.generation->keep_alive();
}

HttpResponse Generations::abort(const std::string& text) {
  Json body = Json::object();
  try {
    constexpr auto kBad = ErrorKind::invalid_argument;
    if (!text.empty()) body = parse_json(text, "request body", kBad, {.max_bytes = 1 << 20});
    const auto named = JsonObject(body, "request body", kBad).optional_strings("request_ids");
    const std::set<std::string> ids =
        named ? std::set<std::string>(named->begin(), named->end()) : std::set<std::string>();
    for (const auto& [number, place] : places_)
      if (ids.empty() || ids.contains(place.generation->summary().id)) llm_.abort_request(number);
  } catch (...) {
    return refusal(std::current_exception(), body, ErrorStyle::openai);
  }
  return json_response({{"status", "ok"}});
}

void Generations::fail_all(const std::string& message) {
  while (!jobs_.empty()) end(jobs_.begin()->first, 503, message);
}

void Generations::add(HttpRequest&& request, std::shared_ptr<Exchange> exchange, Headers headers) {
  auto job = std::make_shared<Job>();
  const auto* given = request.header("x-request-id");
  const std::string id = given && is_request_id(*given) ? *given : random_id();
  job->endpoint = find_generation_endpoint(request.path);
  job->id = std::string(job->endpoint->id_prefix) + id;
  job->headers = std::move(headers);
  add_request_id(job->headers, *job->endpoint, id);
  job->request = std::move(request);
  job->exchange = std::move(exchange);
  int64_t& in_work = in_work_[job->request.api_key];
  if (options_.api_keys.size() > 1 && in_work >= options_.max_reqs_per_key) {
    HttpResponse response = error_response(
        429, fmt::format("{} requests of this API key are in work: wait for one of them", in_work),
        {}, job->endpoint->error_style);
    return answer_refused(*job, std::move(response));
  }
  ++in_work;
  pool_.add([this, job = std::move(job)]() mutable { read(std::move(job)); });
}

// On the pools: everything that can be wrong with a request is found before it is answered. A
// grammar may take seconds: nobody without one waits for it.
void Generations::read(std::shared_ptr<Job> job) {
  Json body;
  try {
    body = parse_json(job->request.body, "request body", ErrorKind::invalid_argument,
                      body_limits(options_));
    job->request.body.clear();
    job->request.body_ticket.reset();
    GenerationRequest request = job->endpoint->read(body, defaults_);
    if (request.params.structured_outputs.empty() && request.parser.tools.empty())
      return prepare(std::move(job), std::move(request), body);
    grammars_.add([this, job, request = std::move(request), body = std::move(body)]() mutable {
      prepare(std::move(job), std::move(request), body);
    });
  } catch (...) {
    refuse(std::move(job), refusal(std::current_exception(), body, job->endpoint->error_style));
  }
}

void Generations::prepare(std::shared_ptr<Job> job, GenerationRequest&& request, const Json& body) {
  try {
    auto prompts = tokenize_prompts(request, defaults_, llm_.llm());
    const int64_t answers = std::ssize(prompts) * request.params.n,
                  most = options_.queue.max_num_queued_reqs;
    check(most == 0 || answers <= most, ErrorKind::invalid_argument,
          "{} asks for {} answers, and this server's queue never holds more than {} "
          "(--max-num-queued-reqs): ask for them in parts",
          prompts.size() > 1 ? "prompt" : "n", answers, most);
    start(std::move(job), std::move(request), std::move(prompts), body);
  } catch (...) {
    refuse(std::move(job), refusal(std::current_exception(), body, job->endpoint->error_style));
  }
}

void Generations::refuse(std::shared_ptr<Job>&& job, HttpResponse response) {
  http_.post([this, job = std::move(job), response = std::move(response)]() mutable {
    --in_work_[job->request.api_key];
    answer_refused(*job, std::move(response));
    job->exchange.reset();
  });
}

void Generations::answer_refused(const Job& job, HttpResponse response) {
  add_request_id(response.headers, *job.endpoint, job.id.substr(job.endpoint->id_prefix.size()));
  log(job, response.status, {});
  answer_(job.request, job.exchange, std::move(response));
}

// The generation is known to the I/O thread before the engine hears of it, so that no output
// comes too early. From then on errors reach it by its first request's id.
void Generations::start(std::shared_ptr<Job>&& job, GenerationRequest&& request,
                        std::vector<std::vector<int32_t>>&& prompts, const Json& body) {
  std::vector<int64_t> ids;
  for (size_t p = 0; p < prompts.size(); ++p) ids.push_back(llm_.new_request_id());
  SamplingParams params = request.params;
  // Clients with unlike keys share no prefix: the time of an answer would tell of others' prompts.
  if (options_.api_keys.size() > 1)
    params.cache_salt = fmt::format("{} {}", job->request.api_key, params.cache_salt);
  auto tokens = prompts;
  auto generation = std::make_shared<Generation>(
      *job->endpoint, std::move(request), job->id, std::move(prompts), std::move(job->exchange),
      std::move(job->headers), llm_.llm().tokenizer(), answer_options_);
  generation->engine_ids = ids;
  http_.post([this, job = std::move(job), generation = std::move(generation), params]() mutable {
    enlist(std::move(job), std::move(generation), params);
  });
  try {
    for (size_t p = 0; p < ids.size(); ++p)
      llm_.add_request(ids[p], Prompt(std::move(tokens[p])), params,
                       {.timeout = options_.request_timeout});
  } catch (const std::exception& error) {
    const auto* full = dynamic_cast<const QueueFull*>(&error);
    const auto* known = dynamic_cast<const Error*>(&error);
    const std::optional limit = full ? std::optional(full->limit()) : std::nullopt;
    http_.post([this, id = ids.front(), status = known ? status_of(known->kind()) : 500, limit,
                message = std::string(error.what()), param = field_at_fault(body, error.what())] {
      if (limit) metrics_.add_rejection(*limit);
      end(id, status, message, param);
    });
  }
}

void Generations::enlist(std::shared_ptr<Job> job, std::shared_ptr<Generation> generation,
                         const SamplingParams& params) {
  for (size_t p = 0; p < generation->engine_ids.size(); ++p)
    places_[generation->engine_ids[p]] = {generation, p};
  metrics_.add_request(generation->summary().prompt_tokens, params);
  note_ignored(generation->ignored_fields());
  jobs_[generation->engine_ids.front()] = std::move(job);
  generation->watch(
      [this, id = generation->engine_ids.front()] { end(id, 499, "the client left"); });
}

void Generations::deliver(std::vector<RequestOutput>& outputs) {
  for (RequestOutput& output : outputs) {
    metrics_.add_output(output);
    const auto found = places_.find(output.request_id);
    if (found == places_.end()) continue;
    const auto generation = found->second.generation;
    generation->take(found->second.prompt, output);
    if (generation->is_complete()) answer_whole(generation);
    if (!generation->is_done()) continue;
    for (const int64_t id : generation->engine_ids) llm_.abort_request(id);
    forget(*generation);
  }
}

// A long answer is written on the pool, so that nobody else waits: log probabilities make hundreds
// of megabytes. A client that leaves meanwhile has ended it.
void Generations::answer_whole(std::shared_ptr<Generation> generation) {
  if (generation->num_logprobs() <= kMaxLogprobsAtOnce)
    return generation->respond(generation->whole());
  pool_.add([this, generation = std::move(generation)]() mutable {
    const int64_t id = generation->engine_ids.front();
    std::string body, failure;
    try {
      body = generation->whole();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    http_.post([this, id, generation = std::move(generation), body = std::move(body),
                failure = std::move(failure)]() mutable {
      if (!failure.empty()) return end(id, 500, failure);
      generation->respond(std::move(body));
      forget(*generation);
    });
  });
}

/// Ends a generation from our side: the client has gone, or the engine did not take it.
void Generations::end(int64_t id, int status, const std::string& message,
                      const std::string& param) {
  const auto found = places_.find(id);
  if (found == places_.end()) return;
  const std::shared_ptr<Generation> generation = found->second.generation;
  for (const int64_t engine_id : generation->engine_ids) llm_.abort_request(engine_id);
  generation->fail(status, message, param);
  forget(*generation);
}

void Generations::forget(const Generation& generation) {
  const int64_t first = generation.engine_ids.front();
  if (const auto job = jobs_.find(first); job != jobs_.end()) {
    --in_work_[job->second->request.api_key];
    log(*job->second, generation.summary().status, generation.summary());
    metrics_.add_http(job->second->request.path, "POST", generation.summary().status,
                      seconds_since(job->second->begin));
    jobs_.erase(job);
  }
  for (const int64_t id : generation.engine_ids) places_.erase(id);
}

// Each name once, and only so many: names are the clients'.
void Generations::note_ignored(const std::vector<std::string>& fields) {
  for (const std::string& field : fields) {
    if (noted_fields_.size() == kMaxNotedFields) return;
    if (noted_fields_.insert(field.substr(0, kMaxNotedBytes)).second)
      log_.note(fmt::format("the field {} of requests is ignored", quote(field)));
  }
}

void Generations::log(const Job& job, int status, const GenerationSummary& summary) {
  const auto& unlogged = options_.unlogged_paths;
  if (std::ranges::find(unlogged, job.request.path) != unlogged.end()) return;
  const RequestLine line{
      .status = status,
      .path = job.request.path,
      .generated = {{job.id, summary.model, summary.prompt_tokens, summary.completion_tokens,
                     summary.cached_tokens, seconds_since(job.begin)}}};
  log_.request(request_line(line, options_.json_log));
}

}  // namespace nanovllm::server
