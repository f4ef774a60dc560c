// quantization_config of config.json: which modules of a checkpoint are quantised, and how. Read as
// transformers, compressed-tensors, GPTQ, AutoAWQ and vLLM write it; whatever would change a number
// and is not known is refused by name. docs/quantisation.md lists what loads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/weight.h"
#include "io/json_object.h"

namespace nanovllm {

class ModuleRules;

/// How the numbers of one module's weight [n, k] lie in the checkpoint.
enum class QuantStorage : uint8_t {
  packed,  ///< compressed-tensors: weight_packed i32 [n, k / (32 / bits)], low bits first
  gptq,    ///< qweight i32 [k / (32 / bits), n], low bits first
  awq,     ///< AutoAWQ's gemm: qweight i32 [k, n / 8], eight columns interleaved
  e4m3,    ///< weight F8_E4M3 [n, k]
  int8,    ///< weight I8 [n, k], of int4 as well
};

/// The numbers that share a scale.
enum class QuantScales : uint8_t {
  tensor,   ///< all
  channel,  ///< a row of the weight
  group,    ///< `group_size` columns of a row
  block,    ///< kQuantBlock rows by as many columns
};
constexpr int64_t kQuantBlock = 128;

/// How the rows that meet the weight are quantised.
enum class QuantActivations : uint8_t {
  none,    ///< not at all
  token,   ///< each row by its largest magnitude
  group,   ///< each 128 columns of a row by theirs
  tensor,  ///< by a number of the checkpoint, input_scale
};

struct QuantScheme {
  QuantStorage storage = QuantStorage::packed;
  QuantScales scales = QuantScales::group;
  QuantActivations activations = QuantActivations::none;
  int bits = 4;             ///< of an integer: 4 or 8
  int64_t group_size = 0;   ///< with QuantScales::group
  bool symmetric = true;    ///< no zero points, or (GPTQ) all of them the middle
  bool is_ordered = false;  ///< g_idx says which group a column belongs to
  int zero_offset = 0;      ///< what GPTQ's first format adds to the zero points that it stores
  std::string scale_name;   ///< of the tensor, behind "<module>."
  bool while_loading =
      false;            ///< the checkpoint has the plain weight, which is rounded as it is read
  bool is_kept = true;  ///< false: numbers of the model's dtype are wanted in memory

  bool operator==(const QuantScheme&) const = default;
  /// Whether its numbers are stored as a byte each, as they are.
  bool is_bytes() const { return storage == QuantStorage::e4m3 || storage == QuantStorage::int8; }
  /// The excess of an integer as it is stored or, of a plain weight, made.
  int middle() const { return is_bytes() && !(while_loading && bits == 4) ? 0 : 1 << (bits - 1); }
  /// The format that keeps columns [begin, end) of such a weight as they are, and quantises the
  /// rows that meet it as the scheme says where that is defined; nothing where none does: the
  /// columns are not in the order of their groups, or cut one.
  std::optional<WeightFormat> kept_format(int64_t begin, int64_t end) const;
};

/// How kv_cache_scheme wants keys and values kept.
enum class KvCacheScheme : uint8_t {
  none,        ///< in the model's dtype
  fp8,         ///< E4M3, by scales that are computed
  fp8_static,  ///< E4M3, by k_scale and v_scale of each layer, or of its heads, in the checkpoint
};

/// Immutable; copies share what they hold.
class QuantizationConfig {
 public:
  /// `config` is the object of that name. Throws Error(model) naming the field and its value.
  /// `warnings` gets one line for each part that is read and not needed.
  QuantizationConfig(const JsonObject& config, std::vector<std::string>& warnings);

  /// The scheme of a linear layer by its checkpoint name, "model.layers.0.mlp.up_proj"; null where
  /// the layer is plain. Lives as long as this object.
  const QuantScheme* find(const std::string& module) const;
  /// Whether a scheme quantises the rows that meet its weights.
  bool has_activations() const;
  KvCacheScheme kv_cache_scheme() const { return kv_cache_scheme_; }
  /// "gptq", "compressed-tensors": for messages.
  const std::string& method() const { return method_; }
  /// The bits of most weights, for people: "int4 (gptq)", "fp8 (fp8)";
  /// "w4a8 (compressed-tensors)" where int4 meets quantised activations.
  std::string describe() const;
  /// The same schemes, of weights that are plain in the checkpoint.
  void quantise_while_loading();
  /// The same weights, kept in the model's dtype.
  void dequantise_while_loading();

 private:
  /// Modules of one scheme; those without any are plain. The first group that has a module counts.
  struct Group {
    std::optional<QuantScheme> scheme;
    std::shared_ptr<const ModuleRules> modules;
  };
  void add(std::optional<QuantScheme> scheme, ModuleRules modules);
  void read_compressed_tensors(const JsonObject& config, std::vector<std::string>& warnings);
  void read_gptq(const JsonObject& config);
  void read_awq(const JsonObject& config);
  void read_dynamic(const JsonObject& config, const QuantScheme& scheme);
  void read_fp8(const JsonObject& config);
  void read_auto_round(const JsonObject& config);
  void read_extra_config(const JsonObject& config, const QuantScheme& scheme);
  void read_modelopt(const JsonObject& config, std::vector<std::string>& warnings);
  /// One scheme for all linear modules but those of groups before and those in lists of names: of
  /// modules, and of parts of them ("self_attn", "layers.0.").
  void add_all_linear(QuantScheme scheme, const JsonObject& config);

  std::string method_;
  std::vector<Group> groups_;
  KvCacheScheme kv_cache_scheme_ = KvCacheScheme::none;
};

}  // namespace nanovllm
