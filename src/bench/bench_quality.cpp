// nanovllm bench quality: what quantising costs: a text under the model as it is and with its
// weights, keys and values quantised, compared over the whole vocabulary.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include "nanovllm/tokenizer.h"

#include "api/load_engine.h"
#include "bench/bench.h"
#include "cli/exit_code.h"
#include "cli/load_model.h"
#include "cli/options.h"
#include "cli/terminal/table.h"
#include "core/check.h"
#include "io/run_all.h"
#include "ops/forwarding_backend.h"

namespace nanovllm::cli {
namespace {

constexpr size_t kMostTextBytes = size_t{64} << 20;

struct QualityOptions {
  std::string model, json;
  std::optional<std::string> text;
  EngineConfig engine;
  int64_t context = 512, chunks = 0;
  bool quiet = false;
};

/// Notes the logits of all rows whose log probabilities are asked for.
class LogitsRecorder : public ForwardingBackend {
 public:
  LogitsRecorder(std::unique_ptr<Backend> ops, std::vector<float>& logits)
      : ForwardingBackend(std::move(ops)), logits_(logits) {}
  void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                    Tensor chosen) override {
    const size_t before = logits_.size();
    logits_.resize(before + static_cast<size_t>(logits.numel()));
    Tensor host = logits;
    host.data = reinterpret_cast<std::byte*>(logits_.data() + before);
    host.device = Device();
    ops_->copy(host, logits);
    ops_->synchronize();
    ops_->top_logprobs(ids, logprobs, ranks, logits, chosen);
  }

 private:
  std::vector<float>& logits_;
};

/// A model that is asked for logits.
class Scorer {
 public:
  Scorer(const QualityOptions& options, const std::string& quantization,
         const std::string& kv_cache_dtype, Progress& progress) {
    EngineConfig config = options.engine;
    config.quantization = quantization;
    config.kv_cache_dtype = kv_cache_dtype;
    config.skip_tokenizer_init = true;
    config.max_num_seqs = 1;
    config.max_model_len = options.context + 1;
    config.max_num_batched_tokens = std::max(config.max_num_batched_tokens, options.context);
    // Two models share the device: each takes what one sequence needs.
    config.num_gpu_blocks_override = options.context / config.block_size + 2;
    show_loading(config, progress);
    const auto start = std::chrono::steady_clock::now();
    loaded_ = load_engine(options.model, config, [this](std::unique_ptr<Backend> ops) {
      return std::make_unique<LogitsRecorder>(std::move(ops), logits_);
    });
    load_seconds = to_seconds(std::chrono::steady_clock::now() - start);
  }

  /// [ids.size() - 1, vocabulary]: those of each next token; valid until the next call.
  const float* logits(std::span<const int32_t> ids) {
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 1;
    params.prompt_logprobs = 0;
    params.detokenize = false;
    logits_.clear();
    const auto start = std::chrono::steady_clock::now();
    loaded_.engine->add_request({ids.begin(), ids.end()}, params);
    while (!loaded_.engine->is_finished())
      for (const RequestOutput& output : loaded_.engine->step())
        check(output.error.empty(), ErrorKind::engine, "{}", output.error);
    seconds += to_seconds(std::chrono::steady_clock::now() - start);
    tokens += std::ssize(ids);
    const auto vocabulary = static_cast<size_t>(info().vocab_size);
    check(logits_.size() == ids.size() * vocabulary, "logits of another number of rows");
    return logits_.data() + vocabulary;  // the first row is of the token that was sampled
  }
  const EngineInfo& info() const { return loaded_.info; }

  double load_seconds = 0, seconds = 0;
  int64_t tokens = 0;

 private:
  std::vector<float> logits_;
  LoadedEngine loaded_;
};

/// Both models' rows of logits beside the token that came.
struct Row {
  double reference_nll = 0, nll = 0, divergence = 0;
  bool same_top = false;
};

double log_sum_exp(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - most);
  return most + std::log(sum);
}

Row compare(std::span<const float> reference, std::span<const float> other, int32_t token) {
  const double p_sum = log_sum_exp(reference), q_sum = log_sum_exp(other);
  Row row;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double p = reference[i] - p_sum, q = other[i] - q_sum;
    row.divergence += std::exp(p) * (p - q);
  }
  const auto at = static_cast<size_t>(token);
  row.reference_nll = p_sum - reference[at];
  row.nll = q_sum - other[at];
  const auto top = [](std::span<const float> x) {
    return std::max_element(x.begin(), x.end()) - x.begin();
  };
  row.same_top = top(reference) == top(other);
  return row;
}

/// All rows of a window, on all cores.
void compare_window(std::span<const int32_t> ids, const float* reference, const float* other,
                    size_t vocabulary, std::vector<Row>& rows) {
  const size_t first = rows.size();
  rows.resize(first + ids.size() - 1);
  std::vector<std::function<void()>> work;
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    work.push_back([=, &rows] {
      rows[first + i] = compare({reference + i * vocabulary, vocabulary},
                                {other + i * vocabulary, vocabulary}, ids[i + 1]);
    });
  run_all(work);
}

/// Whether keys and values alone are quantised.
bool is_of_cache_alone(const EngineConfig& engine) {
  return engine.quantization == "auto" && engine.kv_cache_dtype != "auto";
}

/// Formats of weights. Throws where one is wrong, before anything is loaded, or where the model is
/// quantised already.
std::vector<std::string> formats_of(const QualityOptions& options) {
  EngineConfig engine = options.engine;
  const auto quantises = [&](const std::string& format) {
    engine.quantization = format;
    return !nanovllm::inspect(options.model, engine).quantization.empty();
  };
  std::vector<std::string> formats = split(engine.quantization, ',');
  if (is_of_cache_alone(engine)) {
    formats = {"auto"};
  } else {
    if (engine.quantization == "auto") formats = {"fp8", "int8", "int4", "w4a8"};
    for (const std::string& format : formats)
      check(format != "auto" && quantises(format), ErrorKind::invalid_argument,
            "quantization is {}: give fp8, int8, int4 or w4a8", quote(format));
  }
  check(!quantises("auto"), ErrorKind::invalid_argument,
        "{} is quantised already: give the model that it was made of", options.model);
  return formats;
}

std::vector<int32_t> tokens_of(const QualityOptions& options) {
  check(options.text.has_value(), ErrorKind::invalid_argument,
        "--text is missing: give a file of text");
  const std::string text = read_file_of("--text", *options.text, kMostTextBytes);
  std::vector<int32_t> ids = Tokenizer(options.model).encode(text);
  if (options.chunks > 0)
    ids.resize(std::min(ids.size(), static_cast<size_t>(options.chunks * options.context)));
  check(ids.size() > 1, ErrorKind::invalid_argument, "--text {} has no two tokens", *options.text);
  return ids;
}

/// The rows of a text's windows; the models see each window by itself.
std::vector<Row> compare_text(Scorer& reference, Scorer& other, std::span<const int32_t> ids,
                              size_t context, const std::function<void(size_t)>& progress) {
  std::vector<Row> rows;
  for (size_t i = 0; i + 1 < ids.size(); i += context) {
    progress(i);
    const auto window = ids.subspan(i, std::min(context, ids.size() - i));
    if (window.size() < 2) break;
    const float* p = reference.logits(window);
    compare_window(window, p, other.logits(window),
                   static_cast<size_t>(reference.info().vocab_size), rows);
  }
  return rows;
}

Json row_of(const Scorer& scorer, const std::string& name, double nll) {
  return {{"weights", name},
          {"perplexity", std::exp(nll)},
          {"weight_bytes", scorer.info().weight_bytes},
          {"load_seconds", scorer.load_seconds},
          {"tokens_per_second", double(scorer.tokens) / scorer.seconds}};
}

Json row_of(const Scorer& scorer, const std::string& name, const std::vector<Row>& rows) {
  double nll = 0, divergence = 0, same = 0;
  std::vector<double> divergences;
  for (const Row& row : rows) {
    nll += row.nll;
    divergence += row.divergence;
    same += row.same_top ? 1 : 0;
    divergences.push_back(row.divergence);
  }
  const auto count = static_cast<double>(rows.size());
  Json json = row_of(scorer, name, nll / count);
  json["kl_divergence"] = divergence / count;
  json["kl_divergence_p99"] = quantile(divergences, 0.99);
  json["same_top_token"] = same / count;
  return json;
}

std::string table_of(const Json& rows) {
  Table table({"weights", "perplexity", "KL, nats", "99 % below", "same top token", "memory",
               "start, s", "prompt tokens/s"});
  for (const Json& row : rows) {
    const auto number = [&](const char* key) { return row.at(key).get<double>(); };
    const bool is_reference = !row.contains("kl_divergence");
    table.add({row.at("weights").get<std::string>(), fmt::format("{:.4f}", number("perplexity")),
               is_reference ? "-" : fmt::format("{:.5f}", number("kl_divergence")),
               is_reference ? "-" : fmt::format("{:.4f}", number("kl_divergence_p99")),
               is_reference ? "-" : fmt::format("{:.2f} %", 100 * number("same_top_token")),
               binary_size(row.at("weight_bytes").get<int64_t>()),
               fmt::format("{:.2f}", number("load_seconds")),
               fmt::format("{:.0f}", number("tokens_per_second"))});
  }
  return table.markdown();
}

int bench_quality(const QualityOptions& options) {
  require_model(options.model);
  check(options.engine.tensor_parallel_size == 1, ErrorKind::invalid_argument,
        "tensor_parallel_size is {}: this benchmark has one rank",
        options.engine.tensor_parallel_size);
  const std::vector<std::string> formats = formats_of(options);
  const std::vector<int32_t> ids = tokens_of(options);
  std::optional<Output> file;
  if (!options.json.empty() && options.json != "-") {
    std::error_code other;
    check(!std::filesystem::equivalent(*options.text, options.json, other),
          ErrorKind::invalid_argument, "--json is the file of --text: give another one");
    refuse_model_file("--json", options.json, options.model);
    file.emplace("--json", options.json);
  }

  Progress progress(options.quiet);
  Scorer reference(options, "auto", "auto", progress);
  Json rows = Json::array();
  for (const std::string& format : formats) {
    Scorer scorer(options, format, options.engine.kv_cache_dtype, progress);
    const auto compared = compare_text(
        reference, scorer, ids, static_cast<size_t>(options.context), [&](size_t done) {
          progress.loading(format.c_str(), static_cast<int64_t>(done), std::ssize(ids));
        });
    if (rows.empty()) {
      double nll = 0;
      for (const Row& row : compared) nll += row.reference_nll;
      rows.push_back(
          row_of(reference, reference.info().dtype, nll / static_cast<double>(compared.size())));
    }
    const std::string weights = is_of_cache_alone(options.engine) ? reference.info().dtype : format;
    rows.push_back(
        row_of(scorer,
               options.engine.kv_cache_dtype == "auto"
                   ? weights
                   : fmt::format("{}, keys and values {}", weights, scorer.info().kv_cache_dtype),
               compared));
  }
  progress.clear();

  const EngineInfo& info = reference.info();
  const Json json = {{"benchmark", "quality"},
                     {"model", options.model},
                     {"architecture", info.architecture},
                     {"device", info.device},
                     {"text", *options.text},
                     {"tokens", ids.size()},
                     {"context", options.context},
                     {"rows", rows}};
  const std::string all = json.dump(2) + "\n";
  if (file) {
    file->write(all);
    file->close();
  }
  Output output;
  output.write(options.json == "-"
                   ? all
                   : fmt::format("{}: {} tokens of {} in windows of {}, {}\n\n{}", options.model,
                                 with_commas(std::ssize(ids)), *options.text, options.context,
                                 info.device, table_of(rows)));
  output.close();
  return kExitDone;
}

}  // namespace

void add_bench_quality(CLI::App& bench, Action& action) {
  auto options = std::make_shared<QualityOptions>();
  QualityOptions& o = *options;
  CLI::App& command =
      add_command(bench, "quality", "What quantising costs: perplexity, KL divergence, top tokens");
  add_model(command, o.model);
  add_value(command, "--text", "FILE", "the text", [&o](const std::string& s) { o.text = s; });
  add_value(command, "--context", "N", "tokens of a window of the text (512)",
            [&o](const std::string& s) { o.context = parse_size(s, 2, 1 << 20); });
  add_value(command, "--chunks", "N", "windows, of the text's first ones (all)",
            [&o](const std::string& s) { o.chunks = parse_integer(s, 1, 1 << 20); });
  add_value(command, "--json", "FILE", "write JSON to FILE; - is standard output",
            [&o](const std::string& s) { o.json = s; });
  add_flag(command, "--quiet,-q", o.quiet, "no progress on standard error");
  add_engine_options(command, o.engine);
  set_action(command, action, [options] { return bench_quality(*options); });
}

}  // namespace nanovllm::cli
