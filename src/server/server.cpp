#include "server/server.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <set>
#include <thread>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json_object.h"
#include "server/access.h"
#include "server/generations.h"
#include "server/http/error_body.h"

namespace nanovllm::server {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kBad = ErrorKind::invalid_argument;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

HttpResponse json_response(const Json& json) {
  return {.body = json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace

// All members belong to the I/O thread, but for options_, llm_'s thread-safe side and what the
// pool's jobs and the engine's sink hand over by http_.post().
class Server {
 public:
  Server(const ServerOptions& options, const ServerLog& log)
      : options_(options),
        log_(log),
        access_(options_),
        http_(options.http, [this](HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
          handle(std::move(request), std::move(exchange));
        }) {
    names_ = options_.served_model_names;
    if (names_.empty()) names_.push_back(options_.model);
    add_routes();
  }

  void run() {
    http_.on_signal([this](int) { on_signal(); });
    if (options_.sse_keep_alive_interval > 0)
      http_.every(
          std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.sse_keep_alive_interval)),
          [this] {
            if (generations_) generations_->keep_alive();
            return true;
          });
    log_.note(fmt::format("listening on {}; loading {}", http_.address(), options_.model));
    std::thread loader([this] { load(); });
    http_.run();
    loader.join();
    pool_.reset();
    llm_.reset();
    generations_.reset();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  using Route = void (Server::*)(HttpRequest&&, std::shared_ptr<Exchange>);
  enum Guard { open, guarded, metrics, admin };
  struct Endpoint {
    std::string method;
    Route route;
    Guard guard = guarded;
    bool needs_model = true;
  };

  void add_routes() {
    const auto get = [this](const char* path, Route route, Guard guard = guarded,
                            bool needs_model = true) {
      routes_[path] = {"GET", route, guard, needs_model};
    };
    const auto post = [this](const char* path, Route route, Guard guard = guarded) {
      routes_[path] = {"POST", route, guard, true};
    };
    get("/health", &Server::health, open, false);
    get("/ping", &Server::health, open, false);
    get("/livez", &Server::livez, open, false);
    get("/version", &Server::version, guarded, false);
    get("/load", &Server::load_now, guarded, false);
    get("/metrics", &Server::metrics_page, Guard::metrics);
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
            http_.post([this, outputs] {
              generations_->deliver(*outputs);
              if (!llm_->failure().empty()) on_engine_failure();
            });
          });
      http_.post([this, made = std::make_shared<std::unique_ptr<AsyncLLM>>(std::move(llm))] {
        llm_ = std::move(*made);
        defaults_.model_names = names_;
        if (options_.generation_config == "auto")
          defaults_.params = llm_->llm().default_sampling_params();
        defaults_.max_model_len = llm_->llm().info().max_model_len;
        for (const std::string& note : llm_->llm().info().notes) log_.note(note);
        pool_ = std::make_unique<Pool>(2);
        generations_.emplace(
            options_, defaults_, http_, *llm_, *pool_, metrics_,
            [this](const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
                   HttpResponse response) { answer(request, exchange, std::move(response)); },
            log_.request);
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
                          generations_->size(), options_.shutdown_timeout));
    const auto begin = Clock::now();
    http_.every(std::chrono::milliseconds(20), [this, begin] {
      if (generations_->size() > 0 && since(begin) < options_.shutdown_timeout) return true;
      generations_->fail_all("the server is shutting down");
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
      access_.add_cors(request, response.headers);
      exchange->respond(std::move(response));
    };
    if (method == "OPTIONS" && access_.allows_origins()) {
      HttpResponse response{.status = 204, .body = "", .content_type = ""};
      access_.add_cors(request, response.headers);
      return exchange->respond(std::move(response));
    }
    if (!access_.has_local_host(request)) return refuse(403, "the Host header names another host");
    const Guard guard = found == routes_.end() ? guarded : found->second.guard;
    const bool is_open = guard == open || (guard == metrics && options_.metrics_without_key);
    if (!is_open && !access_.has_key(request))
      return refuse(401, "the API key is missing or wrong: send Authorization: Bearer KEY");
    if (found == routes_.end() && request.path.starts_with("/v1/models/"))
      return model(std::move(request), std::move(exchange));
    if (found == routes_.end() || (guard == admin && !options_.enable_admin))
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

  void answer(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
              HttpResponse response) {
    metrics_.add_http(request.path, request.method, response.status, 0);
    access_.add_cors(request, response.headers);
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
    answer(request, exchange,
           json_response({{"server_load", generations_ ? generations_->size() : 0}}));
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
    generations_->abort_all();
    answer(request, exchange, json_response({{"status", "ok"}}));
  }
  void reset_prefix_cache(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    llm_->reset_prefix_cache();
    answer(request, exchange, json_response({{"success", true}}));
  }

  void generate(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    generations_->add(std::move(request), std::move(exchange));
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

  const ServerOptions options_;
  const ServerLog log_;
  const Access access_;
  HttpServer http_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Endpoint> routes_;
  const int64_t started_ = static_cast<int64_t>(std::time(nullptr));
  Metrics metrics_;
  RequestDefaults defaults_;
  std::unique_ptr<AsyncLLM> llm_;
  std::unique_ptr<Pool> pool_;
  std::optional<Generations> generations_;  // from the moment the model is loaded
  bool is_ready_ = false, is_draining_ = false;
  std::exception_ptr failure_;
};

void serve(const ServerOptions& options, const ServerLog& log) { Server(options, log).run(); }

}  // namespace nanovllm::server
