"""Writes tests/data/configs/cases.json: config.json files in the spellings of transformers 4 and 5, and what transformers
makes of them.

    python tools/make_config_fixtures.py

Each case: the shape of a published model (or a variation on one), `old` as transformers 4 wrote it, `new` as version 5
saves it again, and `expected`: the values that the modeling code reads.
"""

import json
import pathlib

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PATH = pathlib.Path(__file__).resolve().parent.parent / "tests/data/configs/cases.json"

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, attention_dropout=0.0,
             bos_token_id=151643, eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=1024,
             initializer_range=0.02, intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
             num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None,
             rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, torch_dtype="bfloat16",
             transformers_version="4.51.0", use_cache=True, use_sliding_window=False, vocab_size=151936)
QWEN3_MOE = QWEN3 | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1, hidden_size=2048,
                         intermediate_size=6144, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
                         norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
                         num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
                         router_aux_loss_coef=0.001, tie_word_embeddings=False)
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", attention_dropout=0.0, bos_token_id=151643,
             eos_token_id=151645, hidden_act="silu", hidden_size=3584, initializer_range=0.02, intermediate_size=18944,
             max_position_embeddings=32768, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28,
             num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072,
             tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=152064)
LLAMA2 = dict(architectures=["LlamaForCausalLM"], model_type="llama", bos_token_id=1, eos_token_id=2, hidden_act="silu",
              hidden_size=4096, initializer_range=0.02, intermediate_size=11008, max_position_embeddings=4096,
              num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-05,
              rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16", use_cache=True, vocab_size=32000)
LLAMA3 = LLAMA2 | dict(attention_bias=False, attention_dropout=0.0, bos_token_id=128000, intermediate_size=14336,
                       eos_token_id=[128001, 128008, 128009], max_position_embeddings=131072, mlp_bias=False,
                       num_key_value_heads=8, rope_theta=500000.0, torch_dtype="bfloat16", vocab_size=128256,
                       rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=8192, rope_type="llama3"))
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", bos_token_id=1, eos_token_id=2, hidden_act="silu",
               hidden_size=4096, initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768,
               num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0,
               sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=32000)

SEED_OSS = dict(architectures=["SeedOssForCausalLM"], model_type="seed_oss", attention_bias=True, attention_dropout=0.1,
                attention_out_bias=False, bos_token_id=0, eos_token_id=2, head_dim=128, hidden_act="silu", hidden_size=5120,
                initializer_range=0.02, intermediate_size=27648, max_position_embeddings=524288, mlp_bias=False,
                num_attention_heads=80, num_hidden_layers=64, num_key_value_heads=8, pad_token_id=1, residual_dropout=0.1,
                rms_norm_eps=1e-06, rope_scaling=dict(rope_type="default"), rope_theta=10000000.0, tie_word_embeddings=False,
                torch_dtype="bfloat16", use_cache=True, vocab_size=155136)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def scaled(config, **scaling):
    return config | dict(rope_scaling=scaling)


CASES = {
    "qwen3-0.6b": QWEN3,
    "qwen3-32b": QWEN3 | dict(hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_hidden_layers=64,
                              max_window_layers=64, tie_word_embeddings=False),
    "qwen3, little said": without(QWEN3, "head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
                                  "rope_theta", "tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype",
                                  "hidden_act", "attention_bias") | dict(num_attention_heads=32, hidden_size=4096),
    "qwen3, kv heads null": QWEN3 | dict(num_key_value_heads=None),
    "qwen3, biases": QWEN3 | dict(attention_bias=True),
    "qwen3, sliding by max_window_layers": QWEN3 | dict(use_sliding_window=True, sliding_window=512, max_window_layers=20),
    "qwen3, sliding, window null": QWEN3 | dict(use_sliding_window=True),
    "qwen3, sliding, window absent": without(QWEN3, "sliding_window", "max_window_layers")
                                     | dict(use_sliding_window=True, num_hidden_layers=32),
    "qwen3, layer_types": QWEN3 | dict(use_sliding_window=True, sliding_window=256, num_hidden_layers=3,
                                       layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3, yarn": scaled(QWEN3, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    "qwen3, yarn, old type key": scaled(QWEN3, type="yarn", factor=2.5, original_max_position_embeddings=16384),
    "qwen3, yarn, no original": scaled(QWEN3, rope_type="yarn", factor=4.0),
    "qwen3, yarn, all fields": scaled(QWEN3, rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=16,
                                      beta_slow=2, mscale=0.707, mscale_all_dim=1.0, truncate=False),
    "qwen3, yarn, attention_factor": scaled(QWEN3, rope_type="yarn", factor=4.0, attention_factor=1.25),
    "qwen3, yarn, original outside": scaled(QWEN3, rope_type="yarn", factor=4.0) | dict(original_max_position_embeddings=8192),
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-moe, mixed layers": QWEN3_MOE | dict(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3, 5],
                                                norm_topk_prob=False),
    "qwen3-moe, little said": without(QWEN3_MOE, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                                      "decoder_sparse_step", "mlp_only_layers", "num_key_value_heads", "tie_word_embeddings"),
    "qwen3-moe, sliding": QWEN3_MOE | dict(use_sliding_window=True, sliding_window=1024),
    "qwen2.5-7b": QWEN2,
    "qwen2.5-0.5b": QWEN2 | dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_hidden_layers=24,
                                 num_key_value_heads=2, tie_word_embeddings=True, max_window_layers=21, vocab_size=151936),
    "qwen2, sliding": QWEN2 | dict(use_sliding_window=True, max_window_layers=7),
    "qwen2, little said": without(QWEN2, "num_key_value_heads", "tie_word_embeddings", "rope_theta", "max_position_embeddings")
                          | dict(num_attention_heads=32, hidden_size=4096),
    "llama-2-7b": LLAMA2,
    "llama-2, linear": scaled(LLAMA2, type="linear", factor=4.0),
    "llama-2, dynamic": scaled(LLAMA2, type="dynamic", factor=2.0),
    "llama-3.1-8b": LLAMA3,
    "llama-3.2-1b": LLAMA3 | dict(head_dim=64, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                  tie_word_embeddings=True,
                                  rope_scaling=LLAMA3["rope_scaling"] | dict(factor=32.0)),
    "llama, biases": LLAMA3 | dict(attention_bias=True, mlp_bias=True),
    "llama, little said": without(LLAMA2, "num_key_value_heads", "bos_token_id", "eos_token_id", "rms_norm_eps",
                                  "max_position_embeddings", "tie_word_embeddings", "torch_dtype"),
    "llama, eos null": LLAMA2 | dict(eos_token_id=None, bos_token_id=None),
    "mistral-7b-v0.1": MISTRAL,
    "mistral-7b-v0.3": MISTRAL | dict(sliding_window=None, rope_theta=1000000.0, vocab_size=32768),
    "mistral-nemo": MISTRAL | dict(head_dim=128, hidden_size=5120, num_hidden_layers=40, max_position_embeddings=131072,
                                   rope_theta=1000000.0, sliding_window=None, vocab_size=131072),
    "mistral, little said": without(MISTRAL, "sliding_window", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    "seed-oss-36b": SEED_OSS,
    "seed-oss, biases elsewhere": SEED_OSS | dict(attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "seed-oss, little said": without(SEED_OSS, "attention_bias", "attention_out_bias", "mlp_bias", "head_dim", "bos_token_id",
                                     "eos_token_id", "num_key_value_heads", "max_position_embeddings", "rope_scaling"),
}


def expected(config):
    family = config.model_type
    rope = config.rope_parameters
    heads = config.num_attention_heads
    function = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    attention_factor = function(config, "cpu")[1] if function else 1.0  # completes rope as well
    types = getattr(config, "layer_types", None)
    if types is None:
        slides = getattr(config, "sliding_window", None) is not None and family != "llama"
        types = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    experts = getattr(config, "num_experts", None)
    eos = config.eos_token_id
    return {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "output_bias": bool(getattr(config, "attention_out_bias", getattr(config, "attention_bias", False))),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding_window": config.sliding_window if "sliding_attention" in types else 0,
        "layer_types": types,
        "dtype": str(config.dtype).removeprefix("torch.") if config.dtype else None,
        "eos_token_id": [] if eos is None else eos if isinstance(eos, list) else [eos],
        "bos_token_id": config.bos_token_id,
        "rope_parameters": dict(rope),
        "attention_factor": attention_factor,
        "sparse_layers": [
            i for i in range(config.num_hidden_layers)
            if experts and i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0
        ],
        "experts": [experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob] if experts else None,
    }


def main():
    cases = []
    for name, old in CASES.items():
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(old)))
        new = json.loads(config.to_json_string(use_diff=True))
        cases.append({"name": name, "old": old, "new": new, "expected": expected(config)})
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(len(cases), "cases with transformers", transformers.__version__)


if __name__ == "__main__":
    main()
