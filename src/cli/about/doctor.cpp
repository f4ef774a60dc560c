// nanovllm doctor: what this machine has for the engine, what is missing and what to do about it,
// and what would be used.
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "api/find_model.h"
#include "cli/about/build_info.h"
#include "cli/about/findings.h"
#include "cli/about/version.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/inspect.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"

namespace nanovllm::cli {
namespace {

namespace fs = std::filesystem;

struct DoctorOptions {
  std::string model;
  EngineConfig engine;
  bool json = false;
};

/// The engine's choices: the device, and the plan of a model if one was given.
struct Choice {
  std::string device{};
  std::optional<EngineInfo> model{};
  std::optional<Error> error{};
};

Choice choose(const DoctorOptions& options) {
  Choice choice;
  try {
    if (options.model.empty()) {
      choice.device = choose_device(options.engine);
    } else {
      choice.model = nanovllm::inspect(options.model, options.engine);
      choice.device = choice.model->device;
    }
  } catch (const Error& error) {
    choice.error = error;
  }
  return choice;
}

/// Entries of a folder whose names begin with `prefix`; 0 where there is no such folder.
int64_t count_entries(const fs::path& folder, std::string_view prefix) {
  std::error_code error;
  int64_t count = 0;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    count += at->path().filename().string().starts_with(prefix);
  return count;
}

Finding caches_finding() {
  const fs::path models = hub_cache();
  return {.name = "models",
          .text = fmt::format("{} in Hugging Face's cache, {}", count_entries(models, "models--"),
                              models.string())};
}

/// Words in lines of `width` characters, those after the first behind `indent` spaces.
std::string wrapped(const std::string& text, size_t indent, size_t width) {
  std::istringstream words(text);
  std::string result;
  size_t column = indent;
  for (std::string word; words >> word; column += word.size()) {
    if (result.empty()) {
    } else if (column + 1 + word.size() > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else {
      result += ' ';
      ++column;
    }
    result += word;
  }
  return result;
}

constexpr size_t kWidth = 80, kIndent = 18;

std::string line(const std::string& mark, const std::string& name, const std::string& text) {
  return fmt::format("{:<6}{:<12}{}\n", mark, name, wrapped(text, kIndent, kWidth));
}

std::string describe(const Finding& finding) {
  const char* marks[] = {"ok", "--", "FAULT"};
  std::string text = line(marks[static_cast<int>(finding.status)], finding.name, finding.text);
  if (!finding.remedy.empty()) text += line("", "", "-> " + finding.remedy);
  return text;
}

std::string describe(const Choice& choice) {
  if (choice.error) return line("FAULT", "would use", choice.error->what());
  std::string text = line("", "would use", choice.device);
  if (!choice.model) return text;
  const EngineInfo& i = *choice.model;
  const auto size = [](int64_t bytes) { return binary_size(bytes); };
  text += line(
      "", "model",
      fmt::format("{}, {} parameters in {}{}", i.architecture, with_commas(i.num_parameters),
                  i.dtype, i.ranks.size() > 1 ? fmt::format(", {} ranks", i.ranks.size()) : ""));
  text += line("", "its memory",
               fmt::format("weights {}, workspace {}, KV cache {}; together {} of {}",
                           size(i.weight_bytes), size(i.workspace_bytes), size(i.kv_cache_bytes),
                           size(i.weight_bytes + i.workspace_bytes + i.kv_cache_bytes),
                           size(i.available_bytes)));
  return text +
         line("", "what fits",
              fmt::format("{} sequences of {} tokens at once; {} tokens in all",
                          with_commas(fitting_sequences(i, i.max_model_len)),
                          with_commas(i.max_model_len), with_commas(i.num_blocks * i.block_size)));
}

Json to_json(const SystemFacts& facts, const std::vector<Finding>& list, const Choice& choice) {
  Json json;
  json["version"] = {{"version", kBuildInfo.version},
                     {"commit", kBuildInfo.commit},
                     {"compiler", kBuildInfo.compiler},
                     {"build_type", kBuildInfo.build_type}};
  const CpuFacts& cpu = facts.cpu;
  json["cpu"] = {{"model", cpu.model},
                 {"features", cpu.features},
                 {"processors", cpu.processors},
                 {"threads", cpu.threads},
                 {"l3", cpu.l3_bytes}};
  json["memory"] = {{"total", cpu.total_bytes}, {"free", cpu.free_bytes}};
  json["driver"] = {{"release", facts.driver.release},
                    {"cuda", cuda_version(facts.driver.cuda)},
                    {"peer_access", facts.driver.has_peer_access}};
  json["gpus"] = Json::array();
  for (size_t i = 0; i < facts.driver.gpus.size(); ++i) {
    const GpuFacts& gpu = facts.driver.gpus[i];
    json["gpus"].push_back({{"name", gpu.name},
                            {"compute_capability", gpu.capability / 10.0},
                            {"total", gpu.total_bytes}});
    if (i < facts.opened.size()) json["gpus"][i]["free"] = facts.opened[i].free_bytes;
  }
  const CudaModuleFacts& module = facts.module.facts;
  json["cuda_module"] = {{"path", facts.module.path},
                         {"cuda", cuda_version(module.toolkit)},
                         {"architectures", module.architectures.data()}};
  json["libraries"] = {{"oneDNN", facts.onednn},
                       {"cuBLASLt", library_version(module.cublaslt)},
                       {"NCCL", library_version(facts.nccl)},
                       {"MPI", facts.mpi}};
  json["findings"] = Json::array();
  for (const Finding& f : list)
    json["findings"].push_back({{"name", f.name},
                                {"status", to_string(f.status)},
                                {"text", f.text},
                                {"remedy", f.remedy}});
  if (choice.error)
    json["error"] = choice.error->what();
  else
    json["device"] = choice.device;
  if (choice.model) json["model"] = inspection_json(*choice.model);
  return json;
}

int run_doctor(const DoctorOptions& options) {
  const SystemFacts facts = ask_system(true);
  std::vector<Finding> list = findings(facts);
  list.push_back(caches_finding());
  const Choice choice = choose(options);
  Output output;
  if (options.json) {
    output.write(to_json(facts, list, choice).dump(2) + "\n");
  } else {
    output.write(version_line() + "\n\n");
    for (const Finding& finding : list) output.write(describe(finding));
    output.write("\n" + describe(choice));
  }
  output.close();
  return choice.error ? exit_code(choice.error->kind()) : kExitDone;
}

}  // namespace

void add_doctor(CLI::App& program, Action& action) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App& command = add_command(
      program, "doctor", "Show what this machine has, what is missing, and what would be used");
  add_model(command, options->model);
  add_flag(command, "--json", options->json, "print JSON");
  add_engine_options(command, options->engine);
  set_action(command, action, [options] { return run_doctor(*options); });
}

}  // namespace nanovllm::cli
