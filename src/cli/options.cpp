#include "cli/options.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include <CLI/CLI.hpp>

#include "core/check.h"
#include "core/limits.h"
#include "io/json.h"

namespace nanovllm::cli {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr int64_t kMostTokens = int64_t{1} << 31;
constexpr const char* kModelTwin = "NANOVLLM_MODEL";

/// Of a file or a pipe, such as the shell's <(command), whose writer is waited for.
std::string read_named(const std::string& path, size_t max_bytes) {
  std::error_code unknown;
  if (!std::filesystem::is_fifo(path, unknown)) return read_file(path, max_bytes);
  std::ifstream pipe(path, std::ios::binary);
  check(pipe.is_open(), ErrorKind::model, "{}: cannot be opened", path);
  std::string bytes(max_bytes + 1, '\0');
  pipe.read(bytes.data(), std::ssize(bytes));
  bytes.resize(static_cast<size_t>(pipe.gcount()));
  check(bytes.size() <= max_bytes, ErrorKind::model, "{}: more than the limit of {} bytes", path,
        max_bytes);
  return bytes;
}

std::string parse_device(const std::string& text) {
  if (text.starts_with("cuda:")) {
    const std::string index = text.substr(5);
    if (!index.empty() && index.size() <= 4 &&
        std::all_of(index.begin(), index.end(), [](char c) { return c >= '0' && c <= '9'; }))
      return text;
  }
  if (text == "auto" || text == "cpu" || text == "cuda") return text;
  fail(kBad, "must be auto, cpu, cuda or cuda:N, got {}", quote(text));
}

std::string parse_dtype(const std::string& text) {
  if (text == "bfloat16") return "bf16";
  if (text == "float32" || text == "float") return "f32";
  check(text != "float16" && text != "half", kBad,
        "must be one of auto, bf16, f32, got {}; f16 checkpoints run as bf16", quote(text));
  return one_of(text, {"auto", "bf16", "f32"});
}

int parse_block_size(const std::string& text) {
  const int64_t size = [&]() -> int64_t {
    try {
      return parse_integer(text, 8, 256);
    } catch (const Error&) {
      return 0;
    }
  }();
  check(size > 0 && std::has_single_bit(static_cast<uint64_t>(size)), kBad,
        "must be a power of two from 8 to 256, got {}", quote(text));
  return static_cast<int>(size);
}

double parse_share(const std::string& text) {
  const double value = parse_number(text);
  check(value > 0 && value <= 1, kBad, "must be in (0, 1], got {}", text);
  return value;
}

// " (NANOVLLM_MAX_TOKENS)" where the option's value may come from there.
std::string twin_with(const CLI::Option& option, const std::string& value) {
  const char* twin = std::getenv(option.get_envname().c_str());
  return twin && twin == value ? " (" + option.get_envname() + ")" : "";
}

}  // namespace

std::string one_of(const std::string& text, std::initializer_list<const char*> choices) {
  std::string list;
  for (const char* choice : choices) {
    if (text == choice) return text;
    list += list.empty() ? choice : std::string(", ") + choice;
  }
  fail(kBad, "must be one of {}, got {}", list, quote(text));
}

CLI::App& add_command(CLI::App& parent, const std::string& name, const std::string& help) {
  CLI::App& command = *parent.add_subcommand(name, help);
  if (help.empty()) command.group("");
  return command;
}

void set_action(CLI::App& command, Action& action, Action run) {
  command.callback([&action, run = std::move(run)] { action = run; });
}

int64_t parse_integer(std::string_view text, int64_t min, int64_t max) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (whole && value >= min && value <= max) return value;
  if (max == std::numeric_limits<int64_t>::max() && error != std::errc::result_out_of_range)
    fail(kBad, "must be an integer of at least {}, got {}", min, quote(text));
  fail(kBad, "must be an integer from {} to {}, got {}", min, max, quote(text));
}

int64_t parse_size(std::string_view text, int64_t min, int64_t max) {
  constexpr std::string_view kDecimal = "kmgt", kBinary = "KMGT";
  std::string_view digits = text;
  for (const std::string_view end : {"iB", "i"})
    if (digits.ends_with(end)) digits.remove_suffix(end.size());
  const bool has_suffix = digits.size() > 1;
  const size_t decimal = has_suffix ? kDecimal.find(digits.back()) : kDecimal.npos;
  const size_t binary = has_suffix ? kBinary.find(digits.back()) : kBinary.npos;
  int64_t unit = 1;
  for (size_t i = 0; decimal != kDecimal.npos && i <= decimal; ++i) unit *= 1000;
  for (size_t i = 0; binary != kBinary.npos && i <= binary; ++i) unit *= 1024;
  if (unit == 1 || (digits.size() < text.size() && binary == kBinary.npos))
    return parse_integer(text, min, max);
  digits.remove_suffix(1);
  int64_t value = 0, size = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = error == std::errc() && end == digits.data() + digits.size() &&
                     !__builtin_mul_overflow(value, unit, &size);
  check(whole && size >= min && size <= max, kBad,
        "must be from {} to {}, as 4096, 4K or 4G, got {}", min, max, quote(text));
  return size;
}

double parse_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error == std::errc() && end == text.data() + text.size() && !text.empty(), kBad,
        "must be a number, got {}", quote(text));
  return value;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
    end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
  }
  return parts;
}

std::vector<int64_t> parse_integers(std::string_view text, int64_t min, int64_t max) {
  std::vector<int64_t> values;
  for (const std::string& part : split(text, ',')) values.push_back(parse_integer(part, min, max));
  return values;
}

CLI::Option* add_value(CLI::App& command, const std::string& names, const std::string& type,
                       const std::string& help, std::function<void(const std::string&)> set) {
  // The name that messages use: the first long one.
  const std::string name = names.substr(0, names.find(','));
  CLI::Option* option = command.add_option(
      names, CLI::callback_t([&command, name, set = std::move(set)](const auto& values) {
        for (const std::string& value : values) {
          try {
            set(value);
          } catch (const Error& error) {
            const std::string twin = twin_with(*command.get_option(name), value);
            throw Error(error.kind(), name + twin + " " + error.what());
          }
        }
        return true;
      }),
      help);
  // One value for each use, and a text in brackets stays a text.
  option->type_name(type)->expected(1)->allow_extra_args(false);
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  return option;
}

std::string read_option_file(const std::string& path, size_t max_bytes) {
  try {
    std::string text = read_named(path, max_bytes);
    check(!text.empty(), ErrorKind::model, "{} is empty", path);
    return text;
  } catch (const Error& error) {
    fail(ErrorKind::invalid_argument, "cannot be read: {}", error.what());
  }
}

std::string read_file_of(const char* option, const std::string& path, size_t max_bytes) {
  try {
    return read_named(path, max_bytes);
  } catch (const Error& error) {  // here it is an option that is wrong, not a model
    fail(ErrorKind::invalid_argument, "{} {}", option, error.what());
  }
}

CLI::Option* add_flag(CLI::App& command, const std::string& names, bool& value,
                      const std::string& help) {
  CLI::Option* flag = command.add_flag(names, value, help);
  return help.empty() ? flag->group("") : flag;
}

CLI::Option* add_argument(CLI::App& command, const std::string& names, const std::string& help,
                          std::function<void(const std::string&)> set) {
  const auto take = [set = std::move(set)](const CLI::results_t& values) {
    set(values.back());
    return true;
  };
  return command.add_option(names, CLI::callback_t(take), help)->type_name("")->expected(1);
}

void name_environment_twins(CLI::App& command) {
  static const std::set<std::string> kNoTwin = {"help",   "version", "prompt", "input",
                                                "output", "json",    "file",   "ids",
                                                "show",   "tools",   "text",   "format"};
  for (CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty() || !option->get_envname().empty()) continue;
    std::string name = option->get_lnames().front();
    if (kNoTwin.contains(name) || option->get_group().empty()) continue;
    for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
    option->envname("NANOVLLM_" + name);
  }
}

void check_flags(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    if (option->get_items_expected_max() != 0 || option->get_lnames().empty()) continue;
    option->check(CLI::Validator(
        [option](const std::string& value) {
          try {
            (void)CLI::detail::to_flag_value(value);
          } catch (const std::logic_error&) {  // no number, or too large a one
            fail(kBad, "--{}{} must be 1 or 0, got {}", option->get_lnames().front(),
                 twin_with(*option, value), quote(value));
          }
          return std::string();
        },
        ""));
  }
}

void add_model(CLI::App& command, std::string& model) {
  add_argument(command, "MODEL,--model,-m",
               "Hugging Face model directory, or ORG/NAME of a model in Hugging Face's cache",
               [&model](const std::string& s) { model = find_model(s); })
      ->envname(kModelTwin);
}

void require_model(const std::string& model) {
  check(!model.empty(), kBad,
        "MODEL is missing: give a Hugging Face model directory, such as models/demo");
}

void add_model_and_text(CLI::App& command, std::string& model, std::optional<std::string>& text,
                        const char* name, const char* help) {
  add_argument(command, "MODEL,--model,-m",
               "Hugging Face model directory, or ORG/NAME of a model in Hugging Face's cache",
               [&model](const std::string& s) { model = s; })
      ->envname(kModelTwin);
  add_argument(command, name, help, [&text](const std::string& s) { text = s; });
}

void settle_model(std::string& model, std::optional<std::string>& text) {
  const char* twin = std::getenv(kModelTwin);
  if (twin && *twin && !text && model != twin) {
    std::error_code error;
    try {
      if (!std::filesystem::exists(find_model(model), error)) std::swap(text.emplace(twin), model);
    } catch (const Error&) {  // it looks like a name of a model's, but there is none
      std::swap(text.emplace(twin), model);
    }
  }
  require_model(model);
  model = find_model(model);
}

void add_engine_options(CLI::App& command, EngineConfig& c) {
  const std::string group = "Engine";
  const auto value = [&](const char* names, const char* type, const char* help, auto set) {
    add_value(command, names, type, help, set)->group(group);
  };
  value("--device", "auto|cpu|cuda", "or cuda:N, GPU N (auto: a GPU if there is one)",
        [&c](const std::string& s) { c.device = parse_device(s); });
  value("--dtype", "auto|bf16|f32", "auto: the checkpoint's",
        [&c](const std::string& s) { c.dtype = parse_dtype(s); });
  value("--kv-cache-dtype", "auto|bfloat16|fp8",
        "of keys and values; fp8: half the bytes (auto: the checkpoint's, else that of --dtype)",
        [&c](const std::string& s) {
          c.kv_cache_dtype = one_of(s, {"auto", "bfloat16", "fp8", "fp8_e4m3"});
        });
  value(
      "--max-model-len", "N|auto",
      "tokens of prompt and output together; auto: all that model and KV cache take (4096, or the "
      "model's limit)",
      [&c](const std::string& s) {
        c.max_model_len = s == "auto" || s == "-1" ? -1 : parse_size(s, 1, kMostTokens);
      });
  value("--max-num-seqs", "N", "sequences running at once (256)",
        [&c](const std::string& s) { c.max_num_seqs = parse_integer(s, 1, kMaxNumSeqs); });
  value("--scheduling-policy", "fcfs|priority",
        "priority: requests with a lower priority field are served earlier (fcfs)",
        [&c](const std::string& s) {
          c.scheduling_policy = one_of(s, {"fcfs", "priority"});
        });
  value("--max-num-batched-tokens", "N", "tokens in one step (GPU 8192, CPU 512)",
        [&c](const std::string& s) {
          c.max_num_batched_tokens = parse_size(s, 1, kMaxNumBatchedTokens);
        });
  value("--gpu-memory-utilization", "SHARE", "of the GPU's memory, in (0, 1] (0.9)",
        [&c](const std::string& s) { c.gpu_memory_utilization = parse_share(s); });
  value(
      "--num-gpu-blocks-override", "N", "KV blocks, instead of what memory allows",
      [&c](const std::string& s) { c.num_gpu_blocks_override = parse_integer(s, 1, kMostTokens); });
  value("--cpu-kvcache-bytes", "N",
        "KV cache of the CPU, in bytes, as 6G (as needed, 4 GiB at most)",
        [&c](const std::string& s) { c.cpu_kvcache_bytes = parse_size(s, 1); });
  value("--block-size", "N", "tokens in a KV block: a power of two from 8 to 256 (64)",
        [&c](const std::string& s) { c.block_size = parse_block_size(s); });
  value(
      "--tensor-parallel-size", "N",
      "ranks to split the model over: GPUs from --device on, or shares of the CPU (1); also -tp",
      [&c](const std::string& s) { c.tensor_parallel_size = int(parse_integer(s, 1, kMaxRanks)); });
  value("--threads,-t", "N",
        "CPU threads, of all ranks together (OMP_NUM_THREADS, or the physical cores)",
        [&c](const std::string& s) {
          c.num_threads = static_cast<int>(parse_integer(s, 1, kMaxThreads));
        });
  value("--decode-micro-batches", "N",
        "parts of a decode step that run side by side on a GPU, 1 or 2 (as many as pay)",
        [&c](const std::string& s) {
          c.decode_micro_batches = static_cast<int>(parse_integer(s, 1, 2));
        });
  value("--seed", "N", "of all requests that bring no seed of their own (0)",
        [&c](const std::string& s) {
          c.seed = static_cast<uint64_t>(parse_integer(s, std::numeric_limits<int64_t>::min()));
        });
  value("--load-format", "auto|dummy", "dummy: random weights from config.json alone",
        [&c](const std::string& s) {
          c.load_format = one_of(s, {"auto", "dummy"});
        });
  value("--quantization", "auto|fp8|int8|int4|w4a8",
        "quantise a plain checkpoint's linear layers while they are loaded and, but for int4, "
        "their activations (auto: as it is)",
        [&c](const std::string& s) { c.quantization = s; });
  const auto flag = [&](const char* names, bool& field, const char* help) {
    add_flag(command, names, field, help)->group(group);
  };
  flag("--dequantize", c.dequantize,
       "keep quantised weights in the model's dtype: more memory, faster over prompts");
  flag("--enable-prefix-caching,!--no-enable-prefix-caching", c.enable_prefix_caching,
       "reuse the KV cache of shared prefixes (on)");
  flag("--allow-long-max-model-len", c.allow_long_max_model_len,
       "let --max-model-len be beyond the model's own limit");
  flag("--enforce-eager", c.enforce_eager, "no CUDA graphs");
  flag("--skip-tokenizer-init", c.skip_tokenizer_init, "token ids in, token ids out");
  flag("--parse-special-in-messages", c.parse_special_in_messages,
       "text of control tokens in messages becomes the tokens, whoever wrote it");
}

}  // namespace nanovllm::cli
