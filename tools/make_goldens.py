#!/usr/bin/env python3
"""Makes tests/data/goldens: small random checkpoints and what Hugging Face transformers computes with them.

    python tools/make_goldens.py            # needs torch and transformers; takes a few minutes on a CPU
    python tools/make_goldens.py NAME...    # only these

Every directory is a model as save_pretrained() writes it, plus golden.json:
  prompts[i].ids            the prompt
  prompts[i].logprobs[p]    [[token, logprob], ...] at prompt position p + 1: the actual token, then the five likeliest (f32)
  prompts[i].gap[p]         the logit gap between the likeliest and the second
  prompts[i].greedy         64 greedily chosen tokens (f32), with greedy_logprobs
  bf16_error                largest error of transformers' own bf16 run in these logprobs: the scale of what bf16 costs
"""
import json
import pathlib
import shutil
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, SeedOssConfig

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens"
LENGTHS = (1, 2, 7, 33, 64, 65, 200)
GREEDY = 64

COMMON = dict(max_position_embeddings=512, rms_norm_eps=1e-6, eos_token_id=None, bos_token_id=None, pad_token_id=None,
              initializer_range=0.12)
# Shared by the models that show a RoPE scaling. Prompts are longer than the 64 positions they "were trained with".
SMALL = dict(vocab_size=131, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=64, tie_word_embeddings=True)
EXPERTS = dict(num_experts=12, num_experts_per_tok=3, moe_intermediate_size=40)
MODELS = {
    # name: (config class, arguments, dtype of the file, shard size)
    "qwen3-tied-gqa": (Qwen3Config, dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                         tie_word_embeddings=True), torch.bfloat16, None),
    # Its config.json is rewritten in transformers 4's spelling below.
    "qwen3-untied-mqa": (Qwen3Config, dict(vocab_size=301, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
                                           num_attention_heads=4, num_key_value_heads=1, head_dim=128,
                                           tie_word_embeddings=False, rope_theta=1e6), torch.float32, None),
    "qwen3-sharded-mha-80": (Qwen3Config, dict(vocab_size=129, hidden_size=40, intermediate_size=56, num_hidden_layers=3,
                                               num_attention_heads=2, num_key_value_heads=2, head_dim=80,
                                               tie_word_embeddings=False), torch.float16, "40KB"),
    "qwen3-head-96": (Qwen3Config, dict(vocab_size=131, hidden_size=72, intermediate_size=64, num_hidden_layers=1,
                                        num_attention_heads=6, num_key_value_heads=2, head_dim=96,
                                        tie_word_embeddings=True), torch.bfloat16, None),
    "qwen3-head-256": (Qwen3Config, dict(vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=3, num_key_value_heads=1, head_dim=256,
                                         tie_word_embeddings=True), torch.bfloat16, None),
    "qwen2-tied-gqa": (Qwen2Config, dict(vocab_size=257, hidden_size=128, intermediate_size=72, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                                         initializer_range=0.08,
                                         rope_parameters=dict(rope_type="default", rope_theta=1e6)), torch.bfloat16, None),
    "llama-untied-biases": (LlamaConfig, dict(vocab_size=129, hidden_size=48, intermediate_size=56, num_hidden_layers=2,
                                              num_attention_heads=3, num_key_value_heads=1, head_dim=80,
                                              attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                                              rms_norm_eps=1e-5), torch.float16, None),
    "llama-rope-llama3": (LlamaConfig, dict(SMALL, rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)), torch.bfloat16, None),
    "llama-rope-linear": (LlamaConfig, dict(SMALL, rope_parameters=dict(
        rope_type="linear", rope_theta=1e4, factor=4.0)), torch.bfloat16, None),
    # Within max_position_embeddings, where it changes nothing.
    "llama-rope-dynamic": (LlamaConfig, dict(SMALL, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, factor=2.5)), torch.bfloat16, None),
    "llama-rope-yarn-explicit": (LlamaConfig, dict(SMALL, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=8.0, attention_factor=1.4, beta_fast=8.0, beta_slow=0.5, truncate=False,
        original_max_position_embeddings=64)), torch.bfloat16, None),
    "qwen3-rope-yarn": (Qwen3Config, dict(SMALL, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64)), torch.bfloat16, None),
    # A window as wide as the longest text.
    "mistral-untied-gqa": (MistralConfig, dict(vocab_size=151, hidden_size=56, intermediate_size=80, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                               tie_word_embeddings=False, sliding_window=512, rms_norm_eps=1e-5),
                           torch.bfloat16, None),
    # Windows narrower than the prompts: in all layers, and in the later ones.
    "mistral-window": (MistralConfig, dict(SMALL, sliding_window=24), torch.bfloat16, None),
    "qwen2-window-by-layer": (Qwen2Config, dict({k: v for k, v in SMALL.items() if k != "head_dim"}, hidden_size=128,
                                                initializer_range=0.08, use_sliding_window=True, sliding_window=70,
                                                max_window_layers=1), torch.bfloat16, None),
    # Dense layers by decoder_sparse_step (0 and 2) and by mlp_only_layers (1); one layer of experts is left.
    "qwen3-moe-some-dense": (Qwen3MoeConfig, dict(SMALL, **EXPERTS, num_hidden_layers=4, decoder_sparse_step=2,
                                                  mlp_only_layers=[1], norm_topk_prob=True), torch.bfloat16, None),
    "qwen3-moe-weights-as-they-are": (Qwen3MoeConfig, dict(SMALL, **EXPERTS, norm_topk_prob=False), torch.bfloat16,
                                      "100KB"),
    # Heads that 2, 4 and 8 ranks divide, and vocabularies that they do not. Biases on the sharded inputs, too.
    "llama-parallel-biases": (LlamaConfig, dict(vocab_size=301, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                                                num_attention_heads=8, num_key_value_heads=2, head_dim=64,
                                                attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
                              torch.float32, None),
    "qwen3-parallel-tied": (Qwen3Config, dict(vocab_size=203, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                              num_attention_heads=8, num_key_value_heads=8, head_dim=64,
                                              tie_word_embeddings=True), torch.bfloat16, None),
    "qwen3-moe-parallel": (Qwen3MoeConfig, dict(SMALL, **EXPERTS, num_attention_heads=8, num_key_value_heads=2,
                                                norm_topk_prob=True), torch.bfloat16, None),
    # Its biases, unlike those of llama-parallel-biases, are on query, key and value alone.
    "qwen2-parallel": (Qwen2Config, dict(vocab_size=203, hidden_size=256, intermediate_size=48, num_hidden_layers=1,
                                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                                         initializer_range=0.07),
                       torch.bfloat16, None),
    # Biases on query, key and value by attention_bias, and one on the output by a field of its own.
    "seed-oss-biases": (SeedOssConfig, dict(SMALL, attention_bias=True, attention_out_bias=False), torch.bfloat16, None),
}


def make_model(config_class, arguments, dtype):
    config = config_class(**{**COMMON, **arguments})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms of one would hide a norm weight that is not applied
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            if name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
        # The head's spread decides how peaked the distributions are; keep them lively but not degenerate.
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())
    return model


def spell_as_transformers_4(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def logprobs_of(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return logits, torch.log_softmax(logits.double(), -1)


def describe_prompt(model, ids):
    logits, logprobs = logprobs_of(model, ids)
    rows, gaps = [], []
    for p in range(len(ids) - 1):
        best = torch.topk(logprobs[p], 5)
        rows.append([[ids[p + 1], round(logprobs[p, ids[p + 1]].item(), 6)]]
                    + [[t.item(), round(v.item(), 6)] for t, v in zip(best.indices, best.values)])
        gaps.append(round((best.values[0] - best.values[1]).item(), 6))
    greedy, greedy_logprobs, greedy_gaps, text = [], [], [], list(ids)
    for _ in range(GREEDY):
        _, row = logprobs_of(model, text)
        best = torch.topk(row[-1], 2)
        greedy.append(best.indices[0].item())
        greedy_logprobs.append(round(best.values[0].item(), 6))
        greedy_gaps.append(round((best.values[0] - best.values[1]).item(), 6))
        text.append(greedy[-1])
    return dict(ids=ids, logprobs=rows, gap=gaps, greedy=greedy, greedy_logprobs=greedy_logprobs, greedy_gap=greedy_gaps)


def bf16_error(model, prompts):
    half = AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16).eval()
    half.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    exact = AutoModelForCausalLM.from_config(model.config).eval()
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    return max((logprobs_of(half, p)[1] - logprobs_of(exact, p)[1]).abs().max().item() for p in prompts)


def main():
    unknown = set(sys.argv[1:]) - set(MODELS)
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for number, (name, (config_class, arguments, dtype, shard_size)) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(number)
        model = make_model(config_class, arguments, dtype)
        target = OUT / name
        shutil.rmtree(target, ignore_errors=True)
        stored = make_model(config_class, arguments, dtype)
        stored.load_state_dict(model.state_dict())
        stored.to(dtype).save_pretrained(target, **({"max_shard_size": shard_size} if shard_size else {}))
        (target / "generation_config.json").unlink(missing_ok=True)
        if name == "qwen3-untied-mqa":
            spell_as_transformers_4(target / "config.json")
        vocab = model.config.vocab_size
        prompts = [torch.randint(0, vocab, (n,)).tolist() for n in LENGTHS]
        golden = dict(model=name, bf16_error=round(bf16_error(model, prompts), 4),
                      prompts=[describe_prompt(model, p) for p in prompts])
        (target / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
        size = sum(f.stat().st_size for f in target.iterdir()) >> 10
        gaps = sorted(g for p in golden["prompts"] for g in p["greedy_gap"])
        print(f"{name}: {size} KiB, bf16 error {golden['bf16_error']}, smallest greedy gaps {gaps[:3]}")


if __name__ == "__main__":
    main()
