// nanovllm completion: what bash, zsh and fish need to complete the program's command lines.
#include <memory>

#include <fmt/format.h>

#include "cli/about/command_tree.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/terminal/output.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

/// Kinds of an option's values, or of an argument.
enum class Values { none, files, directories, choices };

Values values_of(const OptionFacts& option) {
  if (!option.choices.empty()) return Values::choices;
  if (option.value == "FILE") return Values::files;
  if (option.value == "DIRECTORY" || option.argument == "MODEL") return Values::directories;
  return Values::none;
}

/// The option of a command's first argument without a name; null if there is none.
const OptionFacts* first_argument(const CommandFacts& command) {
  for (const OptionFacts& option : command.options)
    if (!option.argument.empty()) return &option;
  return nullptr;
}

/// "'text'", as all three shells read it.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

/// "/bench/latency", which the scripts tell commands by.
std::string key(const CommandFacts& command) {
  std::string text = "/" + command.path;
  for (char& c : text)
    if (c == ' ') c = '/';
  return text;
}

// -- bash

std::string bash_values(const OptionFacts& option) {
  switch (values_of(option)) {
    case Values::files:
      return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")";
    case Values::directories:
      return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$cur\")";
    case Values::choices:
      return fmt::format("mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$cur\")",
                         fmt::join(option.choices, " "));
    case Values::none:
      break;
  }
  return "true";
}

std::string bash_command(const CommandFacts& command) {
  std::string values, words,
      anything = "-";  // after the names in `anything` nothing can be proposed
  for (const OptionFacts& option : command.options) {
    for (const std::string& name : option.names) words += name + " ";
    if (option.value.empty() || option.names.empty()) continue;
    const std::string names = fmt::format("{}", fmt::join(option.names, "|"));
    if (values_of(option) == Values::none)
      anything += "|" + names;
    else
      values += fmt::format("        {}) {}; return ;;\n", names, bash_values(option));
  }
  std::string others = "true";
  if (!command.commands.empty()) {
    others = "mapfile -t COMPREPLY < <(compgen -W '";
    for (const CommandFacts& sub : command.commands) others += sub.name() + " ";
    others += "' -- \"$cur\")";
  } else if (const OptionFacts* argument = first_argument(command)) {
    others = bash_values(*argument);
  }
  return fmt::format(R"(    {})
      case $prev in
{}        {}) return ;;
      esac
      if [[ $cur == -* ]]; then mapfile -t COMPREPLY < <(compgen -W '{}' -- "$cur"); return; fi
      {} ;;
)",
                     key(command), values, anything, words, others);
}

/// Lines of a `case` that goes from a command to one below it.
std::string bash_descent(const CommandFacts& program) {
  std::string lines;
  for (const CommandFacts* command : all_commands(program))
    for (const CommandFacts& sub : command->commands)
      lines += fmt::format("      '{} {}') at={} ;;\n", key(*command), sub.name(), key(sub));
  return lines;
}

std::string bash(const CommandFacts& program) {
  std::string cases;
  for (const CommandFacts* command : all_commands(program)) cases += bash_command(*command);
  return fmt::format(R"(# bash completion of nanovllm, by `nanovllm completion bash`
_nanovllm() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} at=/ i
  COMPREPLY=()
  # bash takes "--device=cpu" for three words.
  if [[ $cur == "=" ]]; then cur=; elif [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$at ${{COMP_WORDS[i]}}" in
{}    esac
  done
  case $at in
{}  esac
}}
complete -F _nanovllm nanovllm
)",
                     bash_descent(program), cases);
}

// -- zsh

/// Text between brackets or colons of an _arguments specification.
std::string zsh_text(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_values(const OptionFacts& option) {
  switch (values_of(option)) {
    case Values::files:
      return "_files";
    case Values::directories:
      return "_files -/";
    case Values::choices:
      return fmt::format("({})", fmt::join(option.choices, " "));
    case Values::none:
      break;
  }
  return " ";
}

std::string zsh_options(const CommandFacts& command) {
  std::string specifications;
  for (const OptionFacts& option : command.options)
    for (const std::string& name : option.names) {
      const bool is_long = name.starts_with("--"), is_flag = option.value.empty();
      std::string text = "*" + name + (is_flag ? "" : is_long ? "=" : "+");
      text += "[" + zsh_text(option.help) + "]";
      if (!is_flag) text += ":" + zsh_text(option.value) + ":" + zsh_values(option);
      specifications += " \\\n        " + quoted(text);
    }
  return specifications;
}

std::string zsh_command(const CommandFacts& command) {
  std::string text =
      fmt::format("    {})\n      _arguments -C{}", key(command), zsh_options(command));
  if (command.commands.empty()) {
    for (const OptionFacts& option : command.options)
      if (!option.argument.empty())
        text +=
            " \\\n        " + quoted(fmt::format("::{}:{}", option.argument, zsh_values(option)));
    return text + " ;;\n";
  }
  text += " \\\n        '1:command:->command' '*::argument:->arguments'\n";
  text += "      if [[ $state == command ]]; then\n        commands=(";
  for (const CommandFacts& sub : command.commands)
    text += "\n          " + quoted(sub.name() + ":" + sub.help);
  text += ")\n        _describe command commands\n";
  const std::string above = command.path.empty() ? "" : key(command);
  return text + fmt::format(
                    "      elif [[ $state == arguments ]]; then\n"
                    "        _nanovllm_at {}/$words[1]\n      fi ;;\n",
                    above);
}

std::string zsh(const CommandFacts& program) {
  std::string cases;
  for (const CommandFacts* command : all_commands(program)) cases += zsh_command(*command);
  return fmt::format(R"(#compdef nanovllm
# zsh completion of nanovllm, by `nanovllm completion zsh`
_nanovllm_at() {{
  local context state line
  local -a commands
  case $1 in
{}  esac
}}
_nanovllm() {{ _nanovllm_at / }}
if [[ $funcstack[1] == _nanovllm ]]; then _nanovllm; else compdef _nanovllm nanovllm; fi
)",
                     cases);
}

// -- fish

std::string fish_values(const OptionFacts& option) {
  switch (values_of(option)) {
    case Values::files:
      return " -r -F";
    case Values::directories:
      return " -x -a '(__fish_complete_directories)'";
    case Values::choices:
      return fmt::format(" -x -a {}", quoted(fmt::format("{}", fmt::join(option.choices, " "))));
    case Values::none:
      break;
  }
  return option.value.empty() ? "" : " -x";
}

std::string fish_command(const CommandFacts& command) {
  const std::string prefix =
      fmt::format("complete -c nanovllm -n 'test (__nanovllm_at) = {}'", key(command));
  std::string text;
  for (const CommandFacts& sub : command.commands)
    text += fmt::format("{} -a {} -d {}\n", prefix, sub.name(), quoted(sub.help));
  for (const OptionFacts& option : command.options) {
    std::string names;
    for (const std::string& name : option.names)
      names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (!names.empty())
      text += prefix + names + fish_values(option) + " -d " + quoted(option.help) + "\n";
    if (!option.argument.empty() && values_of(option) == Values::directories)
      text += prefix + " -a '(__fish_complete_directories)'\n";
  }
  return text;
}

std::string fish(const CommandFacts& program) {
  std::string descent, commands;
  for (const CommandFacts* command : all_commands(program)) {
    for (const CommandFacts& sub : command->commands)
      descent += fmt::format("      case '{} {}'\n        set at {}\n", key(*command), sub.name(),
                             key(sub));
    commands += fish_command(*command);
  }
  return fmt::format(R"(# fish completion of nanovllm, by `nanovllm completion fish`
function __nanovllm_at
  set -l at /
  for word in (commandline -opc)
    switch "$at $word"
{}    end
  end
  echo $at
end
complete -c nanovllm -f
{})",
                     descent, commands);
}

int run_completion(const CLI::App& program, const std::string& shell) {
  const CommandFacts tree = command_tree(program);
  const bool known = shell == "bash" || shell == "zsh" || shell == "fish";
  check(known, ErrorKind::invalid_argument, "SHELL must be one of bash, zsh, fish, got {}",
        quote(shell));
  Output output;
  output.write(shell == "bash" ? bash(tree) : shell == "zsh" ? zsh(tree) : fish(tree));
  output.close();
  return kExitDone;
}

}  // namespace

void add_completion(CLI::App& program, Action& action) {
  auto shell = std::make_shared<std::string>();
  CLI::App& command = add_command(program, "completion", "");
  add_argument(command, "SHELL", "bash, zsh or fish",
               [shell](const std::string& s) { *shell = s; });
  set_action(command, action, [&program, shell] { return run_completion(program, *shell); });
}

}  // namespace nanovllm::cli
