#include "weights/kv_cache.h"

#include <cstring>
#include <vector>

#include "io/quantization.h"
#include "io/safetensors/checkpoint.h"

namespace nanovllm {
namespace {

// Of a static scale, as of activations': quotients and products stay normal numbers.
constexpr float kLeastKvScale = kLeastScale, kMostKvScale = 1 / kLeastScale;

KvCacheScheme scheme_of(const QuantizationConfig* quantization) {
  return quantization ? quantization->kv_cache_scheme() : KvCacheScheme::none;
}

template <class T>
float number_at(const std::vector<std::byte>& bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
  return static_cast<float>(value);
}

/// The one number of a tensor.
float read_scale(const Checkpoint& checkpoint, const std::string& name) {
  const StoredTensor* tensor = checkpoint.find(name);
  check(tensor != nullptr, ErrorKind::model,
        "{}: the checkpoint lacks tensor {}, which config.json's kv_cache_scheme needs",
        checkpoint.directory(), name);
  const auto dtype = tensor->loadable_dtype();
  check(
      dtype && tensor->data.size() == size_of(*dtype), ErrorKind::model,
      "{}: tensor {} is {}, config.json's kv_cache_scheme asks for one number of F32, F16 or BF16",
      checkpoint.file_of(name), name, tensor->describe());
  std::vector<std::byte> bytes(tensor->data.size());
  checkpoint.read(bytes, tensor->data.data());
  const float scale = *dtype == DType::f32   ? number_at<float>(bytes)
                      : *dtype == DType::f16 ? number_at<f16>(bytes)
                                             : number_at<bf16>(bytes);
  check(scale >= kLeastKvScale && scale <= kMostKvScale, ErrorKind::model,
        "{}: tensor {} has a scale of {}: scales of keys and values are from 2^-100 to 2^100",
        checkpoint.file_of(name), name, scale);
  return scale;
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

void load_kv_scales(const Checkpoint& checkpoint, const QuantizationConfig* quantization,
                    std::span<KvCache> layers) {
  if (scheme_of(quantization) != KvCacheScheme::fp8_static) return;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].k.dtype != DType::e4m3) return;
    const std::string attention = fmt::format("model.layers.{}.self_attn.", i);
    layers[i].k_scale = read_scale(checkpoint, attention + "k_scale");
    layers[i].v_scale = read_scale(checkpoint, attention + "v_scale");
  }
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
