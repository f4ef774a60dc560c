#!/usr/bin/env python3
"""Makes tests/data/goldens/quantised-fp8-kv-*: checkpoints whose kv_cache_scheme asks for FP8 keys and values, and what they must give.

    python tools/make_fp8_kv.py               # needs numpy alone

As tools/make_quantised.py's, with keys and values rounded to E4M3 in float64's run as docs/contract.md defines it. A number that f32's
errors round to another E4M3 is an eighth beyond. So the weights' seed is one for which runs with such errors, and larger ones, have log
probabilities within `near` of those without, over all that the prompts and what follows them put into the cache. Those of a run whose
keys and values stay as they are lie up to `unquantised` away.
"""
import numpy as np

from make_quantised import arguments, compressed, logits_of, logprobs_of, make, packed, quantised_rows, write

# Of keys and values; a few numbers are beyond 448 of them. Those of heads as compressed-tensors shapes them.
SCALES = {"tensor": {"k": 0.0075, "v": 0.009}, "attn_head": {which: np.array(s).reshape(2, 1, 1) for which, s in
                                                             {"k": [0.0075, 0.012], "v": [0.02, 0.009]}.items()}}
NEAR = 6e-5


def main():
    for kind, strategy, changes in (("dynamic", "tensor", {}), ("static", "tensor", {}), ("heads", "attn_head", {"num_key_value_heads": 2})):
        name, static = f"fp8-kv-{kind}", kind != "dynamic"
        scheme = dict(num_bits=8, type="float", strategy=strategy, dynamic=not static, symmetric=True)
        quantization = dict(compressed("pack-quantized", arguments(strategy="channel")), kv_cache_scheme=scheme)
        scales = {f"model.layers.0.self_attn.{which}_scale": np.float32(value) for which, value in SCALES[strategy].items()} if static else {}

        def cache(x, which):
            scale = SCALES[strategy][which]
            return quantised_rows(x, "F8_E4M3", "tensor" if static else "token", scale[:, 0] if kind == "heads" else scale)

        for number in range(100):
            config, file, golden, weights = make(name, number, quantization, changes,
                                                 lambda m: (packed, dict(bits=8, group=-1, dtype="F32")), scales, cache=cache)
            rng = np.random.default_rng(number)
            near = unquantised = 0.0
            for prompt in golden["prompts"]:
                ids = prompt["ids"] + prompt["greedy"]
                want = logprobs_of(logits_of(config, weights, ids, cache=cache))
                for _ in range(6):
                    got = logits_of(config, weights, ids, cache=cache,
                                    rounded=lambda x: x * (1 + 2.0**-23 * rng.standard_normal(x.shape)))
                    near = max(near, np.abs(logprobs_of(got) - want).max())
                unquantised = max(unquantised, np.abs(logprobs_of(logits_of(config, weights, ids)) - want).max())
            print(name, number, near, unquantised, flush=True)
            if near < NEAR:
                break
        golden.update(kv_cache_dtype="fp8_e4m3", near=float(near), unquantised=round(unquantised, 4))
        write(name, config, file, golden)


if __name__ == "__main__":
    main()
