#include "server/server.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "core/check.h"
#include "io/json_object.h"
#include "server/http/error_body.h"
#include "server/metrics.h"
#include "server/openai/answer.h"
#include "server/openai/request.h"
#include "server/pool.h"

namespace nanovllm::server {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kBad = ErrorKind::invalid_argument;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Equal lengths whatever was sent: comparing takes the same time for every key.
std::array<unsigned char, SHA256_DIGEST_LENGTH> digest(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> out{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data());
  return out;
}

bool is_request_id(const std::string& id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
}

int status_of(ErrorKind kind) {
  return kind == ErrorKind::invalid_argument ? 400 : kind == ErrorKind::unavailable ? 503 : 500;
}

HttpResponse json_response(const Json& json) {
  return {.body = json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace

// All members belong to the I/O thread, but for options_, llm_'s thread-safe side and what job()
// and the engine's sink hand over by http_.post().
class Server {
 public:
  Server(const ServerOptions& options, const ServerLog& log)
      : options_(options),
        log_(log),
        http_(options.http, [this](HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
          handle(std::move(request), std::move(exchange));
        }) {
    names_ = options_.served_model_names;
    if (names_.empty()) names_.push_back(options_.model);
    for (const std::string& key : options_.api_keys) keys_.push_back(digest(key));
    add_routes();
  }

  void run() {
    http_.on_signal([this](int) { on_signal(); });
    if (options_.sse_keep_alive_interval > 0)
      http_.every(
          std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.sse_keep_alive_interval)),
          [this] {
            for (auto& [id, generation] : generations_) generation->keep_alive();
            return true;
          });
    log_.note(fmt::format("listening on {}; loading {}", http_.address(), options_.model));
    std::thread loader([this] { load(); });
    http_.run();
    loader.join();
    pool_.reset();
    llm_.reset();
    generations_.clear();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  using Route = void (Server::*)(HttpRequest&&, std::shared_ptr<Exchange>);
  enum Access { open, guarded, metrics, admin };
  struct Endpoint {
    std::string method;
    Route route;
    Access access = guarded;
    bool needs_model = true;
  };

  void add_routes() {
    const auto get = [this](const char* path, Route route, Access access = guarded,
                            bool needs_model = true) {
      routes_[path] = {"GET", route, access, needs_model};
    };
    const auto post = [this](const char* path, Route route, Access access = guarded) {
      routes_[path] = {"POST", route, access, true};
    };
    get("/health", &Server::health, open, false);
    get("/ping", &Server::health, open, false);
    get("/livez", &Server::livez, open, false);
    get("/version", &Server::version, guarded, false);
    get("/load", &Server::load_now, guarded, false);
    get("/metrics", &Server::metrics_page, Access::metrics);
    get("/v1/models", &Server::models);
    post("/v1/chat/completions", &Server::generate);
    post("/v1/completions", &Server::generate);
    post("/tokenize", &Server::tokenize);
    post("/detokenize", &Server::detokenize);
    post("/abort_requests", &Server::abort_requests, admin);
    post("/reset_prefix_cache", &Server::reset_prefix_cache, admin);
  }

  // -- Life

  void load() {
    try {
      auto llm = std::make_unique<AsyncLLM>(
          options_.model, options_.engine, options_.queue, [this](std::span<RequestOutput> step) {
            auto outputs = std::make_shared<std::vector<RequestOutput>>(
                std::make_move_iterator(step.begin()), std::make_move_iterator(step.end()));
            http_.post([this, outputs] { deliver(*outputs); });
          });
      http_.post([this, made = std::make_shared<std::unique_ptr<AsyncLLM>>(std::move(llm))] {
        llm_ = std::move(*made);
        defaults_.model_names = names_;
        if (options_.generation_config == "auto")
          defaults_.params = llm_->llm().default_sampling_params();
        defaults_.max_model_len = llm_->llm().info().max_model_len;
        for (const std::string& note : llm_->llm().info().notes) log_.note(note);
        pool_ = std::make_unique<Pool>(2);
        is_ready_ = !is_draining_;
        log_.note(fmt::format("serving {} on {}", names_.front(), http_.address()));
        if (is_draining_) http_.stop();
      });
    } catch (...) {
      http_.post([this, failure = std::current_exception()] {
        failure_ = failure;
        http_.stop();
      });
    }
  }

  // The first signal ends the server once its answers are complete, the second at once.
  void on_signal() {
    if (is_draining_ || !llm_) return http_.stop();
    is_draining_ = true;
    is_ready_ = false;
    llm_->drain();
    http_.stop_accepting();
    log_.note(fmt::format("stopping: {} requests have {} s; again to end at once",
                          generations_.size(), options_.shutdown_timeout));
    const auto begin = Clock::now();
    http_.every(std::chrono::milliseconds(20), [this, begin] {
      if (!generations_.empty() && since(begin) < options_.shutdown_timeout) return true;
      for (auto& [id, generation] : generations_)
        generation->fail(503, "the server is shutting down");
      generations_.clear();
      http_.every(std::chrono::milliseconds(50), [this] { return http_.stop(), false; });
      return false;
    });
  }

  void on_engine_failure() {
    if (failure_) return;
    failure_ = std::make_exception_ptr(Error(ErrorKind::engine, llm_->failure()));
    is_ready_ = false;
    http_.every(std::chrono::milliseconds(200), [this] { return http_.stop(), false; });
  }

  // -- The way in

  void handle(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    const auto found = routes_.find(request.path);
    const std::string handler = found == routes_.end() ? "other" : found->first;
    const std::string method = request.method == "HEAD" ? "GET" : request.method;
    const auto refuse = [&](int status, const std::string& message) {
      metrics_.add_http(handler, method.size() < 8 ? method : "other", status, 0);
      log_.request(fmt::format("{} {} {}", status, method.substr(0, 8), handler));
      HttpResponse response = error_response(status, message);
      add_cors(request, response.headers);
      exchange->respond(std::move(response));
    };
    if (method == "OPTIONS" && !options_.allowed_origins.empty()) {
      HttpResponse response{.status = 204, .body = "", .content_type = ""};
      add_cors(request, response.headers);
      return exchange->respond(std::move(response));
    }
    if (!has_local_host(request)) return refuse(403, "the Host header names another host");
    const Access access = found == routes_.end() ? guarded : found->second.access;
    const bool is_open = access == open || (access == metrics && options_.metrics_without_key);
    if (!is_open && !has_key(request))
      return refuse(401, "the API key is missing or wrong: send Authorization: Bearer KEY");
    if (found == routes_.end() && request.path.starts_with("/v1/models/"))
      return model(std::move(request), std::move(exchange));
    if (found == routes_.end() || (access == admin && !options_.enable_admin))
      return refuse(404, unknown_path(request.path));
    const Endpoint& endpoint = found->second;
    if (endpoint.method != method)
      return refuse(405, fmt::format("{} takes {}", request.path, endpoint.method));
    if (endpoint.needs_model && !is_ready_)
      return refuse(503,
                    is_draining_ ? "the server is shutting down" : "the model is being loaded");
    if (const auto* encoding = request.header("content-encoding"))
      return refuse(
          415, fmt::format("Content-Encoding {} is not taken", quote(encoding->substr(0, 64))));
    if (method == "POST" && !is_json(request))
      return refuse(415, "the body must be application/json");
    (this->*endpoint.route)(std::move(request), std::move(exchange));
  }

  static bool is_json(const HttpRequest& request) {
    const auto* type = request.header("content-type");
    return type && type->starts_with("application/json");
  }

  std::string unknown_path(const std::string& path) const {
    static const std::set<std::string> llama = {
        "/completion", "/infill",         "/props",       "/slots",
        "/embedding",  "/apply-template", "/completions", "/chat/completions"};
    return llama.count(path) > 0
               ? fmt::format("{} is not here: use /v1/completions or /v1/chat/completions", path)
               : fmt::format("{} is not here", quote(path.substr(0, 80)));
  }

  bool has_key(const HttpRequest& request) const {
    if (keys_.empty()) return true;
    std::string_view given;
    int times = 0;
    for (const auto& [name, value] : request.headers) {
      if (name == "authorization" && value.starts_with("Bearer ")) given = value, ++times;
      if (name == "x-api-key") given = value, ++times;
    }
    if (given.starts_with("Bearer ")) given.remove_prefix(7);
    const auto hashed = digest(given);
    bool known = false;
    for (const auto& key : keys_)
      known |= CRYPTO_memcmp(key.data(), hashed.data(), hashed.size()) == 0;
    return known && times == 1;
  }

  // A page of another site may reach this address under a name of its own (DNS rebinding).
  bool has_local_host(const HttpRequest& request) const {
    const std::string& host = options_.http.host;
    if (!options_.http.uds.empty() ||
        !(host == "127.0.0.1" || host == "localhost" || host == "::1"))
      return true;
    const auto* given = request.header("host");
    if (!given) return true;
    std::string name = *given;
    if (name.starts_with('[')) {
      name = name.substr(1, name.find(']') - 1);
    } else {
      name = name.substr(0, name.find(':'));
    }
    return name == "127.0.0.1" || name == "localhost" || name == "::1";
  }

  void add_cors(const HttpRequest& request, Headers& headers) const {
    const auto* origin = request.header("origin");
    if (!origin) return;
    for (const std::string& allowed : options_.allowed_origins) {
      if (allowed != "*" && allowed != *origin) continue;
      headers.emplace_back("Access-Control-Allow-Origin", allowed);
      headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
      headers.emplace_back("Access-Control-Allow-Headers",
                           "Authorization, Content-Type, X-Api-Key, X-Request-Id");
      return;
    }
  }

  void answer(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
              HttpResponse response) {
    metrics_.add_http(request.path, request.method, response.status, 0);
    add_cors(request, response.headers);
    exchange->respond(std::move(response));
  }

  // -- Endpoints without the engine

  void health(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    const bool serves = is_ready_ && llm_->is_serving();
    answer(request, exchange,
           serves ? json_response({{"status", "ok"}})
                  : error_response(503, !llm_          ? "the model is being loaded"
                                        : is_draining_ ? "the server is shutting down"
                                                       : "the engine has failed"));
  }
  void livez(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange,
           failure_ ? error_response(500, "the engine has failed")
                    : json_response({{"status", "ok"}}));
  }
  void version(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, json_response({{"version", options_.version}}));
  }
  void load_now(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, json_response({{"server_load", generations_.size()}}));
  }
  void metrics_page(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange,
           {.body = metrics_.page(names_.front(), llm_->stats(), llm_->llm().info()),
            .content_type = "text/plain; version=0.0.4; charset=utf-8"});
  }
  Json model_card(const std::string& name) const {
    return {{"id", name},
            {"object", "model"},
            {"created", started_},
            {"owned_by", "nano-vllm.cpp"},
            {"root", options_.model},
            {"parent", nullptr},
            {"max_model_len", llm_->llm().info().max_model_len},
            {"permission", Json::array()}};
  }
  void models(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    Json list = Json::array();
    for (const std::string& name : names_) list.push_back(model_card(name));
    answer(request, exchange, json_response({{"object", "list"}, {"data", std::move(list)}}));
  }
  void model(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    const std::string name = request.path.substr(std::string("/v1/models/").size());
    const bool known = std::find(names_.begin(), names_.end(), name) != names_.end();
    request.path = "/v1/models/{id}";
    if (!is_ready_)
      return answer(request, exchange, error_response(503, "the model is being loaded"));
    answer(request, exchange,
           known ? json_response(model_card(name))
                 : error_response(
                       404, fmt::format("The model {} does not exist", quote(name.substr(0, 64))),
                       "model"));
  }
  void abort_requests(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    for (const auto& [id, generation] : generations_) llm_->abort_request(id);
    answer(request, exchange, json_response({{"status", "ok"}}));
  }
  void reset_prefix_cache(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    llm_->reset_prefix_cache();
    answer(request, exchange, json_response({{"success", true}}));
  }

  // -- Endpoints of the pool. A job answers by one post: no exchange outlives it elsewhere.

  /// Runs `make` on the pool; its answer, or its error, is the exchange's.
  void answer_by(HttpRequest&& request, std::shared_ptr<Exchange> exchange,
                 std::function<HttpResponse(const Json&)> make) {
    auto shared = std::make_shared<HttpRequest>(std::move(request));
    pool_->add([this, shared, exchange = std::move(exchange), make = std::move(make)]() mutable {
      HttpResponse response;
      try {
        response = make(parse_json(shared->body, "request body", kBad));
      } catch (const Error& error) {
        response = error_response(status_of(error.kind()), error.what());
      } catch (const std::exception& error) {
        response = error_response(500, error.what());
      }
      http_.post([this, shared = std::move(shared), exchange = std::move(exchange),
                  response = std::move(response)] { answer(*shared, exchange, response); });
    });
  }

  /// The ids of a body's prompt or messages, as a generation would take them.
  std::vector<int32_t> tokens_of(const Json& body) const {
    const JsonObject o(body, "request body", kBad);
    const LLM& llm = llm_->llm();
    if (const Json* messages = o.find("messages")) {
      Json options = Json::object();
      if (const auto kwargs = o.optional_object("chat_template_kwargs")) options = kwargs->json();
      if (const auto add = o.optional_bool("add_generation_prompt"))
        options["add_generation_prompt"] = *add;
      return llm.tokenize(llm.chat_prompt(messages->dump(), options.dump()));
    }
    const auto text = o.optional_string("prompt");
    check(text.has_value(), kBad, "prompt is missing: give a text, or messages");
    Prompt prompt(*text);
    prompt.add_special_tokens = o.optional_bool("add_special_tokens").value_or(true);
    return llm.tokenize(prompt);
  }
  void tokenize(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer_by(std::move(request), std::move(exchange), [this](const Json& body) {
      const std::vector<int32_t> tokens = tokens_of(body);
      Json json = {
          {"count", tokens.size()}, {"max_model_len", defaults_.max_model_len}, {"tokens", tokens}};
      if (JsonObject(body, "request body", kBad).optional_bool("return_token_strs") == true) {
        Json texts = Json::array();
        for (const int32_t id : tokens) texts.push_back(llm_->llm().tokenizer()->id_to_token(id));
        json["token_strs"] = std::move(texts);
      }
      return json_response(json);
    });
  }
  void detokenize(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer_by(std::move(request), std::move(exchange), [this](const Json& body) {
      const JsonObject o(body, "request body", kBad);
      const Tokenizer* tokenizer = llm_->llm().tokenizer();
      check(tokenizer != nullptr, kBad, "this server has no tokenizer");
      const auto ids = o.optional_integers("tokens", 0, llm_->llm().info().vocab_size - 1);
      check(ids.has_value(), kBad, "tokens is missing: a list of token ids");
      const std::vector<int32_t> tokens(ids->begin(), ids->end());
      return json_response({{"prompt", tokenizer->decode(tokens, false)}});
    });
  }

  // -- Generations

  struct Job {
    HttpRequest request;
    std::shared_ptr<Exchange> exchange;
    Clock::time_point begin = Clock::now();
    std::string id;
  };

  void generate(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    auto job = std::make_shared<Job>();
    const auto* given = request.header("x-request-id");
    const bool is_chat = request.path == "/v1/chat/completions";
    job->id =
        (is_chat ? "chatcmpl-" : "cmpl-") + (given && is_request_id(*given) ? *given : new_id());
    job->request = std::move(request);
    job->exchange = std::move(exchange);
    pool_->add([this, job = std::move(job), is_chat]() mutable { read(std::move(job), is_chat); });
  }

  std::string new_id() { return fmt::format("{:016x}{:016x}", random_(), random_()); }

  // On the pool: everything that can be wrong with a request is found before it is answered.
  void read(std::shared_ptr<Job> job, bool is_chat) {
    Json body;
    try {
      body = parse_json(job->request.body, "request body", kBad,
                        {.max_bytes = options_.http.max_body_bytes});
      job->request.body.clear();
      job->request.body_ticket.reset();
      GenerationRequest request =
          is_chat ? read_chat(body, defaults_) : read_completion(body, defaults_);
      const LLM& llm = llm_->llm();
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

  void check_length(int64_t prompt, std::optional<int64_t> max_tokens) const {
    const int64_t most = defaults_.max_model_len;
    check(!max_tokens || prompt + *max_tokens <= most, kBad,
          "max_tokens is {}: with the prompt's {} tokens that is more than the context of {}",
          max_tokens.value_or(0), prompt, most);
  }

  void refuse(std::shared_ptr<Job>&& job, int status, std::string message, std::string param) {
    http_.post([this, job = std::move(job), status, message = std::move(message),
                param = std::move(param)] {
      if (status == 503) metrics_.add_rejection(message.find("tokens wait") != message.npos);
      log_request(*job, status, {});
      answer(job->request, job->exchange, error_response(status, message, param));
      job->exchange.reset();
    });
  }

  // The generation is known to the I/O thread before the engine hears of it, so that no output
  // comes too early. From then on errors reach it by its first request's id.
  void start(std::shared_ptr<Job>&& job, GenerationRequest&& request,
             std::vector<std::vector<int32_t>>&& prompts) {
    std::vector<int64_t> ids;
    for (size_t p = 0; p < prompts.size(); ++p) ids.push_back(llm_->new_request_id());
    const SamplingParams params = request.params;
    auto tokens = prompts;
    auto generation = std::make_shared<Generation>(
        std::move(request), job->id, std::move(prompts), std::move(job->exchange),
        llm_->llm().tokenizer(), options_.enable_prompt_tokens_details);
    generation->engine_ids = ids;
    http_.post([this, job = std::move(job), generation = std::move(generation), params]() mutable {
      enlist(std::move(job), std::move(generation), params);
    });
    try {
      for (size_t p = 0; p < ids.size(); ++p)
        llm_->add_request(ids[p], Prompt(std::move(tokens[p])), params,
                          {.timeout = options_.request_timeout});
    } catch (const Error& error) {
      const int status = status_of(error.kind());
      http_.post([this, id = ids.front(), status, message = std::string(error.what())] {
        if (status == 503) metrics_.add_rejection(message.find("tokens wait") != message.npos);
        end(id, status, message);
      });
    }
  }

  void enlist(std::shared_ptr<Job> job, std::shared_ptr<Generation> generation,
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

  void deliver(std::vector<RequestOutput>& outputs) {
    for (RequestOutput& output : outputs) {
      metrics_.add_output(output);
      const auto found = generations_.find(output.request_id);
      if (found == generations_.end()) continue;
      const std::shared_ptr<Generation> generation = found->second;
      generation->take(places_[output.request_id], output);
      if (!generation->is_done()) continue;
      for (const int64_t id : generation->engine_ids) llm_->abort_request(id);
      forget(*generation);
    }
    if (!llm_->failure().empty()) on_engine_failure();
  }

  /// Ends a generation from our side: the client has gone, or the engine did not take it.
  void end(int64_t id, int status, const std::string& message) {
    const auto found = generations_.find(id);
    if (found == generations_.end()) return;
    const std::shared_ptr<Generation> generation = found->second;
    for (const int64_t engine_id : generation->engine_ids) llm_->abort_request(engine_id);
    generation->fail(status, message);
    forget(*generation);
  }

  void forget(const Generation& generation) {
    const int64_t first = generation.engine_ids.front();
    if (const auto job = jobs_.find(first); job != jobs_.end()) {
      log_request(*job->second, generation.summary().status, generation.summary());
      metrics_.add_http(job->second->request.path, "POST", generation.summary().status,
                        since(job->second->begin));
      jobs_.erase(job);
    }
    for (const int64_t id : std::vector<int64_t>(generation.engine_ids)) {
      places_.erase(id);
      generations_.erase(id);
    }
  }

  void log_request(const Job& job, int status, const GenerationSummary& summary) {
    log_.request(fmt::format("{} {} id={} model={} prompt={} completion={} cached={} {:.3f}s",
                             status, job.request.path, job.id, quote(summary.model.substr(0, 64)),
                             summary.prompt_tokens, summary.completion_tokens,
                             summary.cached_tokens, since(job.begin)));
  }

  const ServerOptions options_;
  const ServerLog log_;
  HttpServer http_;
  std::vector<std::string> names_;
  std::vector<std::array<unsigned char, SHA256_DIGEST_LENGTH>> keys_;
  std::unordered_map<std::string, Endpoint> routes_;
  const int64_t started_ = static_cast<int64_t>(std::time(nullptr));
  std::mt19937_64 random_{std::random_device{}()};
  Metrics metrics_;
  std::unique_ptr<AsyncLLM> llm_;
  RequestDefaults defaults_;
  std::unique_ptr<Pool> pool_;
  std::unordered_map<int64_t, std::shared_ptr<Generation>> generations_;  // by the engine's ids
  std::unordered_map<int64_t, size_t> places_;                            // prompts' places
  std::unordered_map<int64_t, std::shared_ptr<Job>> jobs_;  // by a generation's first id
  bool is_ready_ = false, is_draining_ = false;
  std::exception_ptr failure_;
};

void serve(const ServerOptions& options, const ServerLog& log) { Server(options, log).run(); }

}  // namespace nanovllm::server
