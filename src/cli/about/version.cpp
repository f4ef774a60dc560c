#include "cli/about/version.h"

#include <fmt/format.h>

#include "cli/about/build_info.h"
#include "cli/about/findings.h"

namespace nanovllm::cli {

std::string version_line() {
  const std::string commit = kBuildInfo.commit;
  return fmt::format("nanovllm {}{}", kBuildInfo.version,
                     commit.empty() ? "" : " (" + commit + ")");
}

std::string version_text() {
  const SystemFacts facts = ask_system(false);
  const CudaModule& module = facts.module;
  std::string gpus = facts.driver.problem;
  if (gpus.empty())
    gpus = fmt::format("{} GPU{}, the first {}; driver {}(CUDA {})", facts.driver.gpus.size(),
                       facts.driver.gpus.size() == 1 ? "" : "s", facts.driver.gpus[0].name,
                       facts.driver.release.empty() ? "" : facts.driver.release + " ",
                       cuda_version(facts.driver.cuda));
  return fmt::format(
      "{}\nbuilt   {}, {}\nCPU     oneDNN {}\nCUDA    {}\nMPI     {}\ngrammar {}\nGPUs    {}",
      version_line(), kBuildInfo.compiler, kBuildInfo.build_type, facts.onednn,
      module.problem.empty() ? module_contents(module.facts) : module.problem,
      facts.mpi.empty() ? facts.mpi_problem : facts.mpi,
      facts.grammar.empty() ? facts.grammar_problem : facts.grammar, gpus);
}

}  // namespace nanovllm::cli
