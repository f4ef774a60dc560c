#include "server/server.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <thread>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/seconds.h"
#include "io/json.h"
#include "server/access.h"
#include "server/generations.h"
#include "server/monitor/engine_watch.h"
#include "server/monitor/live.h"
#include "server/monitor/request_log.h"
#include "server/openapi.h"
#include "server/page.h"
#include "server/prompts.h"
#include "server/served_model.h"

namespace nanovllm::server {
namespace {

using Clock = std::chrono::steady_clock;

/// Nothing is JSON as well, but for a browser's: a foreign page may send that unasked.
bool is_json(const HttpRequest& request) {
  const auto* type = request.header("content-type");
  if (!type) return request.body.empty() && !request.header("origin");
  const auto name = std::string_view(*type).substr(0, type->find_first_of("; \t"));
  return is_same_name(name, "application/json");
}

std::string unknown_path(const std::string& path) {
  static const std::set<std::string> llama = {"/completion",  "/infill",          "/props",
                                              "/slots",       "/embedding",       "/apply-template",
                                              "/completions", "/chat/completions"};
  return llama.count(path) > 0
             ? fmt::format("{} is not here: use /v1/completions or /v1/chat/completions", path)
             : fmt::format(
                   "{} is not here: this server generates text, and /openapi.json lists its "
                   "endpoints",
                   quote(path.substr(0, 80)));
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
        http_(
            options.http,
            [this](HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
              handle(std::move(request), std::move(exchange));
            },
            [this](const HttpRequest& head) { return access_.key_of(head).has_value(); }) {
    add_routes();
  }

  void run() {
    http_.every(std::chrono::milliseconds(500), [this] { return watch_.look(llm_.get()), true; });
    if (!is_embedded()) http_.on_signal([this](int) { on_signal(); });
    if (options_.sse_keep_alive_interval > 0)
      http_.every(
          std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.sse_keep_alive_interval)),
          [this] {
            if (generations_) generations_->keep_alive();
            return true;
          });
    if (!is_embedded())
      log_.note(fmt::format("listening on {}; loading {}", http_.address(), options_.model));
    std::jthread loader([this] { load(); });
    http_.run();
    const std::jthread patience = watch_.watch_end();
    loader.join();
    pool_.reset();  // first: its jobs make others for the grammars
    grammars_.reset();
    llm_.reset();
    live_.reset();
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
    get("/openapi.json", &Server::openapi_page, guarded, false);
    get("/engine/live", &Server::live);
    for (const PageFile& file : page_files())
      if (!options_.no_page) get(file.path, &Server::page, open, false);
    get("/v1/models", &Server::models);
    if (options_.enable_tokenizer_info) get("/tokenizer_info", &Server::tokenizer_page);
    for (const char* path :
         {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
      post(path, &Server::generate);
    post("/v1/chat/completions/render", &Server::answer_by<render_chat>);
    post("/v1/completions/render", &Server::answer_by<render_completion>);
    post("/v1/messages/render", &Server::answer_by<render_message>);
    post("/v1/messages/count_tokens", &Server::answer_by<count_tokens>);
    post("/v1/responses/input_tokens", &Server::answer_by<count_input_tokens>);
    post("/tokenize", &Server::answer_by<tokenize>);
    post("/detokenize", &Server::answer_by<detokenize>);
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
            if (is_embedded()) options_.embedding.take(*outputs);
            if (outputs->empty()) return;
            http_.post([this, outputs] {
              generations_->deliver(*outputs);
              metrics_.add_steps(llm_->stats());
              if (!llm_->failure().empty()) on_engine_failure();
            });
          });
      RequestDefaults defaults = request_defaults(options_, llm->llm());
      http_.post([this, defaults = std::move(defaults),
                  made = std::make_shared<std::unique_ptr<AsyncLLM>>(std::move(llm))]() mutable {
        llm_ = std::move(*made);
        defaults_ = std::move(defaults);
        for (const std::string& note : llm_->llm().info().notes) log_.note(note);
        pool_ = std::make_unique<Pool>(2);
        grammars_ = std::make_unique<Pool>(2);
        generations_.emplace(
            options_, defaults_, http_, *llm_, *pool_, *grammars_, metrics_,
            [this](const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
                   HttpResponse response) { answer(request, exchange, std::move(response)); },
            log_);
        live_.emplace(names_.front(), http_, *llm_);
        is_ready_ = !is_draining_;
        if (is_embedded()) return offer();
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

  bool is_embedded() const { return static_cast<bool>(options_.embedding.on_ready); }
  void offer() {
    options_.embedding.on_ready(
        {.llm = llm_.get(),
         .handle =
             [this](HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
               http_.post([this, exchange = std::move(exchange),
                           shared = std::make_shared<HttpRequest>(std::move(request))] {
                 handle(std::move(*shared), exchange);
               });
             },
         .post = [this](std::function<void()> task) { http_.post(std::move(task)); },
         .stop = [this] { http_.post([this] { http_.stop(); }); }});
  }

  // The first signal ends the server once its answers are complete, the second at once.
  void on_signal() {
    if (!llm_) log_.note("stopping when the model is loaded; again to end at once");
    if (is_draining_ || !llm_) return http_.stop();
    is_draining_ = true;
    is_ready_ = false;
    http_.stop_accepting();
    log_.note(fmt::format("stopping: {} requests have {} s; again to end at once", in_work(),
                          options_.shutdown_timeout));
    const auto begin = Clock::now();
    http_.every(std::chrono::milliseconds(20), [this, begin] {
      const bool is_answering = in_work() > 0 || http_.is_sending_long();
      if (is_answering && seconds_since(begin) < options_.shutdown_timeout) return true;
      generations_->fail_all("the server is shutting down");
      http_.every(std::chrono::milliseconds(50), [this] { return http_.stop(), false; });
      return false;
    });
  }

  void on_engine_failure() {
    if (failure_) return;
    failure_ = std::make_exception_ptr(Error(ErrorKind::engine, llm_->failure()));
    is_ready_ = false;
    if (!is_embedded() && !options_.stays_after_failure)
      http_.every(std::chrono::milliseconds(200), [this] { return http_.stop(), false; });
  }

  // -- The way in

  void handle(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    if (!options_.root_path.empty() && request.path.starts_with(options_.root_path + "/"))
      request.path.erase(0, options_.root_path.size());
    auto found = routes_.find(request.path);
    if (found == routes_.end()) found = routes_.find(without_extra_slashes(request.path));
    if (found != routes_.end()) request.path = found->first;
    const std::string handler = found == routes_.end() ? "other" : found->first;
    const std::string method = request.method == "HEAD" ? "GET" : request.method;
    // Names that clients make up would each be a series of their own.
    static const std::set<std::string> known_methods = {"DELETE", "GET",  "OPTIONS",
                                                        "PATCH",  "POST", "PUT"};
    const auto refuse = [&](int status, const std::string& message) {
      metrics_.add_http(handler, known_methods.count(method) > 0 ? method : "other", status, 0);
      log(request, {.status = status, .method = method.substr(0, 8), .path = handler});
      HttpResponse response = error_response(status, message, {}, error_style(request.path));
      if (status == 405)
        response.headers.emplace_back(
            "Allow",
            found != routes_.end() && found->second.method == "POST" ? "POST" : "GET, HEAD");
      access_.add_cors(request, response.headers);
      exchange->respond(std::move(response));
    };
    if (method == "OPTIONS" && access_.allows_origins()) {
      HttpResponse response{.status = 204, .body = "", .content_type = ""};
      access_.add_cors(request, response.headers);
      return exchange->respond(std::move(response));
    }
    if (!access_.has_local_host(request))
      return refuse(403,
                    "the Host header names another host: send localhost, or give the server an "
                    "--api-key, with which it is not checked");
    const Guard guard = found == routes_.end() ? guarded : found->second.guard;
    const bool is_open = guard == open || (guard == metrics && options_.metrics_without_key);
    const auto key = is_open ? 0 : access_.key_of(request);
    if (!key) return refuse(401, "the API key is missing or wrong: send Authorization: Bearer KEY");
    request.api_key = *key;
    if (found == routes_.end() && request.path.starts_with("/v1/models/"))
      return method == "GET" ? model(std::move(request), std::move(exchange))
                             : refuse(405, "/v1/models/{id} takes GET");
    if (found == routes_.end() || (guard == admin && !options_.enable_admin))
      return refuse(404, unknown_path(request.path));
    const Endpoint& endpoint = found->second;
    if (endpoint.method != method)
      return refuse(405, fmt::format("{} takes {}", request.path, endpoint.method));
    if (endpoint.needs_model && !is_ready_) return refuse(503, why_not_serving());
    const auto* encoding = request.header("content-encoding");
    if (encoding && !is_same_name(*encoding, "identity"))
      return refuse(415, fmt::format("Content-Encoding {} is not taken: send the body as it is",
                                     quote(encoding->substr(0, 64))));
    if (method == "POST" && !is_json(request))
      return refuse(415, "the body must be JSON: send Content-Type: application/json");
    (this->*endpoint.route)(std::move(request), std::move(exchange));
  }

  void log(const HttpRequest& request, const RequestLine& line) {
    if (std::ranges::find(options_.unlogged_paths, request.path) == options_.unlogged_paths.end())
      log_.request(request_line(line, options_.json_log));
  }

  std::string why_not_serving() const {
    return is_draining_          ? "the server is shutting down"
           : watch_.is_hanging() ? watch_.why_hanging()
           : llm_                ? "the engine has failed"
                                 : "the model is being loaded";
  }

  void answer(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange,
              HttpResponse response) {
    metrics_.add_http(request.path, request.method, response.status, 0);
    access_.add_cors(request, response.headers);
    exchange->respond(std::move(response));
  }

  // -- Endpoints without the engine

  void health(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    watch_.look(llm_.get());
    const bool serves = is_ready_ && !watch_.is_hanging() && llm_->is_serving();
    answer(request, exchange,
           serves ? json_response({{"status", "ok"}}) : error_response(503, why_not_serving()));
  }
  void livez(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange,
           failure_ ? error_response(500, "the engine has failed")
                    : json_response({{"status", "ok"}}));
  }
  void version(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, json_response({{"version", options_.version}}));
  }
  void openapi_page(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    std::vector<Operation> operations = {{"GET", "/v1/models/{id}"}};
    for (const auto& [path, endpoint] : routes_)
      if ((endpoint.guard != admin || options_.enable_admin) && endpoint.route != &Server::page)
        operations.push_back({endpoint.method, path, endpoint.guard == open});
    std::ranges::sort(operations, {}, &Operation::path);
    answer(request, exchange,
           json_response(openapi(operations, options_.version, options_.root_path)));
  }
  void load_now(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, json_response({{"server_load", in_work()}}));
  }
  void metrics_page(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange,
           {.body = metrics_.page(names_.front(), llm_->stats(), llm_->llm().info(),
                                  llm_->seconds_in_step()),
            .content_type = "text/plain; version=0.0.4; charset=utf-8"});
  }
  void live(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    if (auto response = live_->watch(request, exchange))
      answer(request, exchange, std::move(*response));
  }
  void page(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, page_response(request));
  }
  Json card(const std::string& name) const {
    return model_card(options_, name, llm_->llm(), started_);
  }
  void models(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    Json list = Json::array();
    for (const std::string& name : names_) list.push_back(card(name));
    answer(request, exchange,
           json_response({{"object", "list"}, {"data", std::move(list)}, {"has_more", false}}));
  }
  void model(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    const std::string name =
        decode_percents(std::string_view(request.path).substr(std::string("/v1/models/").size()));
    const bool known = std::find(names_.begin(), names_.end(), name) != names_.end();
    request.path = "/v1/models/{id}";
    if (!is_ready_) return answer(request, exchange, error_response(503, why_not_serving()));
    answer(request, exchange,
           known ? json_response(card(name))
                 : error_response(
                       404, fmt::format("The model {} does not exist", quote(name.substr(0, 64))),
                       "model"));
  }
  void tokenizer_page(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    const Tokenizer* tokenizer = llm_->llm().tokenizer();
    answer(request, exchange,
           tokenizer ? json_response(tokenizer_info(options_, *tokenizer))
                     : error_response(404, "this server has no tokenizer"));
  }
  void abort_requests(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    answer(request, exchange, generations_->abort(request.body));
  }
  void reset_prefix_cache(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    llm_->reset_prefix_cache();
    answer(request, exchange, json_response({{"success", true}}));
  }

  void generate(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    Headers headers;
    access_.add_cors(request, headers);
    generations_->add(std::move(request), std::move(exchange), std::move(headers));
  }

  // -- Endpoints of the pool. A job answers by one post: no exchange outlives it elsewhere.

  template <HttpResponse (*make)(const Json&, const RequestDefaults&, const LLM&)>
  void answer_by(HttpRequest&& request, std::shared_ptr<Exchange> exchange) {
    auto shared = std::make_shared<HttpRequest>(std::move(request));
    Pool& pool = shared->path.ends_with("/render") ? *grammars_ : *pool_;
    ++in_pool_;
    pool.add([this, shared, exchange = std::move(exchange)]() mutable {
      Json body;
      HttpResponse response;
      try {
        body = parse_json(shared->body, "request body", ErrorKind::invalid_argument,
                          body_limits(options_));
        response = make(body, defaults_, llm_->llm());
      } catch (...) {
        response = refusal(std::current_exception(), body, error_style(shared->path));
      }
      http_.post([this, shared = std::move(shared), exchange = std::move(exchange),
                  response = std::move(response)]() mutable {
        --in_pool_;
        log(*shared, {.status = response.status, .path = shared->path});
        answer(*shared, exchange, std::move(response));
      });
    });
  }

  /// Requests that have no answer yet.
  int64_t in_work() const { return in_pool_ + (generations_ ? generations_->size() : 0); }

  const ServerOptions options_;
  const ServerLog log_;
  const Access access_;
  HttpServer http_;
  const std::vector<std::string> names_ = model_names(options_);
  std::unordered_map<std::string, Endpoint> routes_;
  const int64_t started_ = static_cast<int64_t>(std::time(nullptr));
  EngineWatch watch_{options_, log_};
  Metrics metrics_;
  RequestDefaults defaults_;
  std::unique_ptr<AsyncLLM> llm_;
  std::unique_ptr<Pool> pool_, grammars_;
  std::optional<Generations> generations_;  // from the moment the model is loaded
  std::optional<Live> live_;                // likewise
  int64_t in_pool_ = 0;                     // requests of answer_by()
  bool is_ready_ = false, is_draining_ = false;
  std::exception_ptr failure_;
};

void serve(const ServerOptions& options, const ServerLog& log) { Server(options, log).run(); }

}  // namespace nanovllm::server
