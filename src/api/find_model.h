// The part of find_model() (nanovllm/llm.h) that front ends show.
#pragma once

#include <filesystem>

namespace nanovllm {

/// Hugging Face's cache: the folder of models--ORG--NAME folders. The rules are huggingface_hub's
/// (constants.py).
std::filesystem::path hub_cache();

}  // namespace nanovllm
