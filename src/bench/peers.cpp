#include "bench/peers.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/terminal/table.h"

namespace nanovllm::cli {
namespace {

// Random weights in bf16, end of text ignored. nano-vLLM bb823b3 with PyTorch 2.11 and CUDA graphs;
// llama.cpp c392e50, llama-bench -p 512 -n 64 -t 2 -r 3, a model of the same matrices.
struct Entry {
  const char* benchmark;
  const char* device;      // a part of EngineInfo::device
  int64_t layers, hidden;  // Qwen3-0.6B is 28 x 1024, Qwen3-8B is 36 x 4096
  int ranks;
  const char *row, *system, *hardware;
  double value;
  const char* unit;
};

constexpr const char* kNano = "nano-vLLM";
constexpr const char* kLlama = "llama.cpp";
constexpr const char* kH200 = "one H200";
constexpr const char* kTwo = "two H200";
constexpr const char* kFour = "four H200";
constexpr const char* kZen5 = "2 cores, Zen 5";

constexpr Entry kEntries[] = {
    {"throughput", "H200", 28, 1024, 1, "first", kNano, kH200, 7.82, "s"},
    {"throughput", "H200", 28, 1024, 1, "again", kNano, kH200, 6.79, "s"},
    {"throughput", "H200", 36, 4096, 1, "first", kNano, kH200, 16.38, "s"},
    {"throughput", "H200", 36, 4096, 1, "again", kNano, kH200, 13.80, "s"},
    {"throughput", "H200", 36, 4096, 2, "first", kNano, kTwo, 12.98, "s"},
    {"throughput", "H200", 36, 4096, 2, "again", kNano, kTwo, 10.48, "s"},
    {"throughput", "H200", 36, 4096, 4, "first", kNano, kFour, 9.56, "s"},
    {"throughput", "H200", 36, 4096, 4, "again", kNano, kFour, 8.44, "s"},
    {"latency", "H200", 28, 1024, 1, "batch 1, prompt 128", kNano, kH200, 2.120, "ms/token"},
    {"latency", "H200", 28, 1024, 1, "batch 1, prompt 1024", kNano, kH200, 2.143, "ms/token"},
    {"latency", "H200", 36, 4096, 1, "batch 1, prompt 128", kNano, kH200, 5.722, "ms/token"},
    {"latency", "H200", 36, 4096, 1, "batch 1, prompt 1024", kNano, kH200, 5.745, "ms/token"},
    {"latency", "H200", 36, 4096, 2, "batch 1, prompt 128", kNano, kTwo, 5.004, "ms/token"},
    {"latency", "H200", 36, 4096, 2, "batch 1, prompt 1024", kNano, kTwo, 5.002, "ms/token"},
    {"latency", "H200", 36, 4096, 4, "batch 1, prompt 128", kNano, kFour, 4.652, "ms/token"},
    {"latency", "H200", 36, 4096, 4, "batch 1, prompt 1024", kNano, kFour, 4.635, "ms/token"},
    {"latency", "cpu", 28, 1024, 1, "tg64, batch 1", kLlama, kZen5, 30.64, "ms/token"},
    {"prefill", "H200", 28, 1024, 1, "16 x 1024", kNano, kH200, 347700, "tok/s"},
    {"prefill", "H200", 28, 1024, 1, "4 x 4000", kNano, kH200, 264700, "tok/s"},
    {"prefill", "H200", 36, 4096, 1, "16 x 1024", kNano, kH200, 42400, "tok/s"},
    {"prefill", "H200", 36, 4096, 1, "4 x 4000", kNano, kH200, 38000, "tok/s"},
    {"prefill", "H200", 36, 4096, 2, "16 x 1024", kNano, kTwo, 71600, "tok/s"},
    {"prefill", "H200", 36, 4096, 2, "4 x 4000", kNano, kTwo, 65100, "tok/s"},
    {"prefill", "H200", 36, 4096, 4, "16 x 1024", kNano, kFour, 108900, "tok/s"},
    {"prefill", "H200", 36, 4096, 4, "4 x 4000", kNano, kFour, 99600, "tok/s"},
    {"prefill", "cpu", 28, 1024, 1, "pp512", kLlama, kZen5, 344.5, "tok/s"},
    {"startup", "H200", 28, 1024, 1, "to the first output", kNano, kH200, 25.1, "s"},
    {"startup", "H200", 36, 4096, 1, "to the first output", kNano, kH200, 19.9, "s"},
    {"startup", "H200", 36, 4096, 2, "to the first output", kNano, kTwo, 40.8, "s"},
    {"startup", "H200", 36, 4096, 4, "to the first output", kNano, kFour, 37.1, "s"},
};

}  // namespace

std::vector<PeerFigure> peer_figures(const std::string& benchmark, const ModelConfig& config,
                                     const std::string& device, int ranks) {
  std::vector<PeerFigure> figures;
  for (const Entry& e : kEntries)
    if (benchmark == e.benchmark && device.find(e.device) != std::string::npos &&
        ranks == e.ranks && config.num_hidden_layers == e.layers && config.hidden_size == e.hidden)
      figures.push_back({e.row, e.system, e.hardware, e.value, e.unit});
  return figures;
}

Json to_json(const std::vector<PeerFigure>& figures) {
  Json list = Json::array();
  for (const PeerFigure& f : figures)
    list.push_back({{"row", f.row},
                    {"system", f.system},
                    {"hardware", f.hardware},
                    {"value", f.value},
                    {"unit", f.unit}});
  return list;
}

std::string to_table(const std::vector<PeerFigure>& figures) {
  if (figures.empty()) return "peers: no figures for this model on such a device\n";
  Table table({"peer", "test", "figure", "unit", "on"});
  for (const PeerFigure& f : figures)
    table.add({f.system, f.row, fmt::format("{:g}", f.value), f.unit, f.hardware});
  return table.markdown();
}

}  // namespace nanovllm::cli
