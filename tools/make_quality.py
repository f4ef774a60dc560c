#!/usr/bin/env python3
"""Makes tests/data/demo/quality.json: what `nanovllm bench quality` must find of models/demo, by float64 computation.

    python tools/make_quality.py              # needs numpy and tokenizers

The weights are quantised by docs/contract.md's words, and stay float32 numbers: as with --dtype f32.
"""
import json
import pathlib

import numpy as np
from tokenizers import Tokenizer

from make_quantised import as_bf16, logits_of, logprobs_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "demo"
CONTEXT, WINDOWS = 96, 3


def nearest_e4m3(x):
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6) - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


def quantise(w, form):
    """The numbers that float64 weights become."""
    if form in ("int4", "w4a8"):  # activations stay as they are with --dtype f32
        groups = w.reshape(w.shape[0], -1, 128)
        most = np.abs(groups).max(-1, keepdims=True)
        best = least = None
        for divisor in (7, 7.5, 8, 9, 10):
            scale = as_bf16(most / divisor)
            rounded = np.clip(np.rint(groups / scale), -8, 7) * scale
            error = ((rounded - groups) ** 2).sum(-1, keepdims=True)
            best = rounded if best is None else np.where(error < least, rounded, best)
            least = error if least is None else np.minimum(error, least)
        return best.reshape(w.shape).astype(np.float32).astype(np.float64)
    scale = as_bf16(np.abs(w).max(1, keepdims=True) / (448 if form == "fp8" else 127))
    q = nearest_e4m3(w / scale) if form == "fp8" else np.clip(np.rint(w / scale), -127, 127)
    return (q * scale).astype(np.float32).astype(np.float64)


def read_weights():
    """Every tensor in float64; bf16, which numpy lacks, from its bits."""
    path = MODEL / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    weights = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[8 + size + begin : 8 + size + end], np.uint16).astype(np.uint32) << 16
        weights[name] = bits.view(np.float32).astype(np.float64).reshape(entry["shape"])
    return weights


def main():
    config = json.loads((MODEL / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    weights = read_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    stories = [json.loads(line) for line in (ROOT / "tests/data/demo/stories.jsonl").read_text().splitlines()]
    text = "\n".join(story["expected"] for story in stories[:4])
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids[: CONTEXT * WINDOWS]
    windows = [ids[i : i + CONTEXT] for i in range(0, len(ids), CONTEXT)]

    def logprobs(changed):
        return np.concatenate([logprobs_of(logits_of(config, changed, window))[:-1] for window in windows])

    following = np.concatenate([window[1:] for window in windows])
    plain = logprobs(weights)
    rows = []
    for form in (None, "fp8", "int8", "int4", "w4a8"):
        found = plain if form is None else logprobs(
            {n: quantise(w, form) if n.endswith("_proj.weight") else w for n, w in weights.items()})
        rows.append({"weights": form or "f32", "perplexity": np.exp(-found[np.arange(len(found)), following].mean()),
                     "kl_divergence": (np.exp(plain) * (plain - found)).sum(-1).mean(),
                     "same_top_token": (plain.argmax(-1) == found.argmax(-1)).mean()})
        print(rows[-1])
    out = {"text": text, "context": CONTEXT, "chunks": WINDOWS, "tokens": len(ids), "rows": rows}
    (ROOT / "tests/data/demo/quality.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
