// nano-vllm.cpp's public API. This header, the two that it includes, and nanovllm/tokenizer.h are
// all of it.
//
//   nanovllm::LLM llm("path/to/Qwen3-0.6B");
//   for (auto& output : llm.generate({"The sky was"}, {.temperature = 0.6, .max_tokens = 256}))
//     std::puts(output.outputs[0].text.c_str());
//
// An LLM may be used from one thread at a time. Several may live in one process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "nanovllm/error.h"
#include "nanovllm/params.h"

namespace nanovllm {

class Grammar;
class Tokenizer;

/// Text, or token ids that are taken as they are.
struct Prompt {
  Prompt(const char* text) : value(std::string(text)) {}       // NOLINT: implicit on purpose
  Prompt(std::string text) : value(std::move(text)) {}         // NOLINT
  Prompt(std::vector<int32_t> ids) : value(std::move(ids)) {}  // NOLINT
  std::variant<std::string, std::vector<int32_t>> value;
  /// Text only: the tokenizer's post-processor adds its tokens (BOS where the model has one).
  bool add_special_tokens = true;
  /// Text only: false keeps "<|im_end|>" in the text from becoming the token.
  bool parse_special_tokens = true;
  /// Text only: ranges of bytes, ascending, in which no special token is found. chat_prompt() puts
  /// the text of control tokens there that the template did not write.
  std::vector<TextRange> literal{};
};

/// One part of an engine's start, in seconds since the start. Parts overlap: files are read while
/// the device is opened.
struct StartupPhase {
  std::string name{};
  double begin = 0, end = 0;
};

/// One rank of tensor parallelism: its device, and its share of the memory plan.
struct RankInfo {
  std::string device{};
  int64_t weight_bytes = 0, workspace_bytes = 0, kv_cache_bytes = 0, available_bytes = 0;
};

/// Facts of one engine, for progress lines, `inspect` and metrics. Bytes are those of all
/// ranks together.
struct EngineInfo {
  std::string device{};        ///< "cuda:0 NVIDIA H200" or "cpu, 2 threads"
  std::string architecture{};  ///< "Qwen3ForCausalLM"
  std::string dtype{};
  std::string kv_cache_dtype{};
  std::string quantization{};  ///< of the weights: "int4 (gptq)"; empty: none
  int64_t num_parameters = 0;
  int64_t weight_bytes = 0, workspace_bytes = 0, kv_cache_bytes = 0, available_bytes = 0;
  int64_t num_blocks = 0, block_size = 0, max_model_len = 0, vocab_size = 0;
  int64_t max_num_seqs = 0, max_num_batched_tokens = 0;
  std::vector<RankInfo> ranks{};  ///< tensor_parallel_size of them
  /// Things found, chosen or ignored; one sentence each, to be shown once.
  std::vector<std::string> notes{};
  std::vector<StartupPhase> startup{};  ///< in the order of their ends; empty from inspect()
};

/// Counters since the engine was made; all monotonic except `waiting`, `waiting_tokens`, `running`
/// and `free_blocks`.
struct EngineStats {
  int64_t steps = 0, prompt_tokens = 0, cached_prompt_tokens = 0, generated_tokens = 0,
          preemptions = 0;
  int64_t waiting = 0, running = 0, free_blocks = 0;
  int64_t waiting_tokens = 0;   ///< of the waiting sequences, prompts and what is recomputed
  double schedule_seconds = 0;  ///< host time spent on deciding what runs next
  double build_seconds = 0;     ///< host time spent on turning that into batches
  double step_seconds = 0;      ///< time spent in steps
};

/// A KV block. A cached one holds a prefix: a prompt that begins with its tokens takes it over.
enum class BlockState : uint8_t { free, cached, used, used_and_cached };

/// One sequence of an EngineSnapshot, in numbers.
struct SequenceSnapshot {
  int64_t arrival = 0;  ///< counts up from 1
  int64_t num_prompt_tokens = 0, num_generated = 0, max_tokens = 0;
  int64_t num_computed_tokens = 0;   ///< tokens with keys and values in its blocks
  int64_t num_cached_tokens = 0;     ///< of these, taken from the prefix cache
  int64_t num_scheduled_tokens = 0;  ///< in the newest step; 0: it was not part of it
  int64_t num_preemptions = 0;
  std::vector<int32_t> block_table{};  ///< the block of every block_size tokens
};

/// The scheduler and the KV cache at one moment, for pictures of them.
struct EngineSnapshot {
  EngineStats stats;
  std::vector<BlockState> blocks{};
  std::vector<SequenceSnapshot> running{}, waiting{};  ///< in order of arrival
};

/// The model directory that a user means by `model`: itself; or, where there is no such directory
/// and it is the name of a repository ("Qwen/Qwen3-0.6B") that `hf download` has put into Hugging
/// Face's cache, the directory of its newest snapshot there. HF_HUB_CACHE and HF_HOME say where
/// that cache is, as for Hugging Face's own programs. Nothing is downloaded: throws Error(model) if
/// there is neither.
std::string find_model(const std::string& model);

/// An engine and what is around it: tokenizer, chat template, the queue of requests.
class LLM {
 public:
  /// Loads `model`, a Hugging Face model directory. Throws Error: invalid_argument, model or
  /// device. A weight file that is cut meanwhile, or whose disk fails, may raise SIGBUS instead:
  /// see "Errors" in docs/contract.md.
  explicit LLM(const std::string& model, const EngineConfig& config = {});
  ~LLM();
  LLM(LLM&&) noexcept;
  LLM& operator=(LLM&&) noexcept;

  /// Runs all prompts to their end and returns their outputs in order. A request that fails has
  /// finish_reason `error`. One SamplingParams for all, or one for each. `on_output` is called with
  /// each output as it comes; returning false aborts what is left, and so does throwing. Requests
  /// that were added before run along; their outputs come from the next step(). With
  /// OutputKind::delta the pieces go to `on_output`, and what is returned holds the last one only.
  std::vector<RequestOutput> generate(const std::vector<Prompt>& prompts,
                                      const SamplingParams& sampling_params = {});
  std::vector<RequestOutput> generate(
      const std::vector<Prompt>& prompts, const std::vector<SamplingParams>& sampling_params,
      const std::function<bool(const RequestOutput&)>& on_output = {});

  /// Queues a request and returns its id, unique within this LLM. A request that is not acceptable
  /// (empty prompt, too long, parameter out of range) is finished at once: its output, with the
  /// reason, comes from the next step().
  int64_t add_request(const Prompt& prompt, const SamplingParams& sampling_params = {});
  /// The token ids of a prompt, cut as truncate_prompt_tokens says. Throws Error(invalid_argument):
  /// text that is no UTF-8, or no tokenizer. May be called from any thread.
  std::vector<int32_t> tokenize(const Prompt& prompt,
                                const SamplingParams& sampling_params = {}) const;
  /// Throws Error(invalid_argument) with the reason for which add_request() would refuse these
  /// tokens and parameters. May be called from any thread.
  void check_request(const std::vector<int32_t>& tokens, const SamplingParams& params) const;
  /// Runs one step of the engine. Returns an output for every request that got a token or ended in
  /// it. Throws Error(engine) if the engine failed; all live requests are lost then, and every
  /// later call throws the same.
  std::vector<RequestOutput> step();
  /// Ends a request; its output with finish_reason `abort` comes from the next step(). An unknown
  /// or finished id is ignored.
  void abort_request(int64_t request_id);
  /// No request is waiting, running or has an output to be fetched.
  bool is_finished() const;

  /// Facts of the engine, fixed when it was made.
  const EngineInfo& info() const;
  EngineStats stats() const;
  /// Shows the first `most` of the running and of the waiting sequences.
  EngineSnapshot snapshot(int64_t most) const;
  /// Forgets all cached prefixes that no running request uses.
  void reset_prefix_cache();
  /// The prompt of a conversation: the model's chat template over `messages`, a JSON array of
  /// {"role", "content", ...}. `options` is a JSON object of further template variables
  /// ({"enable_thinking": false}); add_generation_prompt is true unless it says otherwise, and with
  /// continue_final_message the prompt ends where the last message's text does; chat_template, a
  /// text, takes the place of the model's. Text of control tokens in messages stays text unless
  /// parse_special_in_messages. Throws Error(invalid_argument): bad JSON, no chat template that can
  /// be used, or the template's own refusal.
  Prompt chat_prompt(const std::string& messages_json,
                     const std::string& options_json = "{}") const;
  /// The sampling parameters that generation_config.json recommends, over the defaults of
  /// SamplingParams.
  SamplingParams default_sampling_params() const;
  /// Null with skip_tokenizer_init. See nanovllm/tokenizer.h.
  const Tokenizer* tokenizer() const;
  /// Compiles params.structured_outputs, which takes its time, and keeps it for the requests that
  /// follow; null where nothing is asked for. Throws Error(invalid_argument) with what cannot be
  /// enforced. May be called from any thread.
  std::shared_ptr<const Grammar> compile_grammar(const SamplingParams& params) const;

 private:
  friend class AsyncLLM;
  int64_t add_request(const std::vector<int32_t>& tokens, const SamplingParams& params,
                      const std::shared_ptr<const Grammar>& grammar);

  struct State;
  std::unique_ptr<State> state_;
};

/// For programs that mpirun starts with one process per rank (tensor_parallel_size of them): rank 0
/// makes its LLM as ever, which waits for the others; they call this with the same arguments, which
/// serves until rank 0's LLM is gone and returns true. On rank 0, and without mpirun, it returns
/// false at once. Throws as the constructor of LLM does.
bool serve_rank(const std::string& model, const EngineConfig& config = {});

/// The memory plan and the model's facts from config.json alone: the device is opened, but nothing
/// is allocated or loaded.
EngineInfo inspect(const std::string& model, const EngineConfig& config = {});

}  // namespace nanovllm
