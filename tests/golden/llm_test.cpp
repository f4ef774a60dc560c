// The public API as a user drives it: what comes back, when, and what one request's trouble costs
// the others.
#include <cmath>

#include "nanovllm/tokenizer.h"

#include "llm_rig.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

TEST(Llm, BadRequestsFailAloneAndSayWhy) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  const auto alone = llm.generate({ids(20)}, greedy(8)).front();
  llm.reset_prefix_cache();
  const auto with = [](auto change) {
    SamplingParams params = greedy(8);
    change(params);
    return params;
  };
  struct Row {
    Prompt prompt;
    SamplingParams params;
    std::vector<std::string> named;
  };
  const std::vector<Row> rows = {
      {std::vector<int32_t>{}, greedy(8), {"prompt is empty"}},
      {ids(512), greedy(8), {"512", "max_model_len 512"}},
      {ids(5000), greedy(8), {"5000", "max_model_len 512"}},
      {std::vector<int32_t>{1, 257}, greedy(8), {"prompt_token_ids[1]", "257", "256"}},
      {std::vector<int32_t>{-1}, greedy(8), {"prompt_token_ids[0]", "-1"}},
      {ids(5), with([](auto& p) { p.max_tokens = 0; }), {"max_tokens is 0"}},
      {ids(5), with([](auto& p) { p.temperature = NAN; }), {"temperature is nan"}},
      {ids(5), with([](auto& p) { p.stop_token_ids = {257}; }), {"stop_token_ids", "257"}},
      {ids(5), with([](auto& p) { p.stop = {"x"}; }), {"stop strings need a tokenizer"}},
      {ids(5), with([](auto& p) { p.bad_words = {"x"}; }), {"bad_words need a tokenizer"}},
      {ids(5), with([](auto& p) { p.priority = 1; }), {"--scheduling-policy priority"}},
      {ids(5),
       with([](auto& p) {
         p.logit_bias = {{257, 1}};
       }),
       {"logit_bias has 257"}},
      {"text", greedy(8), {"text prompt", "skip_tokenizer_init"}},
  };
  std::vector<Prompt> prompts;
  std::vector<SamplingParams> params;
  for (const Row& row : rows) {
    prompts.insert(prompts.end(), {row.prompt, ids(20)});
    params.insert(params.end(), {row.params, greedy(8)});
  }
  const auto outputs = llm.generate(prompts, params);
  ASSERT_EQ(outputs.size(), 2 * rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const RequestOutput &bad = outputs[2 * i], &good = outputs[2 * i + 1];
    EXPECT_TRUE(bad.finished);
    EXPECT_EQ(bad.outputs[0].finish_reason, FinishReason::error) << i;
    EXPECT_TRUE(bad.outputs[0].token_ids.empty());
    expect_contains(bad.error, rows[i].named);
    EXPECT_EQ(good.outputs[0].finish_reason, FinishReason::length);
    EXPECT_EQ(good.outputs[0].token_ids, alone.outputs[0].token_ids);
  }
}

TEST(Llm, OneSamplingParamsForEachPromptOrForAll) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  const std::vector<Prompt> prompts = {ids(3), ids(4)};
  const auto outputs = llm.generate(prompts, std::vector{greedy(2), greedy(5)});
  EXPECT_EQ(outputs[0].outputs[0].token_ids.size(), 2u);
  EXPECT_EQ(outputs[1].outputs[0].token_ids.size(), 5u);
  EXPECT_TRUE(llm.generate({}, greedy(1)).empty());
  expect_invalid([&] { llm.generate(prompts, std::vector{greedy(1)}); },
                 {"2 prompts", "1 sampling_params"});
  EXPECT_TRUE(llm.is_finished());
}

TEST(Llm, ATruncatedPromptIsItsLastTokens) {
  LLM llm(golden("qwen3-tied-gqa"), config_for(kCpu));
  SamplingParams params = greedy(4);
  const auto truncated = [&](int64_t tokens) {
    params.truncate_prompt_tokens = tokens;
    return llm.generate({ids(600)}, params).front();
  };
  const std::vector<int32_t> all = ids(600);
  for (const int64_t kept : {int64_t{1}, int64_t{10}, int64_t{-1}}) {
    const RequestOutput output = truncated(kept);
    // The context has 512 tokens, one of them for the answer.
    EXPECT_EQ(output.prompt_token_ids,
              std::vector<int32_t>(all.end() - (kept == -1 ? 511 : kept), all.end()));
    EXPECT_EQ(output.outputs[0].token_ids.size(), kept == -1 ? 1u : 4u);
  }
  EXPECT_EQ(truncated(600).outputs[0].finish_reason, FinishReason::error);
  for (const int64_t bad : {0, -2})
    expect_contains(truncated(bad).error, {"truncate_prompt_tokens is", "at least 1"});
}

TEST(Llm, OutputKindsTellTheSameStory) {
  LLM llm(demo(), demo_config());
  SamplingParams params;
  params.temperature = 0.8;
  params.seed = 5;
  params.max_tokens = 40;
  params.logprobs = 2;
  params.prompt_logprobs = 1;
  params.stop = {"zzz", "qqq"};
  for (const OutputKind kind :
       {OutputKind::cumulative, OutputKind::delta, OutputKind::final_only}) {
    params.output_kind = kind;
    llm.add_request("Once upon a time", params);
  }
  const auto outputs = drain(llm);
  const RequestOutput& whole = outputs.at(2).back();
  EXPECT_EQ(outputs.at(2).size(), 1u);
  EXPECT_EQ(outputs.at(0).size(), whole.outputs[0].token_ids.size());
  EXPECT_FALSE(whole.outputs[0].text.empty());

  RequestOutput joined;
  CompletionOutput& answer = joined.outputs.emplace_back();
  std::string shown;
  for (const RequestOutput& output : outputs.at(0)) {
    EXPECT_EQ(output.outputs[0].text.compare(0, shown.size(), shown), 0) << "text was taken back";
    shown = output.outputs[0].text;
    EXPECT_EQ(output.prompt_token_ids, whole.prompt_token_ids);
    EXPECT_EQ(output.outputs[0].logprobs.size(), output.outputs[0].token_ids.size());
  }
  for (const RequestOutput& output : outputs.at(1)) {
    const CompletionOutput& piece = output.outputs[0];
    answer.text += piece.text;
    answer.token_ids.insert(answer.token_ids.end(), piece.token_ids.begin(), piece.token_ids.end());
    answer.logprobs.insert(answer.logprobs.end(), piece.logprobs.begin(), piece.logprobs.end());
    joined.prompt_logprobs.insert(joined.prompt_logprobs.end(), output.prompt_logprobs.begin(),
                                  output.prompt_logprobs.end());
  }
  for (const RequestOutput* other :
       {&outputs.at(0).back(), static_cast<const RequestOutput*>(&joined)}) {
    EXPECT_EQ(other->outputs[0].text, whole.outputs[0].text);
    EXPECT_EQ(other->outputs[0].token_ids, whole.outputs[0].token_ids);
    EXPECT_TRUE(same_bits(other->outputs[0].logprobs, whole.outputs[0].logprobs));
    EXPECT_TRUE(same_bits(other->prompt_logprobs, whole.prompt_logprobs));
  }
  EXPECT_EQ(outputs.at(0).back().outputs[0].finish_reason,
            outputs.at(1).back().outputs[0].finish_reason);
}

TEST(Llm, AStopStringEndsTheTextBeforeIt) {
  LLM llm(demo(), demo_config());
  const auto free = llm.generate({"Once upon a time"}, greedy(40)).front();
  ASSERT_GT(free.outputs[0].text.size(), 30u);
  // A stop string from the middle of the text that the model gives anyway; its first occurrence
  // counts.
  const std::string stop = free.outputs[0].text.substr(14, 6);
  const size_t at = free.outputs[0].text.find(stop);
  SamplingParams params = greedy(40);
  params.stop = {"never in this text", stop};
  for (const OutputKind kind : {OutputKind::cumulative, OutputKind::delta}) {
    params.output_kind = kind;
    params.include_stop_str_in_output = kind == OutputKind::delta;
    llm.add_request("Once upon a time", params);
    const auto outputs = drain(llm).begin()->second;
    std::string text;
    for (const RequestOutput& output : outputs)
      text = kind == OutputKind::delta ? text + output.outputs[0].text : output.outputs[0].text;
    EXPECT_EQ(text,
              free.outputs[0].text.substr(0, at) + (params.include_stop_str_in_output ? stop : ""));
    EXPECT_EQ(outputs.back().outputs[0].finish_reason, FinishReason::stop);
    EXPECT_EQ(outputs.back().outputs[0].stop_reason, stop);
  }
}

TEST(Llm, AStopStringThatStoodBeforeMinTokensCostsNothingLater) {
  LLM llm(demo(), demo_config());
  const auto free = llm.generate({"Once upon a time"}, greedy(40)).front();
  SamplingParams params = greedy(40);
  params.stop = {llm.tokenizer()->decode(std::span(free.outputs[0].token_ids).first(1)),
                 "a much longer stop string that never comes"};
  params.min_tokens = 2;
  params.output_kind = OutputKind::delta;
  llm.add_request("Once upon a time", params);
  std::string text;
  const auto outputs = drain(llm);
  for (const RequestOutput& output : outputs.begin()->second) text += output.outputs[0].text;
  EXPECT_EQ(free.outputs[0].text.compare(0, text.size(), text), 0) << text;
  EXPECT_GT(text.size(), params.stop[0].size());
}

TEST(Llm, EosEndsAnAnswerUnlessItIsIgnoredOrTooEarly) {
  LLM llm(demo(), demo_config());
  const Prompt prompt = llm.chat_prompt(R"([{"role": "user", "content": "What is 12 + 30?"}])");
  const auto answer = llm.generate({prompt}, greedy(60)).front();
  ASSERT_EQ(answer.outputs[0].finish_reason, FinishReason::stop);
  EXPECT_NE(answer.outputs[0].text.find("42"), std::string::npos) << answer.outputs[0].text;
  EXPECT_EQ(answer.outputs[0].stop_reason, "");
  const int32_t eos = answer.outputs[0].token_ids.back();
  EXPECT_EQ(llm.tokenizer()->id_to_token(eos), "<|im_end|>");

  SamplingParams ignore = greedy(60), late = greedy(60), named = greedy(60);
  ignore.ignore_eos = true;
  late.min_tokens = std::ssize(answer.outputs[0].token_ids) + 5;
  named.stop_token_ids = {answer.outputs[0].token_ids[0]};
  const auto outputs = llm.generate({prompt, prompt, prompt}, std::vector{ignore, late, named});
  EXPECT_EQ(outputs[0].outputs[0].token_ids.size(), 60u);
  EXPECT_EQ(outputs[0].outputs[0].finish_reason, FinishReason::length);
  EXPECT_EQ(outputs[0].outputs[0].token_ids[answer.outputs[0].token_ids.size() - 1], eos);
  EXPECT_GE(std::ssize(outputs[1].outputs[0].token_ids), late.min_tokens);
  EXPECT_NE(outputs[1].outputs[0].token_ids[answer.outputs[0].token_ids.size() - 1], eos)
      << "sampled before min_tokens";
  // EOS counts among min_tokens neither in vLLM's MinTokensLogitsProcessor nor in Hugging Face's
  // MinNewTokensLengthLogitsProcessor: the answer's own length is one too many.
  const std::vector<int32_t>& whole = answer.outputs[0].token_ids;
  SamplingParams enough = greedy(60), one_more = greedy(60);
  enough.min_tokens = std::ssize(whole) - 1;
  one_more.min_tokens = std::ssize(whole);
  // vLLM's _all_stop_token_ids, which that masks, has EOS with ignore_eos, too.
  SamplingParams ignored_late = one_more;
  ignored_late.ignore_eos = true;
  const auto at_the_edge =
      llm.generate({prompt, prompt, prompt}, std::vector{enough, one_more, ignored_late});
  EXPECT_NE(at_the_edge[2].outputs[0].token_ids[whole.size() - 1], eos);
  EXPECT_EQ(at_the_edge[2].outputs[0].token_ids.size(), 60u) << "it is ignored ever after";
  EXPECT_EQ(at_the_edge[0].outputs[0].token_ids, whole);
  EXPECT_NE(at_the_edge[1].outputs[0].token_ids[whole.size() - 1], eos);
  EXPECT_EQ(outputs[2].outputs[0].token_ids.size(), 1u);
  EXPECT_EQ(outputs[2].outputs[0].stop_reason, std::to_string(answer.outputs[0].token_ids[0]));
  EXPECT_EQ(outputs[2].outputs[0].text, "") << "a stop token's text is no part of the answer";
}

TEST(Llm, PromptLogprobsDoNotDependOnThePrefixCache) {
  EngineConfig config = config_for(kCpu);
  config.block_size = 16;
  config.max_num_batched_tokens = 40;  // chunks
  LLM llm(golden("qwen3-tied-gqa"), config);
  SamplingParams params = greedy(4);
  params.prompt_logprobs = 3;
  const auto cold = llm.generate({ids(100)}, params).front();
  ASSERT_EQ(cold.prompt_logprobs.size(), 100u);
  EXPECT_TRUE(cold.prompt_logprobs[0].empty());
  for (size_t i = 1; i < 100; ++i) {
    ASSERT_EQ(cold.prompt_logprobs[i].size(), 4u) << i;
    EXPECT_EQ(cold.prompt_logprobs[i][0].token_id, ids(100)[i]);
  }
  EXPECT_EQ(llm.generate({ids(100)}, greedy(4)).front().metrics.num_cached_tokens, 96);
  const auto warm = llm.generate({ids(100)}, params).front();
  EXPECT_EQ(warm.metrics.num_cached_tokens, 0);
  EXPECT_TRUE(same_bits(warm.prompt_logprobs, cold.prompt_logprobs));
  EXPECT_EQ(warm.outputs[0].token_ids, cold.outputs[0].token_ids);
}

TEST(Llm, ForgettingThePrefixesChangesNoAnswer) {
  EngineConfig config = config_for(kCpu);
  config.block_size = 8;
  LLM llm(golden("qwen3-tied-gqa"), config);
  const auto first = llm.generate({ids(50)}, greedy(4)).front();
  const auto hit = llm.generate({ids(50)}, greedy(4)).front();
  llm.reset_prefix_cache();
  const auto miss = llm.generate({ids(50)}, greedy(4)).front();
  EXPECT_EQ(first.metrics.num_cached_tokens, 0);
  EXPECT_EQ(hit.metrics.num_cached_tokens, 48);
  EXPECT_EQ(miss.metrics.num_cached_tokens, 0);
  EXPECT_EQ(hit.outputs[0].token_ids, first.outputs[0].token_ids);
  EXPECT_EQ(miss.outputs[0].token_ids, first.outputs[0].token_ids);
}

TEST(Llm, RecommendedParametersAreReadAsTransformersReadsThem) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(golden("qwen3-tied-gqa")))
    std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  const auto recommended = [&](const char* generation_config) {
    std::filesystem::remove(directory.path() / "generation_config.json");
    std::ofstream(directory.path() / "generation_config.json") << generation_config;
    return LLM(directory.path(), config_for(kCpu)).default_sampling_params();
  };
  // A top_p of 0 leaves the likeliest token, which our range has no number for but a small one.
  const SamplingParams likeliest = recommended(R"({"do_sample": true, "top_p": 0})");
  EXPECT_GT(likeliest.top_p, 0);
  EXPECT_LT(likeliest.top_p, 1e-6);
  EXPECT_EQ(likeliest.temperature, 1);
  EXPECT_EQ(recommended(R"({"do_sample": false, "temperature": 0.7})").temperature, 0);
  EXPECT_EQ(recommended(R"({"do_sample": true, "temperature": 0.7})").temperature, 0.7);
  EXPECT_EQ(recommended(R"({"temperature": 0.7, "top_k": 5, "min_p": 0.25})").top_k, 5);
}

TEST(Llm, CountersOnlyRiseAndMetricsAreInOrder) {
  EngineConfig config = config_for(kCpu);
  config.max_num_seqs = 2;
  LLM llm(golden("qwen3-tied-gqa"), config);
  const int64_t blocks = llm.stats().free_blocks;
  EXPECT_EQ(blocks, llm.info().num_blocks);
  for (int i = 0; i < 5; ++i) llm.add_request(ids(30, i), greedy(4 + i));
  EngineStats before = llm.stats();
  EXPECT_EQ(before.waiting, 5);
  while (!llm.is_finished()) {
    for (const RequestOutput& output : llm.step()) {
      const RequestMetrics& m = output.metrics;
      EXPECT_GT(m.queue_time, 0);
      EXPECT_GT(m.time_to_first_token, m.queue_time);
      if (output.finished) {
        EXPECT_GE(m.total_time, m.time_to_first_token);
      }
    }
    const EngineStats now = llm.stats();
    EXPECT_GT(now.steps, before.steps);
    EXPECT_GE(now.prompt_tokens, before.prompt_tokens);
    EXPECT_GE(now.generated_tokens, before.generated_tokens);
    EXPECT_GE(now.schedule_seconds, before.schedule_seconds);
    EXPECT_GE(now.build_seconds, before.build_seconds);
    EXPECT_LE(now.running, 2);
    before = now;
  }
  EXPECT_EQ(before.prompt_tokens, 5 * 30);
  EXPECT_EQ(before.generated_tokens, 4 + 5 + 6 + 7 + 8);
  EXPECT_EQ(before.waiting + before.running, 0);
  EXPECT_EQ(before.free_blocks, blocks);
}

// -- A model with a broken weight.

class BrokenToken : public testing::TestWithParam<const char*> {};

// The embedding of token 5 is NaN, and so is all that a prompt with it leaves in the KV cache. The
// cache is so small that the others get those blocks next.
TEST_P(BrokenToken, FailsItsRequestsAndNobodyElse) {
  TempDirectory directory;
  auto tensors = read_tensors(goldens() / "qwen3-untied-mqa/model.safetensors");
  for (StoredBytes& t : tensors) {
    if (t.name != "model.embed_tokens.weight") continue;
    const size_t row = t.bytes.size() / static_cast<size_t>(t.shape[0]);
    for (size_t i = 5 * row; i < 6 * row; ++i) t.bytes[i] = '\xff';  // NaN in every float type
  }
  write_tensors(directory.path() / "model.safetensors", tensors);
  std::filesystem::copy_file(goldens() / "qwen3-untied-mqa/config.json",
                             directory.path() / "config.json");

  EngineConfig config = config_for(kCpu);
  config.dtype = GetParam();
  config.block_size = 8;
  config.num_gpu_blocks_override = 40;
  config.max_num_batched_tokens = 32;
  LLM llm(directory.path().string(), config);
  SamplingParams params = greedy(20);
  params.logprobs = 2;
  std::vector<Prompt> good;
  std::vector<RequestOutput> alone;
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> prompt = ids(10 + 7 * i, 20 + i);
    std::replace(prompt.begin(), prompt.end(), 5, 6);
    good.emplace_back(prompt);
    alone.push_back(llm.generate({good.back()}, params).front());
    ASSERT_EQ(alone.back().outputs[0].finish_reason, FinishReason::length) << alone.back().error;
    llm.reset_prefix_cache();
  }
  std::vector<int32_t> broken = std::get<std::vector<int32_t>>(good[5].value);
  broken[broken.size() / 2] = 5;  // shares a prefix with a good one
  std::vector<Prompt> prompts;
  for (const Prompt& prompt : good) prompts.insert(prompts.end(), {broken, prompt});
  const auto outputs = llm.generate(prompts, params);
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_EQ(outputs[2 * i].outputs[0].finish_reason, FinishReason::error);
    expect_contains(outputs[2 * i].error, {"logits", "not finite"});
    EXPECT_TRUE(outputs[2 * i].outputs[0].token_ids.empty());
    EXPECT_TRUE(outputs[2 * i].outputs[0].logprobs.empty());
    EXPECT_EQ(outputs[2 * i + 1].outputs[0].token_ids, alone[i].outputs[0].token_ids)
        << i << " " << outputs[2 * i + 1].error;
    EXPECT_TRUE(same_bits(outputs[2 * i + 1].outputs[0].logprobs, alone[i].outputs[0].logprobs))
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, BrokenToken, testing::Values("f32", "bf16"));

}  // namespace
}  // namespace nanovllm
