// Text from a model directory in ten lines: ten_lines models/demo "What is a KV block?"
#include <cstdio>

#include "nanovllm/llm.h"

int main(int argc, char** argv) {
  if (argc < 3) return std::fputs("usage: ten_lines MODEL PROMPT...\n", stderr), 2;
  nanovllm::LLM llm(argv[1]);
  const std::vector<nanovllm::Prompt> prompts(argv + 2, argv + argc);
  for (const auto& output : llm.generate(prompts, {.temperature = 0, .max_tokens = 64}))
    std::printf("%s\n", output.outputs[0].text.c_str());
}
