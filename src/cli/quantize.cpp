// nanovllm quantize: writes a model anew, quantised.
#include "io/quantised/quantize.h"

#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/options.h"
#include "cli/terminal/interrupt.h"
#include "cli/terminal/output.h"
#include "cli/terminal/progress.h"
#include "core/check.h"
#include "models/model.h"

namespace nanovllm::cli {
namespace {

struct QuantizeOptions {
  std::string model, out, format;
  bool quiet = false;
};

struct Stopped {};

int run_quantize(const QuantizeOptions& options) {
  require_model(options.model);
  check(!options.out.empty(), ErrorKind::invalid_argument,
        "OUT is missing: give the name of the directory to write");
  check(!options.format.empty(), ErrorKind::invalid_argument,
        "--format is missing: give fp8, int8, int4 or w4a8");
  Progress progress(options.quiet);
  const Interrupt interrupt(kStopping);
  try {
    write_quantised(options.model, options.out, options.format, config_defaults,
                    [&](int64_t done, int64_t total) {
                      if (interrupt.requested()) throw Stopped();
                      progress.loading("quantising", done, total);
                    });
  } catch (const Stopped&) {
    progress.clear();
    say(fmt::format("error: stopped; {} was not written\n", options.out));
    return 128 + interrupt.signal();
  }
  progress.clear();
  return kExitDone;
}

}  // namespace

void add_quantize(CLI::App& program, Action& action) {
  auto options = std::make_shared<QuantizeOptions>();
  QuantizeOptions& o = *options;
  CLI::App& command =
      add_command(program, "quantize", "Write a model anew with its linear layers quantised");
  add_model(command, o.model);
  add_argument(command, "OUT", "the directory to write; it may not exist",
               [&o](const std::string& s) { o.out = s; });
  add_value(command, "--format", "fp8|int8|int4|w4a8", "the numbers of the weights",
            [&o](const std::string& s) {
              o.format = one_of(s, {"fp8", "int8", "int4", "w4a8"});
            });
  add_flag(command, "--quiet,-q", o.quiet, "no progress on standard error");
  set_action(command, action, [options] { return run_quantize(*options); });
}

}  // namespace nanovllm::cli
