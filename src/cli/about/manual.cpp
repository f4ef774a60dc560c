// nanovllm man: the manual page nanovllm(1), from the program's own commands and options.
#include <algorithm>
#include <cctype>
#include <map>

#include <fmt/format.h>

#include "cli/about/build_info.h"
#include "cli/about/command_tree.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/terminal/output.h"

namespace nanovllm::cli {
namespace {

/// Text that roff takes as it stands.
std::string roff(const std::string& text) {
  std::string result = text.starts_with('.') || text.starts_with('\'') ? "\\&" : "";
  for (const char c : text)
    result += c == '\\' ? std::string("\\e") : c == '-' ? std::string("\\-") : std::string(1, c);
  return result;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string option_entry(const OptionFacts& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) names.push_back("\\fB" + roff(name) + "\\fR");
  std::string heading = fmt::format("{}", fmt::join(names, ", "));
  if (names.empty())
    heading = "\\fI" + roff(option.argument) + "\\fR";
  else if (!option.value.empty())
    heading += " \\fI" + roff(option.value) + "\\fR";
  return ".TP\n" + heading + "\n" + roff(option.help) + "\n";
}

bool is_help(const OptionFacts& option) {
  return std::find(option.names.begin(), option.names.end(), "--help") != option.names.end();
}

/// Groups of options that several commands share ("Engine", "Sampling"), said once.
struct SharedGroups {
  std::map<std::string, std::vector<OptionFacts>> options;
  std::map<std::string, std::vector<std::string>> commands;

  void add(const CommandFacts& command, const OptionFacts& option) {
    auto& list = options[option.group];
    if (std::none_of(list.begin(), list.end(),
                     [&](const OptionFacts& o) { return o.names == option.names; }))
      list.push_back(option);
    auto& users = commands[option.group];
    if (users.empty() || users.back() != command.path) users.push_back(command.path);
  }
};

std::string command_section(const CommandFacts& command, SharedGroups& shared) {
  std::string synopsis = "\\fBnanovllm " + roff(command.path) + "\\fR";
  for (const OptionFacts& option : command.options)
    if (!option.argument.empty()) synopsis += " \\fI" + roff(option.argument) + "\\fR";
  std::string text = fmt::format(".SS {}\n{} [options]\n.PP\n{}.\n", roff(command.path), synopsis,
                                 roff(command.help));
  for (const OptionFacts& option : command.options) {
    if (is_help(option)) continue;
    if (option.group == "Options")
      text += option_entry(option);
    else
      shared.add(command, option);
  }
  return text;
}

std::string manual(const CommandFacts& program) {
  SharedGroups shared;
  std::string text = fmt::format(
      ".TH NANOVLLM 1 \"\" \"nanovllm {}\" \"User Commands\"\n.SH NAME\nnanovllm \\- {}\n"
      ".SH SYNOPSIS\n.B nanovllm\n.I COMMAND\n[\\fIMODEL\\fR] [options]\n"
      ".SH DESCRIPTION\n"
      "MODEL is a Hugging Face model directory (config.json, safetensors, tokenizer.json), or\n"
      "ORG/NAME of a model in Hugging Face's cache; nothing is downloaded. Results go to standard\n"
      "output, all else to standard error. Of an option that is given twice the last one counts,\n"
      "but for those marked repeatable.\n.SH COMMANDS\n",
      kBuildInfo.version, roff(program.help.substr(program.help.find(": ") + 2)));
  for (const CommandFacts* command : all_commands(program))
    if (command->commands.empty()) text += command_section(*command, shared);
  for (const auto& [group, options] : shared.options) {
    text += fmt::format(".SH {} OPTIONS\nOf {}.\n", upper(group),
                        fmt::join(shared.commands[group], ", "));
    for (const OptionFacts& option : options) text += option_entry(option);
  }
  text +=
      ".SH ENVIRONMENT\nEvery option has a twin there, which the command line overrides:\n"
      ".B \\-\\-max\\-model\\-len 2048\nis NANOVLLM_MAX_MODEL_LEN=2048; a flag takes 1 or 0.\n"
      "HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME say where Hugging Face's cache is,\n"
      "OMP_NUM_THREADS how many threads a CPU is to use.\n"
      ".SH EXIT STATUS\n";
  for (const auto& [code, meaning] :
       {std::pair{kExitDone, "done"},
        {kExitRequestsFailed,
         "some requests failed or were aborted, or results could not be written"},
        {kExitUsage, "wrong usage: an option, a file name, a missing argument"},
        {kExitModel, "the model cannot be loaded"},
        {kExitDevice, "no such device, or not enough memory"},
        {kExitEngine, "the engine failed while running"}})
    text += fmt::format(".TP\n.B {}\n{}\n", static_cast<int>(code), meaning);
  return text;
}

}  // namespace

void add_manual(CLI::App& program, Action& action) {
  CLI::App& command = add_command(program, "man", "");
  set_action(command, action, [&program] {
    Output output;
    output.write(manual(command_tree(program)));
    output.close();
    return static_cast<int>(kExitDone);
  });
}

}  // namespace nanovllm::cli
