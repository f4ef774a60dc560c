#include "engine/llm_engine.h"

#include <algorithm>
#include <utility>

#include "core/seconds.h"
#include "engine/request_checks.h"
#include "engine/token_rules.h"
#include "ops/noise.h"

namespace nanovllm {
namespace {

SchedulerConfig scheduler_config(const MemoryPlan& plan, const EngineConfig& config) {
  return {.max_num_seqs = plan.limits.max_num_seqs,
          .max_num_batched_tokens = plan.limits.max_num_batched_tokens,
          .max_model_len = plan.limits.max_model_len,
          .num_blocks = plan.num_blocks,
          .block_size = plan.limits.block_size,
          .enable_prefix_caching = config.enable_prefix_caching,
          .has_priorities = config.scheduling_policy == "priority"};
}

int64_t seed_of(const Philox4& bits) {
  return static_cast<int64_t>(uint64_t{bits.x[0]} << 32 | bits.x[1]);
}

/// For a request without a seed: from the engine's and the request's number.
int64_t drawn_seed(uint64_t engine_seed, int64_t request_id) {
  const auto number = static_cast<uint64_t>(request_id);
  return seed_of(noise_bits(engine_seed ^ (number << 32), static_cast<uint32_t>(number), ~0u));
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

int64_t answer_seed(int64_t seed, int index) {
  if (index == 0) return seed;
  return seed_of(noise_bits(static_cast<uint64_t>(seed), static_cast<uint32_t>(index), ~1u));
}

LLMEngine::LLMEngine(std::unique_ptr<Runner> runner, const ModelConfig& model,
                     const EngineConfig& config, std::shared_ptr<const Tokenizer> tokenizer,
                     std::vector<int32_t> eos)
    : runner_(std::move(runner)),
      tokenizer_(std::move(tokenizer)),
      eos_(std::move(eos)),
      vocab_size_(model.vocab_size),
      max_model_len_(runner_->memory().limits.max_model_len),
      seed_(config.seed),
      has_priorities_(config.scheduling_policy == "priority"),
      scheduler_(scheduler_config(runner_->memory(), config)) {}

int64_t LLMEngine::refuse_request(std::string error) {
  RequestOutput output;
  output.request_id = next_id_++;
  output.finished = true;
  output.outputs.push_back({.finish_reason = FinishReason::error});
  output.error = std::move(error);
  output.failure = RequestFailure::refused;
  refused_.push_back(std::move(output));
  return refused_.back().request_id;
}

std::optional<std::string> LLMEngine::refusal(const std::vector<int32_t>& prompt,
                                              const SamplingParams& params) const {
  const auto length = std::ssize(prompt);
  if (auto problem = problem_with(params, vocab_size_)) return problem;
  if (auto problem = problem_with(prompt, vocab_size_)) return problem;
  if (length >= max_model_len_)
    return fmt::format(
        "the prompt is too long: {0} tokens. This model's maximum context length is {1} tokens "
        "(max_model_len {1}): at most {2} leave room for an answer",
        length, max_model_len_, max_model_len_ - 1);
  if (!params.stop.empty() && !tokenizer_) return "stop strings need a tokenizer";
  if (!params.bad_words.empty() && !tokenizer_) return "bad_words need a tokenizer";
  if (params.priority != 0 && !has_priorities_)
    return "priority needs scheduling_policy priority (--scheduling-policy priority)";
  return scheduler_.refusal(length, std::min(params.max_tokens, max_model_len_ - length));
}

int64_t LLMEngine::add_request(const std::vector<int32_t>& prompt, const SamplingParams& params,
                               const std::shared_ptr<const Grammar>& grammar) {
  check(dead_.empty(), "the engine has failed: {}", dead_);
  if (auto problem = refusal(prompt, params)) return refuse_request(std::move(*problem));
  if (!grammar && !params.structured_outputs.empty())
    return refuse_request("structured_outputs was not compiled to a grammar");
  std::vector<std::unique_ptr<TokenMatcher>> matchers(static_cast<size_t>(params.n));
  try {
    if (grammar)
      for (auto& matcher : matchers) matcher = grammar->new_matcher();
  } catch (const std::exception& error) {
    return refuse_request(fmt::format("the grammar cannot begin: {}", error.what()));
  }
  const auto length = std::ssize(prompt);
  const int64_t max_tokens = std::min(params.max_tokens, max_model_len_ - length);

  const int64_t id = next_id_++;
  Request& request = requests_[id];
  request.id = id;
  request.output_kind = params.output_kind;
  request.added = Clock::now();
  if (params.prompt_logprobs) request.prompt_logprobs.resize(static_cast<size_t>(length));
  request.answers.resize(static_cast<size_t>(params.n));
  const int64_t seed = params.seed.value_or(drawn_seed(seed_, id));
  request.grammar = grammar;
  for (int i = 0; i < params.n; ++i)
    add_answer(request, i, prompt, params, max_tokens, answer_seed(seed, i),
               std::move(matchers[static_cast<size_t>(i)]));
  return id;
}

void LLMEngine::add_answer(Request& request, int index, const std::vector<int32_t>& prompt,
                           const SamplingParams& params, int64_t max_tokens, int64_t seed,
                           std::unique_ptr<TokenMatcher> matcher) {
  Answer& answer = request.answers[static_cast<size_t>(index)];
  Sequence& sequence = answer.sequence;
  sequence.request = &request;
  sequence.request_id = request.id;
  sequence.index = index;
  sequence.params = params;
  // One answer computes the whole prompt for its log probabilities; the others find it cached.
  if (index > 0) sequence.params.prompt_logprobs.reset();
  sequence.max_tokens = max_tokens;
  sequence.num_prompt_tokens = std::ssize(prompt);
  sequence.token_ids = prompt;
  sequence.seed = static_cast<uint64_t>(seed);
  sequence.stop_token_ids = eos_;
  sequence.matcher = std::move(matcher);
  for (const int64_t id : params.stop_token_ids)
    if (!std::ranges::count(sequence.stop_token_ids, id))
      sequence.stop_token_ids.push_back(static_cast<int32_t>(id));
  sequence.rules = index == 0 ? token_rules(params, tokenizer_.get(), vocab_size_)
                              : request.answers[0].sequence.rules;
  if (tokenizer_ && params.detokenize)
    answer.text = std::make_unique<TextStream>(*tokenizer_, sequence.params);
  scheduler_.add(sequence);
}

// Outputs that a failing step had made already, such as those of refused requests, are given
// first; the next call throws.
std::vector<RequestOutput> LLMEngine::step() {
  std::vector<RequestOutput> outputs = std::exchange(refused_, {});
  if (dead_.empty()) {
    try {
      run_step(outputs);
    } catch (const std::exception& failure) {
      dead_ = failure.what();
    }
  }
  if (dead_.empty() || !outputs.empty()) return outputs;
  requests_.clear();
  fail(ErrorKind::engine, "the engine has failed: {}", dead_);
}

// As many steps are launched as may be in flight, then the oldest one's results are taken: the
// device has its next step before it ends the current one. Token masks follow from the tokens of
// the step before: its forward pass runs while those are read and the masks are made.
void LLMEngine::run_step(std::vector<RequestOutput>& outputs) {
  const auto begin = Clock::now();
  const int64_t before = steps_processed_;
  while (steps_ - steps_processed_ < runner_->max_steps_in_flight()) {
    if (!launch_step()) break;
    if (steps_ - steps_processed_ == 1) finish_launch();
  }
  if (steps_processed_ < steps_) process_step();
  finish_launch();
  take_finished();
  report_news(outputs);
  publish_events();
  if (steps_processed_ > before) step_seconds_ += seconds_since(begin);
}

/// False if there is nothing to launch, at all or until a step in flight is processed.
bool LLMEngine::launch_step() {
  Plan& plan = plans_[static_cast<size_t>(steps_) % plans_.size()];
  const auto begin = Clock::now();
  scheduler_.schedule(plan);
  schedule_seconds_ += seconds_since(begin);
  if (plan.empty()) return false;
  for (const ScheduledSequence& s : plan.sequences) {
    Request& request = *s.sequence->request;
    if (request.metrics.queue_time == 0) request.metrics.queue_time = seconds_since(request.added);
  }
  ++steps_;
  runner_->launch(plan);
  needs_masks_ = plan.needs_masks();
  return true;
}

void LLMEngine::finish_launch() {
  if (!needs_masks_) return;
  runner_->finish_launch(plans_[static_cast<size_t>(steps_ - 1) % plans_.size()]);
  needs_masks_ = false;
}

void LLMEngine::process_step() {
  Plan& plan = plans_[static_cast<size_t>(steps_processed_) % plans_.size()];
  const StepResult result = runner_->wait();
  ++steps_processed_;
  const auto begin = Clock::now();
  scheduler_.process(plan, result.sampled);
  schedule_seconds_ += seconds_since(begin);
  collect_logprobs(plan, result);
  advance(plan);
}

void LLMEngine::collect_logprobs(const Plan& plan, const StepResult& result) {
  if (result.width == 0) return;
  const StepInput& input = *result.input;
  int64_t row = 0;
  for (const size_t i : input.sampling) {
    const Sequence& sequence = *plan.sequences[i].sequence;
    const bool got_token =
        result.sampled[static_cast<size_t>(row)] >= 0 && plan.sequences[i].counts;
    if (sequence.params.logprobs && got_token)
      sequence.request->answer_of(sequence).logprobs.push_back(
          candidates(result, row, *sequence.params.logprobs));
    ++row;
  }
  for (const PromptRow& prompt : input.prompt_rows) {
    const Sequence& sequence = *plan.sequences[prompt.scheduled].sequence;
    sequence.request->prompt_logprobs[static_cast<size_t>(prompt.position) + 1] =
        candidates(result, row++, *sequence.params.prompt_logprobs);
  }
}

// Text and stop strings of the answers that got a token.
void LLMEngine::advance(const Plan& plan) {
  for (const ScheduledSequence& s : plan.sequences) {
    if (!s.counts || !s.samples || s.sequence->num_generated() == 0) continue;
    Request& request = *s.sequence->request;
    if (request.metrics.time_to_first_token == 0)
      request.metrics.time_to_first_token = seconds_since(request.added);
    if (s.sequence->finish_reason != FinishReason::error) add_text(request.answer_of(*s.sequence));
    if (!s.sequence->is_finished()) note_news(request);
  }
}

void LLMEngine::add_text(Answer& answer) {
  if (!answer.text) return;
  Sequence& sequence = answer.sequence;
  // A stop token's own text is no part of the answer, unless it was asked for.
  const int32_t token = sequence.token_ids.back();
  const bool stopped = sequence.finish_reason == FinishReason::stop;
  if (stopped && !sequence.params.include_stop_str_in_output) return;
  const bool may_stop = sequence.num_generated() > sequence.params.min_tokens;
  answer.stop_string = answer.text->add(token, may_stop);
  if (answer.stop_string) scheduler_.finish(sequence, FinishReason::stop, *answer.stop_string);
}

void LLMEngine::take_finished() {
  for (Sequence* sequence : scheduler_.take_finished()) {
    Request& request = *sequence->request;
    Answer& answer = request.answer_of(*sequence);
    answer.has_ended = true;
    if (answer.text && !answer.stop_string) answer.text->finish();
    note_news(request);
  }
}

// -- Reports. A request is reported once a step, however many of its answers have news.

void LLMEngine::note_news(Request& request) {
  if (!request.has_news) news_.push_back(&request);
  request.has_news = true;
}

void LLMEngine::report_news(std::vector<RequestOutput>& outputs) {
  for (Request* request : news_) {
    request->has_news = false;
    const bool finished = request->has_ended();
    if (finished || request->output_kind != OutputKind::final_only)
      outputs.push_back(report(*request, finished));
    if (finished) requests_.erase(request->id);
  }
  news_.clear();
}

void LLMEngine::abort_request(int64_t request_id) {
  const auto request = requests_.find(request_id);
  if (request == requests_.end()) return;
  for (Answer& answer : request->second.answers)
    scheduler_.finish(answer.sequence, FinishReason::abort);
}

bool LLMEngine::is_finished() const { return refused_.empty() && requests_.empty(); }

void LLMEngine::reset_prefix_cache() {
  scheduler_.reset_prefix_cache();
  publish_events();
}

void LLMEngine::publish_events_to(std::unique_ptr<KvEventPublisher> publisher) {
  publisher_ = std::move(publisher);
  if (publisher_) scheduler_.record_events();
}

void LLMEngine::publish_events() {
  if (!publisher_) return;
  if (auto events = scheduler_.take_events(); !events.empty())
    publisher_->publish(std::move(events));
}

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
          .waiting_tokens = s.waiting_tokens,
          .schedule_seconds = schedule_seconds_,
          .build_seconds = runner_->build_seconds(),
          .step_seconds = step_seconds_};
}

EngineSnapshot LLMEngine::snapshot(int64_t most) const {
  EngineSnapshot snapshot{.stats = stats()};
  scheduler_.add_to(snapshot, most);
  return snapshot;
}

}  // namespace nanovllm
