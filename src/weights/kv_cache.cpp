#include "weights/kv_cache.h"

#include <vector>

#include "io/quantised/quantization.h"
#include "io/safetensors/checkpoint.h"

namespace nanovllm {
namespace {

// Of a static scale, as of activations': quotients and products stay normal numbers.
constexpr float kLeastKvScale = kLeastScale, kMostKvScale = 1 / kLeastScale;

KvCacheScheme scheme_of(const QuantizationConfig* quantization) {
  return quantization ? quantization->kv_cache_scheme() : KvCacheScheme::none;
}

/// A scale for each of `heads`: the numbers of a tensor, or its one number for all of them.
std::vector<float> read_scales(const Checkpoint& checkpoint, const std::string& name,
                               int64_t heads) {
  const StoredTensor* tensor = checkpoint.find(name);
  check(tensor != nullptr, ErrorKind::model,
        "{}: the checkpoint lacks tensor {}, which config.json's kv_cache_scheme needs",
        checkpoint.directory(), name);
  const auto dtype = tensor->loadable_dtype();
  const size_t count = dtype ? tensor->data.size() / size_of(*dtype) : 0;
  check(count == 1 || count == static_cast<size_t>(heads), ErrorKind::model,
        "{}: tensor {} is {}, config.json's kv_cache_scheme asks for one number, or one of each of "
        "the {} heads, of F32, F16 or BF16",
        checkpoint.file_of(name), name, tensor->describe(), heads);
  std::vector<std::byte> bytes(tensor->data.size());
  checkpoint.read(bytes, tensor->data.data());
  std::vector<float> scales = tensor->to_floats(bytes);
  for (const float scale : scales)
    check(scale >= kLeastKvScale && scale <= kMostKvScale, ErrorKind::model,
          "{}: tensor {} has a scale of {}: scales of keys and values are from 2^-100 to 2^100",
          checkpoint.file_of(name), name, scale);
  scales.resize(static_cast<size_t>(heads), scales.front());
  return scales;
}

bool has_static_scales(const QuantizationConfig* quantization, DType cache_dtype) {
  return cache_dtype == DType::e4m3 && scheme_of(quantization) == KvCacheScheme::fp8_static;
}

}  // namespace

DType kv_cache_dtype(const Backend& device, const QuantizationConfig* quantization,
                     const std::string& asked, DType dtype) {
  if (asked == "auto") {
    const bool has_scheme = scheme_of(quantization) != KvCacheScheme::none;
    return has_scheme && device.has_e4m3_cache() ? DType::e4m3 : dtype;
  }
  if (asked == "bfloat16") {
    check(dtype == DType::bf16, ErrorKind::invalid_argument,
          "kv_cache_dtype bfloat16 does not go with dtype {}: use auto or fp8", name_of(dtype));
    return dtype;
  }
  check(asked == "fp8" || asked == "fp8_e4m3", ErrorKind::invalid_argument,
        "kv_cache_dtype {} is not known: use auto, bfloat16 or fp8", quote(asked));
  check(device.has_e4m3_cache(), ErrorKind::invalid_argument,
        "kv_cache_dtype {} is not supported on {}: use auto or bfloat16", asked, device.name());
  return DType::e4m3;
}

size_t kv_scale_bytes(const QuantizationConfig* quantization, DType cache_dtype, size_t rows) {
  return has_static_scales(quantization, cache_dtype) ? rows * sizeof(float) : 0;
}

Buffer load_kv_scales(Backend& device, const Checkpoint& checkpoint,
                      const QuantizationConfig* quantization, int64_t num_heads, int64_t first,
                      std::span<KvCache> layers) {
  if (layers.empty() || !has_static_scales(quantization, layers[0].k.dtype)) return {};
  const int64_t heads = layers[0].k.shape[1];
  std::vector<float> scales;
  for (size_t i = 0; i < layers.size(); ++i)
    for (const char* which : {"k", "v"}) {
      std::string name = fmt::format("model.layers.{}.self_attn.{}_scale", i, which);
      // Early versions of compressed-tensors, and ModelOpt, have names of their own.
      for (const std::string end : {"output", which})
        if (const std::string other =
                fmt::format("model.layers.{}.self_attn.{}_proj.{}_scale", i, which, end);
            checkpoint.find(other))
          name = other;
      const auto all = read_scales(checkpoint, name, num_heads);
      scales.insert(scales.end(), all.begin() + first, all.begin() + first + heads);
    }
  Buffer buffer = device.allocate(scales.size() * sizeof(float));
  const Tensor on_device(buffer.get(), DType::f32, {std::ssize(scales)}, device.device());
  device.copy(on_device, Tensor(scales.data(), DType::f32, {std::ssize(scales)}));
  device.synchronize();
  for (int64_t i = 0; i < std::ssize(layers); ++i) {
    layers[static_cast<size_t>(i)].k_scales = on_device.rows(2 * i * heads, (2 * i + 1) * heads);
    layers[static_cast<size_t>(i)].v_scales =
        on_device.rows((2 * i + 1) * heads, (2 * i + 2) * heads);
  }
  return buffer;
}

std::string describe_kv_cache(const QuantizationConfig* quantization, DType cache_dtype) {
  const KvCacheScheme scheme = scheme_of(quantization);
  if (cache_dtype != DType::e4m3)
    return scheme == KvCacheScheme::none
               ? ""
               : "config.json: kv_cache_scheme is ignored: keys and values are kept in the model's "
                 "dtype";
  return scheme == KvCacheScheme::fp8_static
             ? "keys and values are fp8, with the checkpoint's scales"
             : "keys and values are fp8, with a scale for each token and head";
}

}  // namespace nanovllm
