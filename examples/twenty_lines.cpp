// Many callers, one engine: twenty_lines models/demo "What is 37 + 45?" "Count to ten." answers
// each prompt as it comes.
#include <cstdio>

#include "nanovllm/async_llm.h"

int main(int argc, char** argv) {
  if (argc < 3) return std::fputs("usage: twenty_lines MODEL PROMPT...\n", stderr), 2;
  // Called on the engine's thread, once a step, with the news of all requests.
  const auto print = [](std::span<nanovllm::RequestOutput> step) {
    for (const auto& output : step)
      std::printf("%d: %s%s\n", static_cast<int>(output.request_id), output.outputs[0].text.c_str(),
                  output.error.c_str());
  };
  nanovllm::AsyncLLM llm(argv[1], {}, {}, print);
  nanovllm::SamplingParams params{.temperature = 0, .max_tokens = 64};
  params.output_kind = nanovllm::OutputKind::final_only;  // delta: each piece as it comes
  for (int i = 2; i < argc; ++i) llm.add_request(llm.new_request_id(), argv[i], params);
  return llm.wait_until_idle(3600) ? 0 : 1;
}
