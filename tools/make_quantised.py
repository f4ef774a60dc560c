#!/usr/bin/env python3
"""Makes tests/data/goldens/quantised-*: small random Qwen3 checkpoints in the layouts that quantising tools write, and what they must give.

    python tools/make_quantised.py            # needs numpy alone
    python tools/make_quantised.py NAME...    # only these

The layouts are those of quantised_layouts.py. golden.json is as tools/make_goldens.py has it, with numbers from float64 computation on
the dequantised weights; bf16_error is that of a run whose weights and results are rounded to bf16. Beside them:
  weights[module]    FNV-1a (64 bits) of the dequantised weight's bytes, row-major, rounded to bf16
  quantised_rows     where the scheme quantises activations as docs/contract.md defines it, what is to be had then, on 1 and on 2 ranks:
                     logprobs, for each token before its successor, the successor's and the five best, of a run whose results are rounded
                     to bf16 where the program's are; of the tokens a tenth are nearer to those than `near` with f32's errors, and none
                     or less than `unquantised` where activations stay as they are; error, the most that quantising them adds to `prompts`
"""
import json
import pathlib
import re
import shutil
import sys

import numpy as np

from quantised_layouts import File, as_bf16, awq, bytes_of, fnv, gptq, packed, quantised_rows, to_bf16

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens"
LENGTHS = (2, 33, 65)
GREEDY = 64
SIZES = dict(vocab_size=67, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, head_dim=64)


# -- Configurations --------------------------------------------------------------------------------------------------------------
def arguments(**changes):
    return {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": "minmax",
            "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "int", **changes}


def compressed(form, weights, inputs=None, targets=("Linear",), ignore=("lm_head",), more=None):
    groups = {"group_0": {"input_activations": inputs, "output_activations": None, "targets": list(targets), "weights": weights}}
    groups.update(more or {})
    return {"config_groups": groups, "format": form, "global_compression_ratio": 1.5, "ignore": list(ignore),
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed"}


TOKENS = dict(dynamic=True, observer=None, strategy="token")
EXPERTS = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
ROUTER = ["lm_head", "re:.*mlp.gate$"]


def but_for_router(how, plain=(), **options):
    return lambda module: None if module.endswith(("mlp.gate", *plain)) else (how, options)


MODELS = {
    # name: (quantization_config, changes of config.json, module -> function that writes it; None: plain)
    "packed-128": (compressed("pack-quantized", arguments(num_bits=4, strategy="group", group_size=128)),
                   dict(intermediate_size=256), lambda m: (packed, dict(group=128))),
    "packed-32-zeros-ordered": (
        compressed("pack-quantized", arguments(num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group")),
        {}, lambda m: (packed, dict(group=32, symmetric=False, ordered=True, dtype="F16"))),
    "packed-8-bits-channel": (compressed("pack-quantized", arguments(strategy="channel"), ignore=["re:.*lm_head"]), {},
                              lambda m: (packed, dict(bits=8, group=-1, dtype="F32"))),
    "gptq-128-ordered": (dict(quant_method="gptq", bits=4, group_size=128, desc_act=True, sym=True, lm_head=False,
                              checkpoint_format="gptq"), dict(intermediate_size=256),
                         lambda m: (gptq, dict(group=128, ordered=True))),
    "gptq-64-zeros": (dict(quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=False), {},
                      lambda m: (gptq, dict(group=64, symmetric=False))),
    "gptq-v2-8-bits": (dict(quant_method="gptq", bits=8, group_size=-1, desc_act=False, sym=False, checkpoint_format="gptq_v2"),
                       {}, lambda m: (gptq, dict(bits=8, group=-1, symmetric=False, version=2))),
    # Experts; the router is plain, as AutoAWQ leaves it.
    "awq-64-experts": (dict(quant_method="awq", bits=4, group_size=64, version="gemm", zero_point=True,
                            modules_to_not_convert=["gate"]), EXPERTS,
                       lambda m: None if m.endswith("mlp.gate") else (awq, dict(group=64))),
    "fp8-channel": (compressed("float-quantized", arguments(type="float"), arguments(type="float", **TOKENS)), {},
                    lambda m: (bytes_of, dict(dtype="BF16", rows="token"))),
    "fp8-tensor-static": (compressed("float-quantized", arguments(type="float", strategy="tensor"),
                                     arguments(type="float", strategy="tensor")), {},
                          lambda m: (bytes_of, dict(per="tensor", rows="tensor"))),
    "fp8-blocks": (dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
                        modules_to_not_convert=["lm_head", "model.layers.0.self_attn.o_proj"]), dict(intermediate_size=256),
                   lambda m: None if m.endswith("o_proj") else (bytes_of, dict(per="block", rows="group"))),
    "int8-channel": (compressed("int-quantized", arguments(), arguments(**TOKENS)), {},
                     lambda m: (bytes_of, dict(kind="I8", dtype="BF16", rows="token"))),
    # A scheme for each module: attention in int8, the MLP packed, one of its layers plain.
    "mixed": (compressed("mixed-precision", arguments(), targets=["re:.*self_attn.*"], ignore=["lm_head", "model.layers.0.mlp.up_proj"],
                         more={"group_1": {"format": "pack-quantized", "input_activations": None, "output_activations": None,
                                           "targets": ["Linear"],
                                           "weights": arguments(num_bits=4, strategy="group", group_size=64)}}), {},
              lambda m: (bytes_of, dict(kind="I8")) if "self_attn" in m else
              None if m.endswith("up_proj") else (packed, dict(group=64))),
    # Experts: as Qwen's FP8 releases, whose config.json lists the plain modules by name; packed; with quantised activations.
    "fp8-blocks-experts": (dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
                                modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"]),
                           {**EXPERTS, "num_experts": 3, "moe_intermediate_size": 256},
                           but_for_router(bytes_of, plain=["o_proj"], per="block", rows="group")),
    "packed-32-experts": (compressed("pack-quantized", arguments(num_bits=4, strategy="group", group_size=32), ignore=ROUTER),
                          EXPERTS, but_for_router(packed, group=32)),
    "int8-channel-experts": (compressed("int-quantized", arguments(), arguments(**TOKENS), ignore=ROUTER), EXPERTS,
                             but_for_router(bytes_of, kind="I8", dtype="BF16", rows="token")),
    "fp8-tensor-static-experts": (compressed("float-quantized", arguments(type="float", strategy="tensor"),
                                             arguments(type="float", strategy="tensor"), ignore=ROUTER), EXPERTS,
                                  but_for_router(bytes_of, per="tensor", rows="tensor")),
    # int4 weights beside int8 activations: a byte each, as compressed-tensors' W4A8 has them, and packed.
    "w4a8-64": (compressed("int-quantized", arguments(num_bits=4, strategy="group", group_size=64), arguments(**TOKENS)),
                dict(intermediate_size=256), lambda m: (packed, dict(group=64, rows="token", as_bytes=True))),
    "w4a8-32-packed-experts": (compressed("pack-quantized", arguments(num_bits=4, strategy="group", group_size=32),
                                          arguments(**TOKENS), ignore=ROUTER), EXPERTS,
                               but_for_router(packed, group=32, rows="token")),
}
MODELS["mixed"][0]["config_groups"]["group_0"]["format"] = "int-quantized"


# -- The model -------------------------------------------------------------------------------------------------------------------
def make_checkpoint(config, writer, rng):
    """(the file, every weight's numbers, module names of those that are quantised)"""
    file, weights, quantised = File(), {}, []
    hidden, heads, kv, d = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))

    def plain(name, array):
        weights[name] = as_bf16(array)
        file.put(name, array, "BF16")

    def linear(module, n, k, w=None):
        w = 0.12 * rng.standard_normal((n, k)) if w is None else w
        how = writer(module)
        if how is None:
            return plain(module + ".weight", w)
        weights[module + ".weight"] = how[0](file, module, w, rng, **how[1]).astype(np.float64)
        quantised.append(module)

    embeddings = 0.12 * rng.standard_normal((config["vocab_size"], hidden))
    if "num_experts" in config:  # A token's embedding decides its experts: rounding to bf16 sends none to others.
        router = rng.choice([-1.0, 1.0], (config["num_experts"], hidden))
        for row in embeddings:
            row += 0.5 * router[rng.permutation(len(router))[: config["num_experts_per_tok"]]].sum(0)
    plain("model.embed_tokens.weight", embeddings)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm, n in (("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.q_norm", d),
                        ("self_attn.k_norm", d)):
            plain(f"{layer}{norm}.weight", 1 + 0.3 * rng.standard_normal(n))
        for part, n, k in (("q", heads * d, hidden), ("k", kv * d, hidden), ("v", kv * d, hidden), ("o", hidden, heads * d)):
            linear(f"{layer}self_attn.{part}_proj", n, k)
        if "num_experts" in config:
            linear(layer + "mlp.gate", config["num_experts"], hidden, 0.12 * router)
        inner = config["moe_intermediate_size" if "num_experts" in config else "intermediate_size"]
        for place in [f"experts.{e}." for e in range(config["num_experts"])] if "num_experts" in config else [""]:
            for part, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                linear(f"{layer}mlp.{place}{part}_proj", n, k)
    plain("model.norm.weight", 1 + 0.3 * rng.standard_normal(hidden))
    plain("lm_head.weight", 0.12 * rng.standard_normal((config["vocab_size"], hidden)))
    return file, weights, quantised


def product_of(module):
    """One name for all weights that meet the same rows."""
    name = re.sub(r"experts\.\d+", "experts", module)
    return re.sub(r"\.(q|k|v)_proj$", ".qkv", re.sub(r"\.(gate|up)_proj$", ".gate_up", name))


def logits_of(config, weights, ids, rounded=lambda x: x, rows={}, ranks=1, cache=None):
    """Qwen3's forward pass in float64; every result through `rounded`. Rows that meet the modules of `rows` are quantised: by each of
    `ranks` the columns that it has of them. cache(x, which): heads of keys ("k") or values ("v") as the KV cache has them."""
    heads, kv, d = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    t = len(ids)

    def norm(x, name):
        return rounded(rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])) * weights[name + ".weight"])

    def products(x, name):
        """Each rank's, of the columns that it has."""
        w, count = weights[name + ".weight"], ranks if name.endswith((".o_proj", ".down_proj")) else 1
        kind, per, scale = rows.get(name, (None, None, None))
        if per == "tensor":  # weights of one product, and all experts, share the largest scale
            scale = max(of for other, (_, _, of) in rows.items() if product_of(other) == product_of(name))
        return [rounded((quantised_rows(part, kind, per, scale) if kind else part) @ columns.T)
                for part, columns in zip(np.split(x, count, -1), np.split(w, count, -1))]

    def linear(x, name):
        return rounded(sum(products(x, name)))

    def gated(x, place):
        """Each rank's part."""
        gate, up = linear(x, place + "gate_proj"), linear(x, place + "up_proj")
        return products(rounded(gate / (1 + np.exp(-gate)) * up), place + "down_proj")

    angles = np.arange(t)[:, None] * config["rope_parameters"]["rope_theta"] ** -(np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return rounded(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm")
        at = layer + "self_attn."
        q = rotate(norm(linear(h, at + "q_proj").reshape(t, heads, d), at + "q_norm"))
        k = rotate(norm(linear(h, at + "k_proj").reshape(t, kv, d), at + "k_norm"))
        v = linear(h, at + "v_proj").reshape(t, kv, d)
        if cache:
            k, v = cache(k, "k"), cache(v, "v")
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
        scores[:, np.triu(np.ones((t, t), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = rounded(np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(t, heads * d))
        x = rounded(x + linear(out, at + "o_proj"))
        h = norm(x, layer + "post_attention_layernorm")
        mlp = layer + "mlp."
        if "num_experts" not in config:
            x = rounded(x + rounded(sum(gated(h, mlp))))
            continue
        router = h @ weights[mlp + "gate.weight"].T
        p = np.exp(router - router.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y = np.zeros((ranks, *h.shape))
        for row in range(t):
            best = np.argsort(-p[row], kind="stable")[: config["num_experts_per_tok"]]
            share = p[row, best] / p[row, best].sum()
            for e, part in zip(best, share):
                y[:, row] += part * np.concatenate(gated(h[row : row + 1], f"{mlp}experts.{e}."))
        x = rounded(x + rounded(sum(rounded(y))))
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def logprobs_of(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def describe_prompt(config, weights, ids, **how):
    logprobs = logprobs_of(logits_of(config, weights, ids, **how))
    rows, gaps = [], []
    for p in range(len(ids) - 1):
        best = np.argsort(-logprobs[p], kind="stable")[:5]
        rows.append([[ids[p + 1], round(logprobs[p, ids[p + 1]], 6)]] + [[int(b), round(logprobs[p, b], 6)] for b in best])
        gaps.append(round(logprobs[p, best[0]] - logprobs[p, best[1]], 6))
    greedy, greedy_logprobs, greedy_gaps, text = [], [], [], list(ids)
    for _ in range(GREEDY):
        row = logprobs_of(logits_of(config, weights, text, **how)[-1:])[0]
        best = np.argsort(-row, kind="stable")[:2]
        greedy.append(int(best[0]))
        greedy_logprobs.append(round(row[best[0]], 6))
        greedy_gaps.append(round(row[best[0]] - row[best[1]], 6))
        text.append(greedy[-1])
    return dict(ids=ids, logprobs=rows, gap=gaps, greedy=greedy, greedy_logprobs=greedy_logprobs, greedy_gap=greedy_gaps)


def describe_rows(config, weights, plain, rows, ranks, prompts, rng):
    """Where rows that meet the modules of `rows` are quantised: a number that is rounded to another bf16 may become another E4M3, an
    eighth beyond. So runs differ by that; those of one token after the other have the fewest numbers that could."""
    half = {k: v if k.removesuffix(".weight") in rows else plain[k] for k, v in weights.items()}
    how = dict(rows=rows, ranks=ranks, rounded=as_bf16)

    def of_tokens(weights, **how):
        """What follows each token: the next one's log probability and the five best."""
        out = []
        for token in range(config["vocab_size"]):
            row = logprobs_of(logits_of(config, weights, [token], **how))[0]
            out.append([row[(token + 1) % config["vocab_size"]], *np.sort(row)[: -6 : -1]])
        return np.array(out)

    def tenth(got):
        return np.quantile(np.abs(got - want).max(1), 0.1)

    want = of_tokens(half, **how)
    near = [of_tokens(half, **{**how, "rounded": lambda x: as_bf16(x * (1 + 2.0**-22 * rng.standard_normal(x.shape)))})
            for _ in range(8)]
    error = max(np.abs(logprobs_of(logits_of(config, half, p, **how)) - logprobs_of(logits_of(config, weights, p))).max()
                for p in prompts)
    return dict(error=round(error, 4), near=round(max(map(tenth, near)), 4), unquantised=round(tenth(of_tokens(plain, rounded=as_bf16)), 4),
                logprobs=np.round(want, 5).tolist())


def make(name, number, quantization, changes, writer, scales=None, **how):
    """(config.json, the file, golden.json, the weights in float64). `scales`: more tensors of the file. `how`: as logits_of() takes it."""
    rng = np.random.default_rng(number)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES, "attention_bias": False,
              "dtype": "bfloat16", "eos_token_id": None, "hidden_act": "silu", "max_position_embeddings": 512,
              "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
              "tie_word_embeddings": False, **changes, "quantization_config": quantization}
    file, weights, quantised = make_checkpoint(config, writer, rng)
    for tensor, value in (scales or {}).items():
        file.put(tensor, np.atleast_1d(value), "F32")
    prompts = [rng.integers(0, config["vocab_size"], n).tolist() for n in LENGTHS]
    plain = {k: as_bf16(v) for k, v in weights.items()}
    error = max(np.abs(logprobs_of(logits_of(config, plain, p, as_bf16, **how)) -
                       logprobs_of(logits_of(config, weights, p, **how))).max() for p in prompts)
    golden = dict(model=name, bf16_error=round(error, 4),
                  weights={m: fnv(to_bf16(weights[m + ".weight"]).tobytes()) for m in quantised},
                  prompts=[describe_prompt(config, weights, p, **how) for p in prompts])
    if file.rows:
        golden["quantised_rows"] = [describe_rows(config, weights, plain, file.rows, ranks, prompts, rng) for ranks in (1, 2)]
    return config, file, golden, weights


def write(name, config, file, golden):
    target = OUT / f"quantised-{name}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    file.write(target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    size = sum(f.stat().st_size for f in target.iterdir()) >> 10
    print(f"{name}: {size} KiB, bf16 error {golden['bf16_error']}",
          *({k: float(v) for k, v in g.items() if k != "logprobs"} for g in golden.get("quantised_rows", [])))


def main():
    unknown = set(sys.argv[1:]) - set(MODELS)
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for number, (name, (quantization, changes, writer)) in enumerate(MODELS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            write(name, *make(name, number, quantization, changes, writer)[:3])


if __name__ == "__main__":
    main()
