#!/usr/bin/env python3
"""Writes tests/data/rope/cases.json: RoPE parameters of published models and variations on them, and the frequencies and
the rows of the table that Hugging Face transformers computes from them.

    python tools/make_rope_fixtures.py      # needs torch and transformers

Each case: `config`, a LlamaForCausalLM's config.json; `inv_freq`, `attention_scaling`; `positions` and, for each, `cos` and
`sin` of every rotated pair. Numbers are f32, written so that they read back to the same bits.
"""

import json
import pathlib

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PATH = pathlib.Path(__file__).resolve().parent.parent / "tests/data/rope/cases.json"

CASES = {
    # name: (head_dim, max_position_embeddings, RoPE)
    "llama-2": (128, 4096, dict(rope_type="default", rope_theta=10000.0)),
    "llama-3": (128, 8192, dict(rope_type="default", rope_theta=500000.0)),
    "llama-3.1": (128, 131072, dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                                    high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "llama-3.2": (64, 131072, dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
                                   high_freq_factor=4.0, original_max_position_embeddings=8192)),
    "llama3-odd-factors": (96, 4096, dict(rope_type="llama3", rope_theta=123456.0, factor=3.7, low_freq_factor=1.3,
                                          high_freq_factor=5.9, original_max_position_embeddings=1000)),
    "linear-8": (128, 16384, dict(rope_type="linear", rope_theta=10000.0, factor=8.0)),
    "linear-2.7": (80, 4096, dict(rope_type="linear", rope_theta=10000.0, factor=2.7)),
    "dynamic-within": (128, 4096, dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
    "qwen2.5-yarn": (128, 131072, dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0,
                                       original_max_position_embeddings=32768)),
    "yarn-64k": (128, 65536, dict(rope_type="yarn", rope_theta=10000.0, factor=16.0,
                                  original_max_position_embeddings=4096)),
    "yarn-untruncated": (64, 131072, dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                          truncate=False, original_max_position_embeddings=4096)),
    "yarn-attention-factor": (128, 8192, dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, attention_factor=0.7,
                                              beta_fast=16.0, beta_slow=2.0, original_max_position_embeddings=2048)),
    "yarn-mscale": (64, 163840, dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, mscale=1.0, mscale_all_dim=0.8,
                                     original_max_position_embeddings=4096)),
    # Contexts so short that the ramp's two ends meet, and pass each other.
    "yarn-empty-ramp": (64, 24, dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=6)),
    "yarn-inverted-ramp": (64, 16, dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4)),
}


def describe(name, head_dim, limit, rope):
    config = LlamaConfig(hidden_size=2 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
                         head_dim=head_dim, max_position_embeddings=limit, rope_parameters=dict(rope))
    rotary = LlamaRotaryEmbedding(config)
    positions = sorted({0, 1, 2, 17, 1000, 4095, limit // 2 + 1, limit - 1} & set(range(limit)))
    cos, sin = (t[0, :, :head_dim // 2].tolist() for t in rotary(torch.zeros(1), torch.tensor([positions])))
    shape = dict(architectures=["LlamaForCausalLM"], hidden_size=2 * head_dim, intermediate_size=8, num_hidden_layers=1,
                 num_attention_heads=2, vocab_size=8, head_dim=head_dim, max_position_embeddings=limit)
    return dict(name=name, config=shape | dict(rope_parameters=rope), inv_freq=rotary.inv_freq.tolist(),
                attention_scaling=rotary.attention_scaling, positions=positions, cos=cos, sin=sin)


def shortest(value):
    """The shortest decimal that reads back to the same f32."""
    if isinstance(value, float):
        return next(float(text) for digits in range(1, 10) if torch.tensor(float(text := f"{value:.{digits}g}")).item() == value)
    if isinstance(value, list):
        return [shortest(v) for v in value]
    return value


def main():
    cases = [describe(name, *case) for name, case in CASES.items()]
    for case in cases:
        for key in ("inv_freq", "cos", "sin"):
            case[key] = shortest(case[key])
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text("[" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "]\n")


if __name__ == "__main__":
    main()
