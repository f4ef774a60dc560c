// The plain values that cross the public API: what a request asks for, how an engine is set up,
// what comes back. Names and defaults are vLLM's (vllm/sampling_params.py,
// vllm/engine/arg_utils.py); nano-vLLM's where vLLM has none.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace nanovllm {

/// The bytes [begin, end) of a text.
struct TextRange {
  size_t begin = 0, end = 0;
};

/// What step() reports of a request: everything so far, what is new since the last report, or
/// nothing until it has ended.
enum class OutputKind { cumulative, delta, final_only };

/// How one request is sampled. Validated when the request is added; a value out of range fails that
/// request alone.
struct SamplingParams {
  double temperature = 1.0;       ///< 0 (below 1e-5) is greedy; finite, >= 0
  double top_p = 1.0;             ///< (0, 1]; the token that crosses p stays
  int64_t top_k = 0;              ///< 0 or -1: off; more than the vocabulary: off
  double min_p = 0.0;             ///< [0, 1]; relative to the likeliest token
  std::optional<int64_t> seed{};  ///< none: drawn from the engine's seed and the request's number
  int64_t max_tokens = 16;        ///< >= 1
  int64_t min_tokens = 0;         ///< EOS and stop_token_ids are not sampled before
  /// Answers to the prompt, 1 to 128. Answer i is that of a request of its own with the seed
  /// answer_seed(seed, i).
  int n = 1;
  bool ignore_eos = false;
  std::vector<std::string> stop{};  ///< text ends before the first of these
  std::vector<int64_t> stop_token_ids{};
  bool include_stop_str_in_output = false;
  /// The k likeliest tokens and the chosen one, per generated token; at most 20.
  std::optional<int> logprobs{};
  /// The same per prompt token; turns prefix-cache hits off for the request.
  std::optional<int> prompt_logprobs{};
  bool skip_special_tokens = true;  ///< in `text`
  bool detokenize = true;
  OutputKind output_kind = OutputKind::cumulative;
};

/// One candidate at one position.
struct TokenLogprob {
  int32_t token_id = 0;
  /// Natural logarithm, from the raw logits: before temperature, masks and filters.
  float logprob = 0;
  int32_t rank = 0;  ///< 1 is the likeliest; ties go to the lower id
};
/// The chosen token first, then the k likeliest (the chosen one again if it is among them).
using PositionLogprobs = std::vector<TokenLogprob>;

enum class FinishReason { none, stop, length, error, abort };
const char* to_string(FinishReason reason);  ///< "", "stop", "length", "error", "abort"

/// The seed of answer `index` of a request with this seed: the seed itself for answer 0.
int64_t answer_seed(int64_t seed, int index);

/// Seconds on a monotonic clock since the request was added; 0 where the event has not happened.
/// With several answers, an event is that of the first answer to reach it.
struct RequestMetrics {
  double queue_time = 0;  ///< until it was first scheduled
  double time_to_first_token = 0;
  double total_time = 0;
  int64_t num_cached_tokens = 0;  ///< prompt tokens that answer 0 took from the prefix cache
  int64_t num_preemptions = 0;    ///< of all answers
};

/// One answer of a request.
struct CompletionOutput {
  int index = 0;                     ///< 0 to n - 1
  std::string text{};                ///< valid UTF-8; without the stop string
  std::vector<int32_t> token_ids{};  ///< generated so far, the final EOS or stop token included
  std::vector<PositionLogprobs> logprobs{};  ///< one per generated token, if asked for
  FinishReason finish_reason = FinishReason::none;
  /// The stop string, or the stop token's id in decimal; empty for EOS and length.
  std::string stop_reason{};

  bool finished() const { return finish_reason != FinishReason::none; }
};

/// What one step() reports of a request; of its end if `finished`.
struct RequestOutput {
  int64_t request_id = 0;
  std::vector<int32_t> prompt_token_ids{};
  /// The answers, in the order of their indices: all n of them, or, with OutputKind::delta, those
  /// that got a token or ended. A request that was refused has one, whose finish_reason is error.
  std::vector<CompletionOutput> outputs{};
  bool finished = false;  ///< all answers have ended
  std::string error{};    ///< why, if an answer's finish_reason is error
  /// One per prompt token (the first is empty), if asked for.
  std::vector<PositionLogprobs> prompt_logprobs{};
  RequestMetrics metrics;
};

/// How an engine is set up. 0 or -1 means "choose" where the comment says so.
struct EngineConfig {
  std::string device = "auto";  ///< auto | cpu | cuda | cuda:N
  std::string dtype = "auto";   ///< auto (the checkpoint's; f16 runs as bf16) | bf16 | f32
  /// Tokens of prompt + output; 0: 4096, or the model's limit if that is less.
  int64_t max_model_len = 0;
  /// max_model_len may be beyond what the model was made for: its answers may be poor.
  bool allow_long_max_model_len = false;
  int64_t max_num_seqs = 256;          ///< running at once
  int64_t max_num_batched_tokens = 0;  ///< per step; 0: 8192 on a GPU, 512 on a CPU
  /// (0, 1] of the device's memory, for weights, workspace and KV cache together.
  double gpu_memory_utilization = 0.9;
  int64_t num_gpu_blocks_override = 0;  ///< 0: from memory
  /// KV cache on the CPU, of all ranks; 0: what max_num_seqs x max_model_len needs, 4 GiB at most.
  int64_t cpu_kvcache_bytes = 0;
  int block_size = 64;  ///< tokens per KV block: a power of two, 8 to 256
  bool enable_prefix_caching = true;
  bool enforce_eager = false;  ///< no CUDA graphs
  int decode_lanes = 0;        ///< parts of a decode step that run side by side, 1 or 2; 0: choose
  /// Ranks that share the model: GPUs from `device` on, or shares of the CPU.
  int tensor_parallel_size = 1;
  uint64_t seed = 0;
  int num_threads = 0;  ///< CPU backend, all ranks; 0: OMP_NUM_THREADS or the physical cores
  std::string load_format = "auto";  ///< auto | dummy (random weights from config.json alone)
  bool skip_tokenizer_init = false;  ///< token ids in, token ids out
  /// Text of control tokens ("<|im_end|>") in messages becomes the tokens whoever wrote it, as with
  /// Hugging Face; otherwise it stays text there, but for the system's and the assistant's
  /// messages.
  bool parse_special_in_messages = false;
  /// Called from the thread that constructs the engine while it loads: (what, done, total). May be
  /// empty.
  std::function<void(const char* what, int64_t done, int64_t total)> on_progress{};
};

}  // namespace nanovllm
