// The plain values that cross the public API: what a request asks for, how an engine is set up,
// what comes back. Names and defaults are vLLM's (vllm/sampling_params.py,
// vllm/engine/arg_utils.py); nano-vLLM's where vLLM has none.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace nanovllm {

/// The bytes [begin, end) of a text.
struct TextRange {
  size_t begin = 0, end = 0;
};

/// The content of a request's outputs: everything so far, the news since the last report, or
/// nothing until it has ended.
enum class OutputKind { cumulative, delta, final_only };

/// The structure that the text of an answer must have; at most one of the fields is set.
/// docs/structured-output.md says what each may hold.
struct StructuredOutputs {
  std::string json{};                 ///< a JSON schema, as JSON
  bool json_object = false;           ///< any JSON object
  std::string regex{};                ///< of the whole text
  std::vector<std::string> choice{};  ///< one of these texts
  std::string grammar{};         ///< EBNF as in XGrammar and llama.cpp, from the rule `root` on
  std::string structural_tag{};  ///< XGrammar's structural tag, as JSON
  /// The text that ends the model's reasoning ("</think>"): the structure begins behind it. Empty:
  /// at once.
  std::string reasoning_end{};
  /// The text that opens the reasoning ("<think>"): an answer that begins otherwise has none.
  /// Empty: the prompt has opened it.
  std::string reasoning_begin{};
  /// Tokens of reasoning, after which reasoning_end is forced; -1: none. It may be asked for
  /// without a structure.
  int64_t thinking_token_budget = -1;

  bool has_structure() const {
    return !json.empty() || json_object || !regex.empty() || !choice.empty() || !grammar.empty() ||
           !structural_tag.empty();
  }
  /// Whether nothing is asked for.
  bool empty() const {
    return !has_structure() && (reasoning_end.empty() || thinking_token_budget < 0);
  }
};

/// How one request is sampled. Validated when the request is added; a value out of range fails that
/// request alone.
struct SamplingParams {
  double temperature = 1.0;  ///< 0 (below 1e-5) is greedy; finite, >= 0
  double top_p = 1.0;        ///< (0, 1]; the token that crosses p stays
  int64_t top_k = 0;         ///< 0 or -1: off; more than the vocabulary: off
  double min_p = 0.0;        ///< [0, 1]; relative to the likeliest token
  /// Subtracted from the logit of each token that the answer has; [-2, 2].
  double presence_penalty = 0.0;
  /// The same times how often the answer has it; [-2, 2].
  double frequency_penalty = 0.0;
  /// Divides a positive logit of each token that prompt or answer has, and multiplies a negative
  /// one; [0.0001, 10000], 1 is off.
  double repetition_penalty = 1.0;
  /// Added to the logits of these tokens, [-100, 100] each; at most 1024.
  std::map<int64_t, double> logit_bias{};
  std::vector<int64_t> allowed_token_ids{};  ///< only these are sampled; empty: all may be
  /// No answer contains these, at the beginning of a word or within one: the token that would
  /// complete one is not sampled. Words may have several tokens; at most 128.
  std::vector<std::string> bad_words{};
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
  /// The prompt is its last so many tokens, at least 1; -1: as many as the context has room for
  /// beside one of the answer.
  std::optional<int64_t> truncate_prompt_tokens{};
  /// Only requests of the same salt share cached prefixes; at most 1024 bytes.
  std::string cache_salt{};
  /// With EngineConfig::scheduling_policy "priority": lower is served earlier; otherwise 0.
  int64_t priority = 0;
  StructuredOutputs structured_outputs{};
  bool skip_special_tokens = true;  ///< in `text`
  /// Special tokens that are in `text` all the same: marks that a parser looks for.
  std::vector<int64_t> visible_special_token_ids{};
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

/// The cause of an end whose finish_reason is `error`, or of an abort by the deadline.
enum class RequestFailure {
  none,
  refused,     ///< it was not acceptable
  capacity,    ///< the KV cache cannot hold it
  not_finite,  ///< the model's logits were not finite
  deadline,
  engine,  ///< the engine has failed
};

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

/// A request's news from one step(); the last ones if `finished`.
struct RequestOutput {
  int64_t request_id = 0;
  std::vector<int32_t> prompt_token_ids{};
  /// The answers, in the order of their indices: all n of them, or, with OutputKind::delta, those
  /// that got a token or ended. A request that was refused has one, whose finish_reason is error.
  std::vector<CompletionOutput> outputs{};
  bool finished = false;                          ///< all answers have ended
  std::string error{};                            ///< why, if an answer's finish_reason is error
  RequestFailure failure = RequestFailure::none;  ///< the kind of `error`
  /// One per prompt token (the first is empty), if asked for.
  std::vector<PositionLogprobs> prompt_logprobs{};
  RequestMetrics metrics;
};

/// Events of the prefix cache over ZeroMQ, for routers. Names, defaults and format are vLLM's, but
/// for the endpoint's: other machines do not reach it unless asked to.
struct KvEventsConfig {
  bool enable_kv_cache_events = false;
  std::string publisher{};  ///< zmq | null (nothing is published); empty: zmq
  std::string endpoint = "tcp://127.0.0.1:5557";
  std::string replay_endpoint{};  ///< where missed batches can be asked for; empty: nowhere
  int64_t buffer_steps = 10'000;  ///< batches that are kept for it
  int64_t hwm = 100'000;          ///< batches that wait for a slow subscriber, before some are lost
  int64_t max_queue_size = 100'000;  ///< batches that wait to be sent, before the engine waits
  std::string topic{};

  bool is_on() const { return enable_kv_cache_events && publisher != "null"; }
};

/// How an engine is set up. 0 or -1 means "choose" where the comment says so.
struct EngineConfig {
  std::string device = "auto";  ///< auto | cpu | cuda | cuda:N
  std::string dtype = "auto";   ///< auto (the checkpoint's; f16 runs as bf16) | bf16 | f32
  /// auto | bfloat16 | fp8, fp8_e4m3: E4M3 keys and values, half the bytes, with scales of the
  /// checkpoint or one for each token and head. auto: as the checkpoint's kv_cache_scheme says
  /// where the device can, else `dtype`.
  std::string kv_cache_dtype = "auto";
  /// Tokens of prompt + output; 0: 4096, or the model's limit if that is less; -1: all that fit.
  int64_t max_model_len = 0;
  /// max_model_len may be beyond what the model was made for: its answers may be poor.
  bool allow_long_max_model_len = false;
  int64_t max_num_seqs = 256;  ///< running at once
  /// fcfs (first come, first served) | priority (SamplingParams::priority: each step of it is worth
  /// 64 places in the order of arrival, so that no request waits for ever)
  std::string scheduling_policy = "fcfs";
  int64_t max_num_batched_tokens = 0;  ///< per step; 0: 8192 on a GPU, 512 on a CPU
  /// (0, 1] of the device's memory, for weights, workspace and KV cache together.
  double gpu_memory_utilization = 0.9;
  int64_t num_gpu_blocks_override = 0;  ///< 0: from memory
  /// KV cache on the CPU, of all ranks; 0: what max_num_seqs x max_model_len needs, 4 GiB at most.
  int64_t cpu_kvcache_bytes = 0;
  int block_size = 64;  ///< tokens per KV block: a power of two, 8 to 256
  bool enable_prefix_caching = true;
  bool enforce_eager = false;  ///< no CUDA graphs
  int decode_micro_batches =
      0;  ///< parts of a decode step that run side by side, 1 or 2; 0: choose
  /// Ranks that share the model: GPUs from `device` on, or shares of the CPU.
  int tensor_parallel_size = 1;
  uint64_t seed = 0;
  int num_threads = 0;  ///< CPU backend, all ranks; 0: OMP_NUM_THREADS or the physical cores
  std::string load_format = "auto";  ///< auto | dummy (random weights from config.json alone)
  /// fp8 | int8 | int4 | w4a8: quantise a plain checkpoint's linear layers while they are loaded
  /// (all but int4: and their activations); auto, or its own method's name: as the checkpoint is
  /// (docs/quantisation.md).
  std::string quantization = "auto";
  /// Quantised weights become numbers of the model's dtype while they are loaded: more memory, the
  /// same answers (but activations are not quantised), and less time over prompts.
  bool dequantize = false;
  bool skip_tokenizer_init = false;  ///< token ids in, token ids out
  /// Text of control tokens ("<|im_end|>") in messages becomes the tokens whoever wrote it, as with
  /// Hugging Face; otherwise it stays text there, but for the system's and the assistant's
  /// messages.
  bool parse_special_in_messages = false;
  KvEventsConfig kv_events{};
  /// Called from the thread that constructs the engine while it loads: (what, done, total). May be
  /// empty.
  std::function<void(const char* what, int64_t done, int64_t total)> on_progress{};
};

}  // namespace nanovllm
