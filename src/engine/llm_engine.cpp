#include "engine/llm_engine.h"

#include <algorithm>

#include "core/seconds.h"
#include "engine/request_checks.h"
#include "ops/noise.h"

namespace nanovllm {
namespace {

SchedulerConfig scheduler_config(const MemoryPlan& plan, const EngineConfig& config) {
  return {.max_num_seqs = plan.limits.max_num_seqs,
          .max_num_batched_tokens = plan.limits.max_num_batched_tokens,
          .max_model_len = plan.limits.max_model_len,
          .num_blocks = plan.num_blocks,
          .block_size = plan.limits.block_size,
          .enable_prefix_caching = config.enable_prefix_caching};
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

/// For a request without a seed: from the engine's and the request's number.
uint64_t drawn_seed(uint64_t engine_seed, int64_t request_id) {
  const auto number = static_cast<uint64_t>(request_id);
  const Philox4 drawn =
      noise_bits(engine_seed ^ (number << 32), static_cast<uint32_t>(number), ~0u);
  return uint64_t{drawn.x[0]} << 32 | drawn.x[1];
}

/// Row `row` of a step's candidates: the chosen one and `k` more.
PositionLogprobs candidates(const StepResult& result, int64_t row, int64_t k) {
  PositionLogprobs list;
  for (int64_t i = 0; i <= k; ++i) {
    const auto at = static_cast<size_t>(row * result.width + i);
    const int32_t rank = i == 0 ? result.ranks[static_cast<size_t>(row)] : static_cast<int32_t>(i);
    list.push_back({result.ids[at], result.logprobs[at], rank});
  }
  return list;
}

}  // namespace

LLMEngine::LLMEngine(std::unique_ptr<Runner> runner, const ModelConfig& model,
                     const EngineConfig& config, std::shared_ptr<const Tokenizer> tokenizer,
                     std::vector<int32_t> eos)
    : runner_(std::move(runner)),
      tokenizer_(std::move(tokenizer)),
      eos_(std::move(eos)),
      vocab_size_(model.vocab_size),
      max_model_len_(runner_->memory().limits.max_model_len),
      seed_(config.seed),
      scheduler_(scheduler_config(runner_->memory(), config)) {}

int64_t LLMEngine::refuse_request(std::vector<int32_t> prompt, std::string error) {
  RequestOutput output;
  output.request_id = next_id_++;
  output.prompt_token_ids = std::move(prompt);
  output.finished = true;
  output.finish_reason = FinishReason::error;
  output.error = std::move(error);
  refused_.push_back(std::move(output));
  return refused_.back().request_id;
}

int64_t LLMEngine::add_request(std::vector<int32_t> prompt, const SamplingParams& params) {
  check(dead_.empty(), "the engine has failed: {}", dead_);
  const auto length = static_cast<int64_t>(prompt.size());
  auto problem = problem_with(params, vocab_size_);
  if (!problem) problem = problem_with(prompt, vocab_size_);
  const int64_t max_tokens = std::min(params.max_tokens, max_model_len_ - length);
  if (!problem && max_tokens < 1)
    problem = fmt::format(
        "the prompt has {} tokens: with max_model_len {} at most {} leave room for an answer",
        length, max_model_len_, max_model_len_ - 1);
  if (!problem) problem = scheduler_.refusal(length, max_tokens);
  if (!problem && !params.stop.empty() && !tokenizer_) problem = "stop strings need a tokenizer";
  if (problem) return refuse_request(std::move(prompt), std::move(*problem));

  auto sequence = std::make_unique<Sequence>();
  sequence->request_id = next_id_++;
  sequence->params = params;
  sequence->max_tokens = max_tokens;
  sequence->num_prompt_tokens = length;
  sequence->token_ids = std::move(prompt);
  sequence->seed =
      params.seed ? static_cast<uint64_t>(*params.seed) : drawn_seed(seed_, sequence->request_id);
  if (!params.ignore_eos) sequence->stop_token_ids = eos_;
  for (const int64_t id : params.stop_token_ids)
    if (!contains(sequence->stop_token_ids, static_cast<int32_t>(id)))
      sequence->stop_token_ids.push_back(static_cast<int32_t>(id));

  Request& request = requests_[sequence->request_id];
  request.added = Clock::now();
  if (tokenizer_ && params.detokenize)
    request.text = std::make_unique<TextStream>(*tokenizer_, sequence->params);
  if (params.prompt_logprobs) request.prompt_logprobs.resize(static_cast<size_t>(length));
  return scheduler_.add(std::move(sequence)).request_id;
}

std::vector<RequestOutput> LLMEngine::step() {
  check(dead_.empty(), "the engine has failed: {}", dead_);
  std::vector<RequestOutput> outputs = std::move(refused_);
  refused_.clear();
  try {
    run_step(outputs);
  } catch (const std::exception& failure) {
    dead_ = failure.what();
    requests_.clear();
    fail(ErrorKind::engine, "the engine has failed: {}", dead_);
  }
  return outputs;
}

// As many steps are launched as may be in flight, then the oldest one's results are taken: the
// device has its next step before it ends the current one.
void LLMEngine::run_step(std::vector<RequestOutput>& outputs) {
  while (steps_ - steps_processed_ < runner_->max_steps_in_flight())
    if (!launch_step()) break;
  if (steps_processed_ < steps_) process_step(outputs);
  take_finished(outputs);
}

/// False if there is nothing to launch, at all or until a step in flight is processed.
bool LLMEngine::launch_step() {
  Plan& plan = plans_[static_cast<size_t>(steps_) % plans_.size()];
  const auto begin = Clock::now();
  scheduler_.schedule(plan);
  schedule_seconds_ += seconds_since(begin);
  if (plan.empty()) return false;
  for (const ScheduledSequence& s : plan.sequences) {
    Request& request = requests_.at(s.sequence->request_id);
    if (request.metrics.queue_time == 0) request.metrics.queue_time = seconds_since(request.added);
  }
  ++steps_;
  runner_->launch(plan);
  return true;
}

void LLMEngine::process_step(std::vector<RequestOutput>& outputs) {
  const Plan& plan = plans_[static_cast<size_t>(steps_processed_) % plans_.size()];
  const StepResult result = runner_->wait();
  ++steps_processed_;
  const auto begin = Clock::now();
  counts_.clear();
  for (const ScheduledSequence& s : plan.sequences)
    counts_.push_back(!s.sequence->is_finished() &&
                      s.num_preemptions == s.sequence->num_preemptions);
  collect_logprobs(plan, result);
  scheduler_.process(plan, result.sampled);
  schedule_seconds_ += seconds_since(begin);
  advance(plan, outputs);
}

void LLMEngine::collect_logprobs(const Plan& plan, const StepResult& result) {
  if (result.width == 0) return;
  const StepInput& input = *result.input;
  int64_t row = 0;
  for (const size_t i : input.sampling) {
    const Sequence& sequence = *plan.sequences[i].sequence;
    const bool got_token = result.sampled[static_cast<size_t>(row)] >= 0 && counts_[i];
    if (sequence.params.logprobs && got_token)
      requests_.at(sequence.request_id)
          .logprobs.push_back(candidates(result, row, *sequence.params.logprobs));
    ++row;
  }
  for (const PromptRow& prompt : input.prompt_rows) {
    const Sequence& sequence = *plan.sequences[prompt.scheduled].sequence;
    requests_.at(sequence.request_id).prompt_logprobs[static_cast<size_t>(prompt.position) + 1] =
        candidates(result, row++, *sequence.params.prompt_logprobs);
  }
}

// Text and stop strings of the sequences that got a token; those that ended are reported by
// take_finished().
void LLMEngine::advance(const Plan& plan, std::vector<RequestOutput>& outputs) {
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    const ScheduledSequence& s = plan.sequences[i];
    if (!counts_[i] || !s.samples || s.sequence->num_generated() == 0) continue;
    Request& request = requests_.at(s.sequence->request_id);
    if (request.metrics.time_to_first_token == 0)
      request.metrics.time_to_first_token = seconds_since(request.added);
    if (s.sequence->finish_reason != FinishReason::error) add_text(*s.sequence, request);
    if (!s.sequence->is_finished() && s.sequence->params.output_kind != OutputKind::final_only)
      outputs.push_back(report(*s.sequence, request, false));
  }
}

void LLMEngine::add_text(Sequence& sequence, Request& request) {
  if (!request.text) return;
  // A stop token's own text is no part of the answer, unless it was asked for.
  const int32_t token = sequence.token_ids.back();
  const bool stopped = sequence.finish_reason == FinishReason::stop;
  if (stopped && !sequence.params.include_stop_str_in_output) return;
  const bool may_stop = sequence.num_generated() >= sequence.params.min_tokens;
  request.stop_string = request.text->add(token, may_stop);
  if (request.stop_string)
    scheduler_.finish(sequence.request_id, FinishReason::stop, *request.stop_string);
}

void LLMEngine::take_finished(std::vector<RequestOutput>& outputs) {
  for (const auto& sequence : scheduler_.take_finished()) {
    const auto request = requests_.find(sequence->request_id);
    outputs.push_back(report(*sequence, request->second, true));
    requests_.erase(request);
  }
}

void LLMEngine::report_end(const Sequence& sequence, Request& request, RequestOutput& out) {
  if (request.text && !request.stop_string) request.text->finish();
  out.finish_reason = sequence.finish_reason;
  out.stop_reason = sequence.stop_reason;
  out.error = sequence.error;
  // Both with the same token: the text decides.
  if (request.stop_string && sequence.finish_reason == FinishReason::length) {
    out.finish_reason = FinishReason::stop;
    out.stop_reason = *request.stop_string;
  }
  request.metrics.total_time = seconds_since(request.added);
}

RequestOutput LLMEngine::report(const Sequence& sequence, Request& request, bool finished) {
  RequestOutput out;
  out.request_id = sequence.request_id;
  out.finished = finished;
  if (finished) report_end(sequence, request, out);
  const bool delta = sequence.params.output_kind == OutputKind::delta;
  const size_t text_from = delta ? request.reported_text : 0,
               tokens_from = delta ? request.reported_tokens : 0;
  const auto generated = sequence.token_ids.begin() + sequence.num_prompt_tokens;
  if (!delta || request.reported_tokens == 0)
    out.prompt_token_ids.assign(sequence.token_ids.begin(), generated);
  out.token_ids.assign(generated + static_cast<int64_t>(tokens_from), sequence.token_ids.end());
  if (request.text)
    out.text = request.text->text().substr(text_from, request.text->visible() - text_from);
  out.logprobs.assign(request.logprobs.begin() +
                          static_cast<int64_t>(std::min(tokens_from, request.logprobs.size())),
                      request.logprobs.end());
  if (tokens_from == 0) out.prompt_logprobs = request.prompt_logprobs;
  request.reported_tokens = static_cast<size_t>(sequence.num_generated());
  if (request.text) request.reported_text = request.text->visible();
  request.metrics.num_cached_tokens = sequence.num_cached_tokens;
  request.metrics.num_preemptions = sequence.num_preemptions;
  out.metrics = request.metrics;
  return out;
}

void LLMEngine::abort_request(int64_t request_id) {
  if (dead_.empty()) scheduler_.finish(request_id, FinishReason::abort);
}

bool LLMEngine::is_finished() const { return refused_.empty() && requests_.empty(); }

void LLMEngine::reset_prefix_cache() { scheduler_.reset_prefix_cache(); }

EngineStats LLMEngine::stats() const {
  const SchedulerStats s = scheduler_.stats();
  return {.steps = steps_,
          .prompt_tokens = s.prompt_tokens,
          .cached_prompt_tokens = s.cached_prompt_tokens,
          .generated_tokens = s.generated_tokens,
          .preemptions = s.preemptions,
          .waiting = s.waiting,
          .running = s.running,
          .free_blocks = s.free_blocks,
          .schedule_seconds = schedule_seconds_,
          .build_seconds = runner_->build_seconds()};
}

}  // namespace nanovllm
