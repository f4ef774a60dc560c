#include "nanovllm/llm.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "api/chat_prompts.h"
#include "api/load_engine.h"
#include "constrain/grammar_compiler.h"
#include "core/limits.h"
#include "io/json.h"

namespace nanovllm {

struct LLM::State {
  explicit State(LoadedEngine engine)
      : loaded(std::move(engine)), grammars(loaded.tokenizer, loaded.info.vocab_size, loaded.eos) {}

  LoadedEngine loaded;
  GrammarCompiler grammars;
  std::optional<ChatPrompts> chat{};
  // Outputs that came up in generate() of requests that it did not add: for the next step().
  std::vector<RequestOutput> set_aside{};

  LLMEngine& engine() { return *loaded.engine; }
  /// Token ids of a prompt, all of them. Throws Error(invalid_argument).
  std::vector<int32_t> all_tokens_of(const Prompt& prompt, bool is_cut) const {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt.value)) return *ids;
    check(loaded.tokenizer != nullptr, ErrorKind::invalid_argument,
          "a text prompt needs the tokenizer: drop skip_tokenizer_init or give prompt_token_ids");
    const auto& text = std::get<std::string>(prompt.value);
    // Encoding a text takes many times its memory.
    const int64_t most = loaded.info.max_model_len, least = loaded.tokenizer->min_tokens(text);
    check(least < (is_cut ? kMaxTruncatedContexts * most : most), ErrorKind::invalid_argument,
          "the prompt is too long: {0} bytes, {1} tokens or more. This model's maximum context "
          "length is {2} tokens (max_model_len {2})",
          text.size(), least, most);
    return loaded.tokenizer->encode(text, prompt.add_special_tokens, prompt.parse_special_tokens,
                                    prompt.literal);
  }
  std::vector<int32_t> tokens_of(const Prompt& prompt, const SamplingParams& params) const {
    auto tokens = all_tokens_of(prompt, params.truncate_prompt_tokens.has_value());
    if (!params.truncate_prompt_tokens) return tokens;
    const int64_t asked = *params.truncate_prompt_tokens;
    check(asked >= 1 || asked == -1, ErrorKind::invalid_argument,
          "truncate_prompt_tokens is {}: it must be at least 1, or -1 for as many as fit", asked);
    const int64_t kept = asked == -1 ? loaded.info.max_model_len - 1 : asked;
    if (std::ssize(tokens) > kept) tokens.erase(tokens.begin(), tokens.end() - kept);
    return tokens;
  }
};

LLM::LLM(const std::string& model, const EngineConfig& config)
    : state_(new State(load_engine(model, config))) {
  state_->chat.emplace(tokenizer(), config.parse_special_in_messages);
}
LLM::~LLM() = default;
LLM::LLM(LLM&&) noexcept = default;
LLM& LLM::operator=(LLM&&) noexcept = default;

std::vector<RequestOutput> LLM::generate(const std::vector<Prompt>& prompts,
                                         const SamplingParams& sampling_params) {
  return generate(prompts, std::vector<SamplingParams>(prompts.size(), sampling_params));
}

std::vector<RequestOutput> LLM::generate(
    const std::vector<Prompt>& prompts, const std::vector<SamplingParams>& sampling_params,
    const std::function<bool(const RequestOutput&)>& on_output) {
  check(prompts.size() == sampling_params.size(), ErrorKind::invalid_argument,
        "{} prompts, but {} sampling_params", prompts.size(), sampling_params.size());
  std::vector<RequestOutput> outputs(prompts.size());
  std::vector<int64_t> ids;
  const auto abort_all = [&] {
    for (const int64_t id : ids) abort_request(id);
  };
  try {
    for (size_t i = 0; i < prompts.size(); ++i) {
      SamplingParams params = sampling_params[i];
      if (!on_output) params.output_kind = OutputKind::final_only;
      ids.push_back(add_request(prompts[i], params));
    }
    bool aborted = false;
    std::exception_ptr thrown;  // by on_output; what it aborts ends first
    for (size_t unfinished = ids.size(); unfinished > 0;) {
      for (RequestOutput& output : state_->engine().step()) {
        // Ids count up, so a request's place is found by search.
        const auto at = std::lower_bound(ids.begin(), ids.end(), output.request_id);
        if (at == ids.end() || *at != output.request_id) {
          state_->set_aside.push_back(std::move(output));
          continue;
        }
        try {
          aborted = aborted || (on_output && !on_output(output));
        } catch (...) {
          aborted = true;
          thrown = std::current_exception();
        }
        unfinished -= output.finished ? 1 : 0;
        outputs[static_cast<size_t>(at - ids.begin())] = std::move(output);
      }
      if (aborted) abort_all();
    }
    if (thrown) std::rethrow_exception(thrown);
  } catch (...) {
    abort_all();
    throw;
  }
  return outputs;
}

int64_t LLM::add_request(const Prompt& prompt, const SamplingParams& sampling_params) {
  std::vector<int32_t> tokens;
  std::shared_ptr<const Grammar> grammar;
  try {
    tokens = state_->tokens_of(prompt, sampling_params);
    grammar = compile_grammar(sampling_params);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_argument) throw;
    return state_->engine().refuse_request(error.what());
  }
  return add_request(tokens, sampling_params, grammar);
}

std::shared_ptr<const Grammar> LLM::compile_grammar(const SamplingParams& params) const {
  return state_->grammars.compile(params.structured_outputs);
}

int64_t LLM::add_request(const std::vector<int32_t>& tokens, const SamplingParams& params,
                         const std::shared_ptr<const Grammar>& grammar) {
  return state_->engine().add_request(tokens, params, grammar);
}

std::vector<int32_t> LLM::tokenize(const Prompt& prompt,
                                   const SamplingParams& sampling_params) const {
  return state_->tokens_of(prompt, sampling_params);
}

void LLM::check_request(const std::vector<int32_t>& tokens, const SamplingParams& params) const {
  if (const auto problem = state_->engine().refusal(tokens, params))
    fail(ErrorKind::invalid_argument, "{}", *problem);
}

std::vector<RequestOutput> LLM::step() {
  std::vector<RequestOutput> outputs = state_->engine().step();
  outputs.insert(outputs.begin(), std::make_move_iterator(state_->set_aside.begin()),
                 std::make_move_iterator(state_->set_aside.end()));
  state_->set_aside.clear();
  return outputs;
}
void LLM::abort_request(int64_t request_id) { state_->engine().abort_request(request_id); }
bool LLM::is_finished() const {
  return state_->set_aside.empty() && state_->engine().is_finished();
}
const EngineInfo& LLM::info() const { return state_->loaded.info; }
EngineStats LLM::stats() const { return state_->engine().stats(); }
EngineSnapshot LLM::snapshot(int64_t most) const { return state_->engine().snapshot(most); }
void LLM::reset_prefix_cache() { state_->engine().reset_prefix_cache(); }
const Tokenizer* LLM::tokenizer() const { return state_->loaded.tokenizer.get(); }

SamplingParams LLM::default_sampling_params() const {
  const GenerationConfig& recommended = state_->loaded.generation;
  SamplingParams params;
  params.temperature = recommended.temperature.value_or(params.temperature);
  params.top_k = recommended.top_k.value_or(params.top_k);
  // transformers takes a top_p of 0 as "the likeliest token alone".
  params.top_p = std::max(recommended.top_p.value_or(params.top_p), 1e-9);
  params.min_p = recommended.min_p.value_or(params.min_p);
  params.repetition_penalty = recommended.repetition_penalty.value_or(params.repetition_penalty);
  params.max_tokens = recommended.max_new_tokens.value_or(params.max_tokens);
  if (!recommended.do_sample.value_or(true)) params.temperature = 0;
  return params;
}

Prompt LLM::chat_prompt(const std::string& messages_json, const std::string& options_json) const {
  Json messages = parse_json(messages_json, "messages", ErrorKind::invalid_argument);
  Json options = parse_json(options_json, "chat template options", ErrorKind::invalid_argument);
  if (!options.is_object() || !options.contains("chat_template"))
    return state_->chat->prompt(std::move(messages), std::move(options));
  const Json source = options["chat_template"];
  options.erase("chat_template");
  check(source.is_string(), ErrorKind::invalid_argument, "chat_template must be a text");
  return state_->chat->with_template(source.get<std::string>(), "chat_template")
      .prompt(std::move(messages), std::move(options));
}

EngineInfo inspect(const std::string& model, const EngineConfig& config) {
  return plan_engine(model, config);
}

bool serve_rank(const std::string& model, const EngineConfig& config) {
  return serve_engine_rank(model, config);
}

}  // namespace nanovllm
