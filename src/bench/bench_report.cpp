// The report of a benchmark: a table for people, JSON for programs.

#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/peers.h"
#include "cli/terminal/output.h"
#include "cli/terminal/table.h"

namespace nanovllm::cli {
namespace {

std::string cell(const Json& row, const BenchReport::Column& column) {
  const auto found = row.find(column.key);
  if (found == row.end() || found->is_null()) return "-";
  if (found->is_string()) return found->get<std::string>();
  if (found->is_number_integer()) return with_commas(found->get<int64_t>());
  if (column.key == "share") return fmt::format("{:.0f} %", 100 * found->get<double>());
  return fmt::format("{:.{}f}", found->get<double>(), column.digits);
}

}  // namespace

BenchReport::BenchReport(std::string benchmark, const BenchOptions& options,
                         std::vector<Column> columns)
    : benchmark_(std::move(benchmark)), options_(options), columns_(std::move(columns)) {
  if (options.json.empty() || options.json == "-") return;
  if (!options.model.empty()) refuse_model_file("--json", options.json, options.model);
  file_.emplace("--json", options.json);
}

void BenchReport::add(Json row) {
  const auto measured = row.find("measured"), floor = row.find("floor");
  if (measured != row.end() && floor != row.end() && floor->is_number() &&
      measured->get<double>() > 0)
    row["share"] = floor->get<double>() / measured->get<double>();
  rows_.push_back(std::move(row));
}

std::string BenchReport::table(const std::string& heading, const Machine& machine) const {
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  Table table(titles);
  for (const Json& row : rows_) {
    std::vector<std::string> cells;
    for (const Column& column : columns_) cells.push_back(cell(row, column));
    table.add(std::move(cells));
  }
  std::string text = heading + "\n\n" + table.markdown() + "\n";
  for (const std::string& line : notes_) text += line + "\n";
  const Rates& rates = machine.rates;
  if (rates.flops <= 0) return text + fmt::format("floor: {}\n", machine.source);
  const std::string quantised =
      rates.quantised_flops > rates.flops
          ? fmt::format(" ({:.3f} of numbers of 8 bits)", rates.quantised_flops / 1e12)
          : "";
  return text + fmt::format("floor: {:.1f} GB/s read, {:.3f} TFLOP/s{}, {}\n",
                            rates.bytes_per_second / 1e9, rates.flops / 1e12, quantised,
                            machine.source);
}

Json BenchReport::to_json(const std::string& device, const Machine& machine) const {
  return {{"benchmark", benchmark_},
          {"device", device},
          {"machine",
           {{"bytes_per_second", machine.rates.bytes_per_second},
            {"flops", machine.rates.flops},
            {"quantised_flops", machine.rates.quantised_flops},
            {"source", machine.source}}},
          {"rows", rows_}};
}

// Where both go to standard output, the JSON stands alone.
void BenchReport::deliver(const Json& json, const std::string& text) {
  const std::string all = json.dump(2) + "\n";
  if (file_) {  // first: it stands also where nobody reads the table to its end
    file_->write(all);
    file_->close();
  }
  Output output;
  output.write(options_.json == "-" ? all : text);
  output.close();
}

void BenchReport::write(const EngineInfo& info, const Machine& machine, const ModelConfig& config,
                        int64_t peak_memory) {
  Json json = to_json(info.device, machine);
  json.update({{"model", options_.model},
               {"architecture", info.architecture},
               {"num_parameters", info.num_parameters},
               {"dtype", info.dtype},
               {"load_format", options_.engine.load_format},
               {"tensor_parallel_size", options_.engine.tensor_parallel_size},
               {"memory",
                {{"weights", info.weight_bytes},
                 {"workspace", info.workspace_bytes},
                 {"kv_cache", info.kv_cache_bytes},
                 {"peak_resident", peak_memory}}}});
  std::string text =
      table(fmt::format("{}: {}, {} parameters, {}, {}", options_.model, info.architecture,
                        with_commas(info.num_parameters), info.dtype, info.device),
            machine);
  if (peak_memory > 0)
    text += fmt::format("memory: {} resident at most; weights {}, KV cache {}\n",
                        binary_size(peak_memory), binary_size(info.weight_bytes),
                        binary_size(info.kv_cache_bytes));
  if (options_.peers) {
    const std::vector<PeerFigure> peers =
        peer_figures(benchmark_, config, info.device, options_.engine.tensor_parallel_size);
    json["peers"] = cli::to_json(peers);
    text += "\n" + to_table(peers);
  }
  deliver(json, text);
}

void BenchReport::write(const std::string& what, const std::string& device,
                        const Machine& machine) {
  deliver(to_json(device, machine), table(what + ", " + device, machine));
}

}  // namespace nanovllm::cli
