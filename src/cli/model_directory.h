// Where a model is that was named on the command line.
#pragma once

#include <filesystem>
#include <string>

namespace nanovllm::cli {

/// `model` itself; or, where there is no such directory and it is the name of a repository
/// ("Qwen/Qwen3-0.6B") that `hf download` has put into Hugging Face's cache, the directory of its
/// newest snapshot there. HF_HUB_CACHE and HF_HOME say where that cache is, as for Hugging Face's
/// own programs. Nothing is downloaded: throws Error(model) if there is neither.
std::string find_model(const std::string& model);

/// Hugging Face's cache: the folder of models--ORG--NAME folders. The rules are huggingface_hub's
/// (constants.py).
std::filesystem::path hub_cache();

}  // namespace nanovllm::cli
