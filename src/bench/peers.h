// Other engines' figures for the rows of our benchmarks, on machines that we measured them on.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"
#include "io/model_config.h"

namespace nanovllm::cli {

struct PeerFigure {
  std::string row, system, hardware;
  double value;
  std::string unit;
};

/// Figures of `benchmark` ("throughput", "latency", ...) for a model of this shape on so many of
/// this kind of device; empty where there are none.
std::vector<PeerFigure> peer_figures(const std::string& benchmark, const ModelConfig& config,
                                     const std::string& device, int ranks);

Json to_json(const std::vector<PeerFigure>& figures);
std::string to_table(const std::vector<PeerFigure>& figures);

}  // namespace nanovllm::cli
