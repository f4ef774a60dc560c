#!/usr/bin/env python3
"""Writes a checkpoint of random bf16 weights in the exact shapes of a config.json, for measuring how fast real files load:

    tools/make_checkpoint.py bench/configs/qwen3-8b /tmp/qwen3-8b [--shard-mb 5000] [--tokenizer DIRECTORY]

Matrices are normal with sigma 0.02, norms 1, biases 0, the same at every run. Needs nothing beyond Python's standard library.
"""
import argparse
import array
import json
import pathlib
import random
import shutil
import struct

TABLE = 1 << 22  # random numbers; every matrix starts somewhere else in them


def shapes(c):
    """Names and shapes as Hugging Face writes them: the Qwen2, Qwen3, Llama and Mistral families."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, c.get("num_key_value_heads", heads) * head_dim
    name = c["architectures"][0]
    qkv_bias = name == "Qwen2ForCausalLM" or c.get("attention_bias", False)
    yield "model.embed_tokens.weight", [c["vocab_size"], hidden]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", [hidden]
        for part, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{layer}self_attn.{part}.weight", [rows, hidden]
            if qkv_bias:
                yield f"{layer}self_attn.{part}.bias", [rows]
        yield layer + "self_attn.o_proj.weight", [hidden, q]
        if name.startswith("Qwen3"):
            yield layer + "self_attn.q_norm.weight", [head_dim]
            yield layer + "self_attn.k_norm.weight", [head_dim]
        yield layer + "post_attention_layernorm.weight", [hidden]
        yield from mlp(c, layer + "mlp.", name == "Qwen3MoeForCausalLM")
    yield "model.norm.weight", [hidden]
    if not c.get("tie_word_embeddings", False):
        yield "lm_head.weight", [c["vocab_size"], hidden]


def mlp(c, prefix, is_sparse):
    hidden = c["hidden_size"]
    if is_sparse:
        yield prefix + "gate.weight", [c["num_experts"], hidden]
    inner = c["moe_intermediate_size"] if is_sparse else c["intermediate_size"]
    for place in [f"experts.{e}." for e in range(c["num_experts"])] if is_sparse else [""]:
        yield f"{prefix}{place}gate_proj.weight", [inner, hidden]
        yield f"{prefix}{place}up_proj.weight", [inner, hidden]
        yield f"{prefix}{place}down_proj.weight", [hidden, inner]


def bf16(value):
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def elements(shape):
    count = 1
    for n in shape:
        count *= n
    return count


def write_matrix(out, table, start, count):
    """`count` numbers of `table`, from `start` on and round again."""
    while count > 0:
        n = min(count, len(table) // 2 - start)
        out.write(table[2 * start : 2 * (start + n)])
        count, start = count - n, 0


def write_file(path, tensors, table, rng):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        size = 2 * elements(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            if len(shape) > 1:
                write_matrix(out, table, rng.randrange(len(table) // 2), elements(shape))
            else:
                value = bf16(0.0 if name.endswith(".bias") else 1.0)
                out.write(struct.pack("<H", value) * elements(shape))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=pathlib.Path, help="a directory with config.json")
    parser.add_argument("target", type=pathlib.Path, help="the directory to write")
    parser.add_argument("--shard-mb", type=int, default=5000, help="megabytes of one file (5000)")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a directory whose tokenizer files are copied")
    options = parser.parse_args()
    config = json.loads((options.config / "config.json").read_text())
    options.target.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.config / "config.json", options.target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if options.tokenizer and (options.tokenizer / name).exists():
            shutil.copy(options.tokenizer / name, options.target)

    rng = random.Random(0)
    few = [bf16(rng.gauss(0, 0.02)) for _ in range(1 << 16)]
    table = memoryview(array.array("H", rng.choices(few, k=TABLE)).tobytes())
    shards, filled = [[]], 0
    for name, shape in shapes(config):
        size = 2 * elements(shape)
        if shards[-1] and filled + size > options.shard_mb * 1_000_000:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += size
    if len(shards) == 1:
        write_file(options.target / "model.safetensors", shards[0], table, rng)
        return
    places = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_file(options.target / file, shard, table, rng)
        places.update((name, file) for name, _ in shard)
    total = sum(2 * elements(shape) for shard in shards for _, shape in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (options.target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()
