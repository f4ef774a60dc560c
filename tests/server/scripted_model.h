// A model that says one text, whatever it is asked: each piece of the text is a token, whose
// embedding leads to the next one's row of the head. Its tokenizer is models/demo's, with the
// pieces as added tokens, where accented Latin letters would be read as bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "io/json.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {

class ScriptedModel {
 public:
  /// `special`: pieces that are special tokens. The conversation ends, in the template, with a
  /// token that is no piece.
  ScriptedModel(const std::string& text, const std::string& chat_template,
                const std::set<std::string>& special = {}) {
    const std::string demo = NANOVLLM_SOURCE_DIR "/models/demo/";
    Json config = read_json_file(demo + "config.json");
    Json tokenizer = read_json_file(demo + "tokenizer.json");
    const std::vector<std::string> pieces = cut(text, special, tokenizer["model"]["vocab"]);
    const size_t first = config["vocab_size"];
    config["vocab_size"] = first + pieces.size();
    config["num_hidden_layers"] = 1;
    config["tie_word_embeddings"] = false;
    write("config.json", config);
    for (size_t i = 0; i < pieces.size(); ++i)
      tokenizer["added_tokens"].push_back({{"id", first + i},
                                           {"content", pieces[i]},
                                           {"single_word", false},
                                           {"lstrip", false},
                                           {"rstrip", false},
                                           {"normalized", false},
                                           {"special", special.contains(pieces[i])}});
    write("tokenizer.json", tokenizer);
    Json tokenizer_config = read_json_file(demo + "tokenizer_config.json");
    tokenizer_config["chat_template"] = chat_template;
    tokenizer_config.erase("added_tokens_decoder");
    write("tokenizer_config.json", tokenizer_config);
    write_weights(config, first, pieces.size());
  }

  std::string path() const { return directory_.path(); }

 private:
  /// Distinct pieces of four bytes and more, whole characters, none of them a token of `vocab`; the
  /// special ones whole.
  static std::vector<std::string> cut(const std::string& text, const std::set<std::string>& special,
                                      const Json& vocab) {
    std::vector<std::string> pieces;
    const auto is_taken = [&](const std::string& piece) {
      return vocab.contains(piece) || std::ranges::find(pieces, piece) != pieces.end();
    };
    for (size_t at = 0; at < text.size(); at += pieces.back().size()) {
      size_t length = 0, limit = text.size();
      for (const std::string& mark : special) {
        if (text.compare(at, mark.size(), mark) == 0) length = mark.size();
        limit = std::min(limit, text.find(mark, at + 1));
      }
      if (length == 0) {
        length = std::min<size_t>(4, limit - at);
        while (at + length < limit &&
               ((text[at + length] & 0xC0) == 0x80 || is_taken(text.substr(at, length))))
          ++length;
        if (limit - at - length < 4) length = limit - at;  // a short rest may be a token
      }
      pieces.push_back(text.substr(at, length));
    }
    return pieces;
  }

  void write(const char* name, const Json& json) {
    std::ofstream(directory_.path() / name) << json.dump();
  }

  void write_weights(const Json& config, size_t first, size_t pieces) {
    const int64_t hidden = config["hidden_size"], vocab = config["vocab_size"],
                  inner = config["intermediate_size"], head = config["head_dim"],
                  q = config["num_attention_heads"].get<int64_t>() * head,
                  kv = config["num_key_value_heads"].get<int64_t>() * head;
    const auto filled = [](const std::string& name, std::vector<int64_t> shape, float value) {
      size_t count = 1;
      for (const int64_t n : shape) count *= static_cast<size_t>(n);
      StoredBytes tensor{name, "BF16", std::string(2 * count, '\0'), std::move(shape)};
      for (size_t i = 0; i < count; ++i) set(tensor, i, value);
      return tensor;
    };
    const std::string layer = "model.layers.0.";
    std::vector<StoredBytes> tensors = {
        filled("model.norm.weight", {hidden}, 1),
        filled(layer + "input_layernorm.weight", {hidden}, 1),
        filled(layer + "post_attention_layernorm.weight", {hidden}, 1),
        filled(layer + "self_attn.q_norm.weight", {head}, 1),
        filled(layer + "self_attn.k_norm.weight", {head}, 1),
        filled(layer + "self_attn.q_proj.weight", {q, hidden}, 0),
        filled(layer + "self_attn.k_proj.weight", {kv, hidden}, 0),
        filled(layer + "self_attn.v_proj.weight", {kv, hidden}, 0),
        filled(layer + "self_attn.o_proj.weight", {hidden, q}, 0),
        filled(layer + "mlp.gate_proj.weight", {inner, hidden}, 0),
        filled(layer + "mlp.up_proj.weight", {inner, hidden}, 0),
        filled(layer + "mlp.down_proj.weight", {hidden, inner}, 0),
        filled("model.embed_tokens.weight", {vocab, hidden}, 0),
        filled("lm_head.weight", {vocab, hidden}, 0)};
    // Token of piece i: direction i + 1; any other: direction 0. Direction i leads to piece i, the
    // last one to the end.
    const auto width = static_cast<size_t>(hidden);
    StoredBytes &embedding = tensors[tensors.size() - 2], &rows = tensors.back();
    for (size_t token = 0; token < first; ++token) set(embedding, token * width, 1);
    for (size_t i = 0; i < pieces; ++i) {
      set(embedding, (first + i) * width + i + 1, 1);
      set(rows, (first + i) * width + i, 1);
    }
    set(rows, config["eos_token_id"].get<size_t>() * width + pieces, 1);
    write_tensors(directory_.path() / "model.safetensors", tensors);
  }

  static void set(StoredBytes& tensor, size_t i, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value) >> 16;
    tensor.bytes[2 * i] = static_cast<char>(bits & 0xFF);
    tensor.bytes[2 * i + 1] = static_cast<char>(bits >> 8);
  }

  TempDirectory directory_;
};

}  // namespace nanovllm
