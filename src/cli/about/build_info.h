// Facts of the build. The build writes the definition: cmake/BuildInfo.cmake.
#pragma once

namespace nanovllm::cli {

struct BuildInfo {
  const char* version;
  const char* commit;  ///< "0b93ddd", with "-dirty" where files differ from it; "" outside of git
  const char* compiler;
  const char* build_type;
};
extern const BuildInfo kBuildInfo;

}  // namespace nanovllm::cli
