#include "cli/about/command_tree.h"

#include <CLI/CLI.hpp>

#include "cli/options.h"

namespace nanovllm::cli {
namespace {

OptionFacts option_facts(const CLI::Option& option) {
  OptionFacts facts{.help = option.get_description(),
                    .group = option.get_group(),
                    .environment = option.get_envname()};
  for (const std::string& name : option.get_lnames()) facts.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) facts.names.push_back("-" + name);
  if (option.get_positional()) facts.argument = option.get_name(true, false);
  if (option.get_items_expected_max() > 0) {
    facts.value = option.get_type_name().empty() ? facts.argument : option.get_type_name();
    if (facts.value.find('|') != facts.value.npos) facts.choices = split(facts.value, '|');
  }
  return facts;
}

CommandFacts command_facts(const CLI::App& command, const std::string& path) {
  CommandFacts facts{.path = path, .help = command.get_description()};
  for (const CLI::Option* option : command.get_options())
    if (!option->get_group().empty()) facts.options.push_back(option_facts(*option));
  for (const CLI::App* sub : command.get_subcommands([](const CLI::App*) { return true; }))
    if (!sub->get_group().empty())
      facts.commands.push_back(
          command_facts(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name()));
  return facts;
}

}  // namespace

CommandFacts command_tree(const CLI::App& program) { return command_facts(program, ""); }

std::vector<const CommandFacts*> all_commands(const CommandFacts& program) {
  std::vector<const CommandFacts*> list = {&program};
  for (const CommandFacts& command : program.commands) {
    const auto below = all_commands(command);
    list.insert(list.end(), below.begin(), below.end());
  }
  return list;
}

}  // namespace nanovllm::cli
