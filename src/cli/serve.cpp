// nanovllm serve: the HTTP server.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <fmt/format.h>
#include <unistd.h>

#include "chat/chat_format.h"
#include "cli/about/build_info.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/load_model.h"
#include "cli/parser_options.h"
#include "cli/terminal/output.h"
#include "core/check.h"
#include "io/json.h"
#include "io/utf8.h"
#include "kv_events/config.h"
#include "server/access.h"
#include "server/monitor/request_log.h"
#include "server/server.h"

namespace nanovllm::cli {
namespace {

// vLLM's flags that ask for what always holds here: start scripts have them.
struct AcceptedFlag {
  const char *name, *why;
};
constexpr AcceptedFlag kAcceptedFlags[] = {
    {"--trust-remote-code", "code of a model directory is never run, and never needed"},
    {"--enable-auto-tool-choice", "models may always choose their tools"},
    {"--enable-chunked-prefill", "long prompts are always computed in chunks"},
    {"--async-scheduling", "the next step is always planned while one runs"},
    {"--enable-server-load-tracking", "/load always answers"},
    {"--enable-request-id-headers", "every answer has its X-Request-Id"},
    {"--disable-log-requests", "prompts and answers are never logged"},
    {"--no-enable-log-requests", "prompts and answers are never logged"},
    {"--disable-frontend-multiprocessing", "the server is one process"}};

struct ServeOptions {
  server::ServerOptions server;
  bool quiet = false, no_access_log = false;
  std::array<bool, std::size(kAcceptedFlags)> accepted{};
};

/// Adds the parts of `text` between separators that are not empty, without white space at their
/// end.
void add_parts(const std::string& text, char separator, std::vector<std::string>& parts) {
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    std::string part = text.substr(begin, end - begin);
    while (!part.empty() && (part.back() == '\r' || part.back() == ' ')) part.pop_back();
    if (!part.empty()) parts.push_back(std::move(part));
    begin = end + 1;
  }
}

std::string read_root_path(std::string path) {
  while (path.ends_with('/')) path.pop_back();
  check(path.empty() || path.starts_with('/'), ErrorKind::invalid_argument,
        "must begin with /, got {}", quote(path));
  return path;
}

std::string not_empty(const std::string& text) {
  check(!text.empty(), ErrorKind::invalid_argument, "must not be empty");
  return text;
}

void add_listening(CLI::App& command, server::HttpOptions& o) {
  const auto number = [&](const char* name, const char* help, auto& field, int64_t min,
                          int64_t max) {
    add_value(command, name, "N", help, [&field, min, max](const std::string& s) {
      field = static_cast<std::remove_reference_t<decltype(field)>>(parse_size(s, min, max));
    });
  };
  add_value(command, "--host", "ADDRESS", "where to listen (127.0.0.1: this machine alone)",
            [&o](const std::string& s) { o.host = not_empty(s); });
  add_value(command, "--port", "N", "TCP port; 0: any free one (8000)",
            [&o](const std::string& s) { o.port = static_cast<int>(parse_integer(s, 0, 65535)); });
  add_value(command, "--uds", "PATH", "a Unix socket, in place of --host and --port",
            [&o](const std::string& s) { o.uds = s; });
  const auto file = [&](const char* name, const char* help, std::string& field) {
    add_value(command, name, "FILE", help, [&field](const std::string& s) {
      // OpenSSL itself says no more than that there was an error.
      const bool is_readable = s.empty() || ::access(s.c_str(), R_OK) == 0;
      check(is_readable, ErrorKind::invalid_argument, "cannot be read: {}: {}", s,
            std::strerror(errno));
      field = s;
    });
  };
  file("--ssl-certfile", "certificate chain (PEM): HTTPS", o.ssl_certfile);
  file("--ssl-keyfile", "its private key (PEM)", o.ssl_keyfile);
  number("--max-connections", "open connections at most (16384)", o.max_connections, 1, 1 << 20);
  number("--h11-max-incomplete-event-size", "bytes of a request's head at most (16384)",
         o.max_header_bytes, 1024, 1 << 20);
  number("--max-body-bytes", "bytes of a request's body at most (32M)", o.max_body_bytes, 1024,
         int64_t{1} << 30);
  const auto seconds = [&](const char* name, const char* help, double& field) {
    add_value(command, name, "S", help, [&field](const std::string& s) {
      field = parse_number(s);
      check(field > 0 && field <= 86400, ErrorKind::invalid_argument,
            "must be above 0 and at most 86400 seconds, got {}", s);
    });
  };
  seconds("--header-timeout", "seconds for a request's head (10)", o.header_timeout);
  seconds("--body-timeout", "seconds without a byte of a body (30)", o.body_timeout);
  seconds("--timeout-keep-alive", "seconds that an idle connection stays open (75)",
          o.idle_timeout);
}

/// Whom the server serves, how many at once and how long.
void add_service(CLI::App& command, server::ServerOptions& o) {
  add_value(command, "--served-model-name", "NAME", "what clients call the model; repeatable",
            [&o](const std::string& s) { o.served_model_names.push_back(not_empty(s)); });
  add_value(command, "--api-key", "KEY", "clients must send one of these; repeatable",
            [&o](const std::string& s) { o.api_keys.push_back(not_empty(s)); });
  add_value(command, "--api-key-file", "FILE", "keys, one on a line", [&o](const std::string& s) {
    const size_t before = o.api_keys.size();
    add_parts(read_option_file(s, size_t{1} << 20), '\n', o.api_keys);
    check(o.api_keys.size() > before, ErrorKind::invalid_argument, "{} has no key in it", s);
  });
  add_value(command, "--allowed-origins", "ORIGIN",
            "web pages that may call this server, such as https://example.org; repeatable",
            [&o](const std::string& s) { o.allowed_origins.push_back(s); });
  add_value(command, "--max-num-queued-reqs", "N", "requests that may wait (512)",
            [&o](const std::string& s) { o.queue.max_num_queued_reqs = parse_integer(s, 1); });
  add_value(command, "--max-num-queued-tokens", "N", "prompt tokens that may wait (any number)",
            [&o](const std::string& s) { o.queue.max_num_queued_tokens = parse_size(s, 1); });
  const auto seconds = [&](const char* name, const char* help, double& field) {
    add_value(command, name, "S", help, [&field](const std::string& s) {
      field = parse_number(s);
      check(field >= 0 && field <= 86400, ErrorKind::invalid_argument,
            "must be from 0 to 86400 seconds, got {}", s);
    });
  };
  seconds("--shutdown-timeout", "seconds that requests have after SIGTERM (30)",
          o.shutdown_timeout);
  seconds("--request-timeout", "seconds that a request may take; 0: any (0)", o.request_timeout);
  seconds("--sse-keep-alive-interval", "seconds between comments on a stream; 0: none (15)",
          o.sse_keep_alive_interval);
  seconds("--watchdog-timeout",
          "seconds in one step that make /health 503, and at the end exit code 5; 0: any (300)",
          o.watchdog_timeout);
  add_value(command, "--max-reqs-per-key", "N",
            "requests of one key in work, where there are several keys (256)",
            [&o](const std::string& s) { o.max_reqs_per_key = parse_integer(s, 1); });
  add_value(command, "--root-path", "PATH", "where a proxy shows this server, such as /llm",
            [&o](const std::string& s) { o.root_path = read_root_path(s); });
  add_value(command, "--disable-access-log-for-endpoints", "PATHS",
            "no line for requests to these, such as /health,/metrics",
            [&o](const std::string& s) { add_parts(s, ',', o.unlogged_paths); });
  add_flag(command, "--metrics-without-key", o.metrics_without_key, "/metrics needs no API key");
}

/// How requests are read, and what their answers show.
void add_answers(CLI::App& command, server::ServerOptions& o) {
  add_flag(command, "--enable-prompt-tokens-details", o.enable_prompt_tokens_details,
           "usage tells how many prompt tokens were cached");
  add_flag(command, "--enable-force-include-usage", o.force_include_usage,
           "streams have their usage, in each chunk and at their end");
  add_template_kwargs(command, o.chat_template_kwargs, "--default-chat-template-kwargs");
  add_chat_template(command, o.chat_template, o.chat_template_place);
  add_flag(command, "--trust-request-chat-template", o.trust_request_chat_template,
           "requests may bring a chat_template of their own");
  add_tool_call_parser(command, o.tool_call_parser);
  add_reasoning_parser(command, o.reasoning_parser);
  add_flag(command, "--no-enforce-auto-tool-arguments", o.no_enforce_auto_tool_arguments,
           "calls that were not asked for may have invalid arguments");
  add_flag(command, "--reasoning-content", o.reasoning_content,
           "answers name reasoning reasoning_content");
}

/// Events and logs for the operator, and what may be asked of the server beside answers.
void add_operation(CLI::App& command, server::ServerOptions& o) {
  add_value(command, "--kv-events-config", "JSON",
            "events of the prefix cache for routers, with vLLM's fields (none)",
            [&o](const std::string& s) { o.engine.kv_events = read_kv_events_config(s, "JSON"); });
  add_flag(command, "--json-log", o.json_log, "notes and the line of a request are JSON");
  add_flag(command, "--keep-alive-on-engine-death", o.stays_after_failure,
           "a failed engine does not end the server: it answers 503");
  add_flag(command, "--no-page", o.no_page, "no web page at /");
  add_flag(command, "--enable-tokenizer-info-endpoint", o.enable_tokenizer_info,
           "/tokenizer_info, with the chat template");
  add_flag(command, "--enable-admin-endpoints", o.enable_admin,
           "/abort_requests and /reset_prefix_cache");
}

void add_accepted_flags(CLI::App& command, ServeOptions& o) {
  for (size_t i = 0; i < std::size(kAcceptedFlags); ++i)
    add_flag(command, kAcceptedFlags[i].name, o.accepted[i], "");
}

int serve(ServeOptions& options) {
  server::ServerOptions& o = options.server;
  require_model(o.model);
  if (const auto code = serve_as_other_rank(o.model, o.engine)) return *code;
  const bool is_local = server::is_loopback(o.http.host) || !o.http.uds.empty();
  if (!is_local && o.api_keys.empty())
    say(
        fmt::format("warning: {} is open to other machines and no --api-key is set: whoever "
                    "reaches it may use it\n",
                    o.http.host));
  o.version = kBuildInfo.version;
  o.commit = kBuildInfo.commit;
  o.give_up = [](const std::string& why) {
    say("error: " + why + "\n");
    std::_Exit(kExitEngine);
  };
  server::ServerLog log;
  log.note = [&](const std::string& line) {
    if (!options.quiet)
      say((o.json_log ? server::json_note(line) : "note: " + one_line(line)) + "\n");
  };
  log.request = [&](const std::string& line) {
    if (!options.quiet && !options.no_access_log) say(one_line(line) + "\n");
  };
  for (size_t i = 0; i < options.accepted.size(); ++i)
    if (options.accepted[i])
      log.note(fmt::format("{}: {}", kAcceptedFlags[i].name, kAcceptedFlags[i].why));
  server::serve(o, log);
  return kExitDone;
}

}  // namespace

void add_serve(CLI::App& program, Action& action) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App& command = add_command(program, "serve", "Serve a model over HTTP, as OpenAI's API");
  ServeOptions& o = *options;
  o.server.queue.max_num_queued_reqs = 512;
  add_model(command, o.server.model);
  add_listening(command, o.server.http);
  add_service(command, o.server);
  add_answers(command, o.server);
  add_operation(command, o.server);
  add_flag(command, "--quiet,-q", o.quiet, "no notes and no log on standard error");
  add_flag(command, "--disable-uvicorn-access-log,--no-access-log", o.no_access_log,
           "no line for each request");
  add_accepted_flags(command, o);
  add_generation_config(command, o.server.generation_config);
  add_engine_options(command, o.server.engine);
  set_action(command, action, [options] { return serve(*options); });
}

}  // namespace nanovllm::cli
