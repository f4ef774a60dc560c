#include "cli/load_model.h"

#include <nlohmann/json.hpp>

#include "cli/exit_code.h"
#include "cli/terminal/interrupt.h"
#include "cli/terminal/output.h"
#include "comm/process_group.h"
#include "core/check.h"
#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm::cli {

void show_loading(EngineConfig& config, Progress& progress) {
  config.on_progress = [&progress](const char* what, int64_t done, int64_t total) {
    progress.loading(what, done, total);
  };
}

std::optional<int> serve_as_other_rank(const std::string& model, const EngineConfig& config) {
  if (process_place().rank == 0) return std::nullopt;
  const Interrupt interrupt;
  try {
    (void)serve_rank(model, config);
  } catch (const Error&) {
    if (!interrupt.requested()) throw;
    return kExitEngine;
  }
  return kExitDone;
}

LLM load_model(const std::string& model, EngineConfig config, Progress& progress, bool quiet) {
  show_loading(config, progress);
  LLM llm(model, config);
  progress.clear();
  if (!quiet)
    for (const std::string& note : llm.info().notes) say("note: " + one_line(note) + "\n");
  return llm;
}

void add_system(CLI::App& command, std::string& system, const char* help) {
  add_value(command, "--system", "TEXT", help, [&system](const std::string& s) {
    check(find_invalid_utf8(s) == std::string::npos, ErrorKind::invalid_argument,
          "must be valid UTF-8, got {}", quote(s));
    system = s;
  });
}

void add_template_kwargs(CLI::App& command, std::string& kwargs, const char* name) {
  add_value(
      command, name, "JSON", R"(variables for the chat template, as {"enable_thinking": false})",
      [&kwargs](const std::string& s) {
        bool is_object = false;
        try {
          is_object = parse_json(s, "", ErrorKind::invalid_argument).is_object();
        } catch (const Error&) {
        }
        check(is_object, ErrorKind::invalid_argument, "must be a JSON object, got {}", quote(s));
        kwargs = s;
      });
}

void add_chat_template(CLI::App& command, std::string& source, std::string& place) {
  add_value(command, "--chat-template", "FILE", "a chat template (Jinja) in place of the model's",
            [&source, &place](const std::string& s) {
              source = read_option_file(s, size_t{1} << 20);
              place = s;
            });
}

void add_generation_config(CLI::App& command, std::string& source) {
  add_value(command, "--generation-config", "auto|vllm",
            "sampling defaults: the model's generation_config.json (auto), or vLLM's",
            [&source](const std::string& s) {
              check(s == "auto" || s == "vllm", ErrorKind::invalid_argument,
                    "must be auto or vllm, got {}", quote(s));
              source = s;
            });
}

}  // namespace nanovllm::cli
