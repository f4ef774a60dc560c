#include "io/model_directory.h"

#include <filesystem>

#include "core/check.h"

namespace nanovllm {

void check_model_directory(const std::string& directory) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(directory, error);
  check(status.type() != std::filesystem::file_type::not_found, ErrorKind::model,
        "{}: no such directory; give a Hugging Face model directory (nothing is downloaded)",
        directory);
  check(!error, ErrorKind::model, "{}: cannot be read: {}", directory, error.message());
  check(std::filesystem::is_directory(status), ErrorKind::model,
        "{} is not a directory; give a Hugging Face model directory", directory);
}

}  // namespace nanovllm
