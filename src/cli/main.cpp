// The nanovllm program: reads the command line, runs one command, turns errors into a line and an
// exit code.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "nanovllm/error.h"

#include "cli/about/version.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/options.h"
#include "cli/suggest.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

// "--max_tokens=3" as "--max-tokens=3": vLLM takes both.
std::string with_dashes(std::string_view argument) {
  std::string text(argument);
  for (size_t i = 0; text.starts_with("--") && i < text.size() && text[i] != '='; ++i)
    if (text[i] == '_') text[i] = '-';
  return text;
}

// "help", "version" and "-V" as the first argument are options here. "help generate" is the help of
// generate.
std::vector<std::string> with_usual_words(int argc, char** argv) {
  std::vector<std::string> list(argv + 1, argv + argc);
  if (list.empty()) return list;
  if (list[0] == "version" || list[0] == "-V") list[0] = "--version";
  if (list[0] == "help") {
    list.erase(list.begin());
    list.emplace_back("--help");
  }
  return list;
}

// Arguments that CLI11 does not take as they stand: "-tp 2" and "-tp=2", vLLM's short name of two
// letters, "-ngl", llama.cpp's of three, which it would take for -n, names with underscores, and
// "--name=", an empty value. In reverse, as its parse() wants them.
std::vector<std::string> arguments(int argc, char** argv) {
  std::vector<std::string> list;
  bool all_text = false;  // behind "--"
  for (const std::string& given : with_usual_words(argc, argv)) {
    const std::string_view argument = given;
    const std::string_view previous = list.empty() ? std::string_view() : list.back();
    all_text = all_text || previous == "--";
    const bool is_text = all_text || previous == "--prompt" || previous == "-p" ||
                         previous == "--system" || previous == "--stop";
    if (is_text) {
      list.emplace_back(argument);
    } else if (argument.starts_with("-ngl")) {
      fail(ErrorKind::invalid_argument, "unknown option \"-ngl\"; {}", advice_on("-ngl"));
    } else if (argument == "-tp") {
      list.emplace_back("--tensor-parallel-size");
    } else if (argument.starts_with("-tp=")) {
      list.push_back("--tensor-parallel-size" + std::string(argument.substr(3)));
    } else if (argument.size() > 3 && argument.starts_with("--") &&
               argument.find('=') == argument.size() - 1) {
      list.push_back(with_dashes(argument.substr(0, argument.size() - 1)));
      list.emplace_back("");
    } else {
      list.push_back(with_dashes(argument));
    }
  }
  std::reverse(list.begin(), list.end());
  return list;
}

// "generate, chat, bench, tokenize, inspect"
std::vector<std::string> command_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands([](const CLI::App*) { return true; }))
    if (!sub->get_group().empty()) names.push_back(sub->get_name());
  return names;
}

// "nanovllm bench latency"
std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent ? full_name(*parent) + " " + command.get_name() : command.get_name();
}

[[noreturn]] void refuse_missing_command(const CLI::App& command) {
  for (const CLI::App* sub : command.get_subcommands()) refuse_missing_command(*sub);
  const std::string name = full_name(command);
  fail(ErrorKind::invalid_argument, "{} needs a command: {} (see {} --help)", name,
       fmt::join(command_names(command), ", "), name);
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_group().empty()) continue;
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// The first argument that no command knows, with the nearest name that there is.
void refuse_extras(const CLI::App& command) {
  for (const CLI::App* sub : command.get_subcommands()) refuse_extras(*sub);
  std::vector<std::string> extras = command.remaining();
  std::erase(extras, "--");  // what follows it has been taken as it is
  if (extras.empty()) return;
  constexpr auto kBad = ErrorKind::invalid_argument;
  const std::string name = extras[0].substr(0, extras[0].find('='));
  const std::string help = full_name(command) + " --help";
  const auto advice = [&](const std::vector<std::string>& candidates) {
    const std::string known = advice_on(name);
    return known.empty() ? did_you_mean(name, candidates) : "; " + known;
  };
  if (name.starts_with('-'))
    fail(kBad, "unknown option {}{} (see {})", quote(name), advice(option_names(command)), help);
  const std::vector<std::string> commands = command_names(command);
  if (!commands.empty())
    fail(kBad, "unknown command {}{} (see {})", quote(name), advice(commands), help);
  const bool takes_text =
      command.get_option_no_throw("PROMPT") || command.get_option_no_throw("TEXT");
  fail(kBad, "unexpected argument {}{} (see {})", quote(extras[0]),
       takes_text ? ": a text of several words needs quotes" : "", help);
}

// Help about a command that there is not is refused as the command is.
void refuse_unknown_command(const CLI::App& command) {
  for (const CLI::App* sub : command.get_subcommands()) return refuse_unknown_command(*sub);
  const std::vector<std::string> extras = command.remaining();
  if (!command_names(command).empty() && !extras.empty() && !extras[0].starts_with('-'))
    refuse_extras(command);
}

/// CLI11's help, whose names of flags that say no end in "{false}".
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    std::string name = CLI::Formatter::make_option_name(option, is_positional);
    return name.substr(0, name.find("{false}"));
  }
};

void prepare(CLI::App& command) {
  command.allow_extras();
  command.get_formatter()->column_width(36);
  name_environment_twins(command);
  check_flags(command);
  for (CLI::App* sub : command.get_subcommands([](CLI::App*) { return true; })) prepare(*sub);
}

// Kubernetes sets NANOVLLM_PORT=tcp://10.0.0.1:80 for a service of that name: no option's value.
void ignore_service_addresses() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (text.starts_with("NANOVLLM_") && text.substr(equals + 1).starts_with("tcp://"))
      names.emplace_back(text.substr(0, equals));
  }
  for (const std::string& name : names) {
    say(fmt::format("note: {} is ignored: its value is the address of a service\n", name));
    ::unsetenv(name.c_str());
  }
}

int run(int argc, char** argv) {
  ignore_service_addresses();
  CLI::App program("nano-vllm.cpp: a vLLM-class inference engine for Hugging Face models",
                   "nanovllm");
  program.formatter(std::make_shared<HelpFormatter>());
  program.set_version_flag("--version", version_text, "print the version");
  program.footer(
      "nanovllm chat Qwen/Qwen3-0.6B                     talk with a model of Hugging Face's "
      "cache\n"
      "nanovllm generate DIRECTORY \"The sky was\" -n 64    complete a text\n"
      "nanovllm generate DIRECTORY -i in.jsonl -o out.jsonl\n"
      "Exit codes: 0 done, 1 requests failed, 2 usage, 3 model, 4 device or memory, 5 engine");
  Action action;
  add_generate(program, action);
  add_chat(program, action);
  add_serve(program, action);
  add_top(program, action);
  add_bench(program, action);
  add_quantize(program, action);
  add_tokenize(program, action);
  add_inspect(program, action);
  add_doctor(program, action);
  add_completion(program, action);
  add_manual(program, action);
  prepare(program);
  try {
    program.parse(arguments(argc, argv));
  } catch (const CLI::Success& success) {  // --help, --version
    refuse_unknown_command(program);
    Output output;
    std::ostringstream text;
    const int code = program.exit(success, text, text);
    output.write(text.str());
    output.close();
    return code;
  } catch (const CLI::ParseError& error) {
    const bool two_models = std::string_view(error.what()).starts_with("--model: At Most 1");
    check(!two_models, ErrorKind::invalid_argument,
          "MODEL is given twice: as an argument or with --model, once");
    const std::string message = error.what();  // "--prompt: 1 required TEXT missing"
    check(!message.ends_with(" missing"), ErrorKind::invalid_argument, "{} needs a value",
          message.substr(0, message.find(':')));
    fail(ErrorKind::invalid_argument, "{}", error.what());
  }
  refuse_extras(program);
  if (!action) refuse_missing_command(program);
  return action();
}

// A standard descriptor that the caller has closed would be that of the next file to be opened, and
// notes would end up among the results. What takes its place fails as a closed one does.
void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF)
      (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

// Weights are read where they are mapped: behind the end of a file that somebody cuts meanwhile,
// and where a disk fails, that is a signal.
std::atomic_flag bus_error_met;

void on_bus_error(int, siginfo_t* info, void*) {
  constexpr std::string_view kMessage =
      "error: a mapped file, most likely one of the model's, was cut short or its disk failed "
      "while it was read: complete the download\n";
  if (info->si_code != BUS_ADRERR) {  // not by a mapping
    std::signal(SIGBUS, SIG_DFL);
    (void)::raise(SIGBUS);
    return;
  }
  while (bus_error_met.test_and_set()) ::pause();  // several threads read: one says it
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  ::_exit(kExitModel);
}

void explain_bus_errors() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

int report(const std::string& message, int code) {
  say(fmt::format("error: {}\n", with_option_names(message)));
  return code;
}

// A refusal of the system's, with the remedy where one is known.
int report(const std::system_error& error) {
  const bool no_threads = error.code() == std::errc::resource_unavailable_try_again;
  return report(no_threads ? "no more threads can be started: allow this user more processes "
                             "(ulimit -u), or give fewer --threads"
                           : error.what(),
                no_threads ? kExitDevice : kExitEngine);
}

int report_no_memory() {
  rlimit limit{};
  const bool limited = ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return report(limited ? fmt::format("out of memory: this process may have {} (ulimit -v)",
                                      binary_size(static_cast<int64_t>(limit.rlim_cur)))
                        : "out of memory",
                kExitDevice);
}

}  // namespace
}  // namespace nanovllm::cli

int main(int argc, char** argv) {
  using namespace nanovllm::cli;
  // A reader that has gone, and a file that may not grow, are errors of write(), with a message.
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
  occupy_standard_descriptors();
  explain_bus_errors();
  try {
    return run(argc, argv);
  } catch (const nanovllm::Error& error) {
    return report(error.what(), exit_code(error.kind()));
  } catch (const OutputError& error) {
    return report(error.what(), kExitRequestsFailed);
  } catch (const std::bad_alloc&) {
    return report_no_memory();
  } catch (const std::system_error& error) {
    return report(error);
  } catch (const std::exception& error) {
    return report(error.what(), kExitEngine);
  }
}
