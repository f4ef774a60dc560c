#include "cli/suggest.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <vector>

#include <fmt/format.h>

namespace nanovllm::cli {
namespace {

// Levenshtein's distance, one row of the table at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, substituted});
    }
  }
  return row.back();
}

constexpr std::string_view kLength = "it is --max-model-len here";
constexpr std::string_view kTokens = "it is --max-tokens (-n) here";
constexpr std::string_view kParallel = "a model is split by --tensor-parallel-size alone";

constexpr std::string_view kConfig = "write it into the model's config.json";
constexpr std::string_view kAdapter = "an adapter (LoRA) is merged into its model first";

struct Advice {
  std::string_view name, text;
};
constexpr Advice kAdvice[] = {
    // vLLM's
    {"complete", "it is generate here"},
    {"run-batch", "it is generate --input here"},
    {"--n", "it is --num-answers here"},
    {"--best-of", "every answer is given here: --num-answers"},
    {"--tokenizer", "the tokenizer is that of the model's directory"},
    {"--trust-remote-code", "code of a model directory is never run"},
    {"--quantization", "it is --format in nanovllm quantize"},
    {"--kv-cache-memory-bytes", "it is --num-gpu-blocks-override, or --cpu-kvcache-bytes, here"},
    {"--pipeline-parallel-size", kParallel},
    {"--data-parallel-size", kParallel},
    {"--enable-chunked-prefill", "prompts are always computed in chunks where they are long"},
    {"--revision", "give the directory of that snapshot as MODEL"},
    {"--download-dir", "HF_HUB_CACHE names the cache that is looked into"},
    {"--hf-overrides", kConfig},
    {"--rope-scaling", kConfig},
    {"--rope-theta", kConfig},
    {"--override-generation-config", "write it into the model's generation_config.json"},
    {"--compilation-config", "nothing is compiled at start"},
    {"--enable-lora", kAdapter},
    {"--lora-modules", kAdapter},
    // nano-vLLM's
    {"--kvcache-block-size", "it is --block-size here"},
    {"--num-kvcache-blocks", "it is --num-gpu-blocks-override here"},
    // llama.cpp's
    {"--ctx-size", kLength},
    {"-c", kLength},
    {"--predict", kTokens},
    {"--n-predict", kTokens},
    {"-s", "it is --seed here"},
    {"--system-prompt", "it is --system here"},
    {"-f", "--prompt \"$(cat FILE)\" gives a file's text, --input FILE many requests"},
    {"--parallel", "it is --max-num-seqs here"},
    {"-np", "it is --max-num-seqs here"},
    {"-b", "it is --max-num-batched-tokens here"},
    {"--gpu-layers", "a model is on one kind of device, --device cuda or cpu"},
    {"--n-gpu-layers", "a model is on one kind of device, --device cuda or cpu"},
    {"-l", "it is --logit-bias here"},
    {"-ngl", "a model is on one kind of device, --device cuda or cpu"},
    // ollama's
    {"run", "it is chat here; generate answers one prompt"},
    {"pull", "\"hf download ORG/NAME\" puts a model into Hugging Face's cache, where it is found"},
    {"list", "\"hf cache ls\" lists the models in Hugging Face's cache; inspect shows one"},
    {"ls", "\"hf cache ls\" lists the models in Hugging Face's cache; inspect shows one"},
    {"show", "it is inspect here"},
};

}  // namespace

std::string advice_on(std::string_view name) {
  const auto* found = std::ranges::find(kAdvice, name, &Advice::name);
  return found == std::end(kAdvice) ? "" : std::string(found->text);
}

std::string with_option_names(std::string message) {
  constexpr std::string_view kParameters[] = {"allow_long_max_model_len",
                                              "max_model_len",
                                              "max_num_seqs",
                                              "max_num_batched_tokens",
                                              "gpu_memory_utilization",
                                              "num_gpu_blocks_override",
                                              "cpu_kvcache_bytes",
                                              "block_size",
                                              "tensor_parallel_size",
                                              "decode_micro_batches",
                                              "load_format",
                                              "quantization",
                                              "kv_cache_dtype",
                                              "kv_events_config",
                                              "skip_tokenizer_init"};
  const auto is_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  for (size_t begin = 0; begin < message.size();) {
    size_t end = begin;
    while (end < message.size() && is_name(message[end])) ++end;
    std::string word = message.substr(begin, end - begin);
    // A user's text, and an option that has its dashes.
    const bool quoted = begin > 0 && (message[begin - 1] == '"' || message[begin - 1] == '-');
    if (!quoted && std::ranges::find(kParameters, word) != std::end(kParameters)) {
      std::ranges::replace(word, '_', '-');
      message.replace(begin, end - begin, "--" + word);
      end += 2;
    }
    begin = end + 1;
  }
  return message;
}

std::string nearest(std::string_view name, std::span<const std::string> candidates) {
  constexpr size_t kLongest = 64;  // a longer name is no misspelling, and the table is quadratic
  if (name.size() > kLongest) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string> candidates) {
  const std::string best = nearest(name, candidates);
  return best.empty() ? "" : fmt::format("; did you mean {}?", best);
}

}  // namespace nanovllm::cli
