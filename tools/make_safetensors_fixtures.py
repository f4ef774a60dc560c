"""Writes tests/data/safetensors: files made by the reference implementation, and its verdict on damaged ones.

    python tools/make_safetensors_fixtures.py

mixed.safetensors      every dtype that can be loaded, some that cannot, a scalar, an empty tensor, metadata
sharded/               two shards and their index
values.json            the numbers in both, as float64
verdicts.json          small files, most of them damaged, and whether the `safetensors` package reads them
"""

import base64
import json
import pathlib
import random
import struct

import safetensors
import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent / "tests/data/safetensors"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def mixed():
    g = torch.Generator().manual_seed(7)
    normal = lambda *shape: torch.randn(*shape, generator=g)
    return {
        "f32": normal(3, 5),
        "f16": normal(4).half(),
        "bf16": normal(2, 3, 4).bfloat16(),
        "four": normal(2, 1, 3, 2).bfloat16(),
        "special": torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 6e-8, 65504.0]).half(),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "byte": torch.arange(3, dtype=torch.uint8),
    }


def shards():
    g = torch.Generator().manual_seed(8)
    return {
        "model-00001-of-00002.safetensors": {
            "model.embed_tokens.weight": torch.randn(6, 4, generator=g).bfloat16(),
            "model.norm.weight": torch.ones(4).bfloat16(),
        },
        "model-00002-of-00002.safetensors": {"lm_head.weight": torch.randn(6, 4, generator=g).bfloat16()},
    }


def values(tensors):
    return {
        name: {"shape": list(t.shape), "values": [repr(v) for v in t.double().flatten().tolist()]}
        for name, t in tensors.items()
        if t.dtype in FLOATS
    }


def image(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), begin=0, end=8, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def candidates():
    two = {"a": entry(), "b": entry("BF16", (2, 2), 8, 16)}
    good = image(two, bytes(range(16)))
    yield good
    # Damage at random: one to three bytes changed, cut, doubled or inserted, mostly in the header.
    draw = random.Random(11)
    for _ in range(600):
        mutant = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(mutant))
            match draw.randrange(5):
                case 0:
                    mutant[at] = draw.choice(b'0123456789[]{}",:-. abFU')
                case 1:
                    mutant[at] ^= 1 << draw.randrange(8)
                case 2:
                    mutant.insert(at, draw.choice(b"0123456789,] "))
                    mutant[0] = min(mutant[0] + 1, 255)
                case 3:
                    del mutant[at]
                    mutant[0] = max(mutant[0] - 1, 0)
                case 4:
                    del mutant[draw.randrange(8, len(mutant)) :]
        yield bytes(mutant)
    # Rules one at a time.
    for dtype, bits in {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
                        "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
                        "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64, "f32": 32,
                        "F128": 128}.items():
        yield image({"a": entry(dtype, (8,), 0, bits)}, bytes(bits))
        yield image({"a": entry(dtype, (8,), 0, bits - 1)}, bytes(bits - 1))
    yield image({"a": entry("F4", (1,), 0, 1)}, bytes(1))
    for header, size in [
        ({}, 0), ({}, 1), (b"{}  ", 0), (b"{}\0", 0), (b"", 0), (b"[]", 0), (b"\xff{}", 0), (b"{", 0), (b"\xef\xbb\xbf{}", 0),
        ({"a": entry(shape=())}, 8), ({"a": entry(shape=(), end=4)}, 4), ({"a": entry(shape=(0, 3), end=0)}, 0),
        ({"a": entry(shape=(0,), begin=4, end=4), "b": entry()}, 8), ({"a": entry(shape=(0,), begin=8, end=8), "b": entry()}, 8),
        ({"a": entry(begin=8, end=0)}, 8), ({"a": entry(begin=4, end=12)}, 12), ({"a": entry(), "b": entry()}, 8),
        ({"a": entry(), "b": entry(begin=4, end=12)}, 12), ({"a": entry(), "b": entry(begin=12, end=20)}, 20),
        ({"a": entry(), "b": entry(begin=8, end=16)}, 16), ({"a": entry(), "b": entry(begin=8, end=16)}, 15),
        ({"a": entry(), "b": entry(begin=8, end=16)}, 17), ({"b": entry(begin=8, end=16), "a": entry()}, 16),
        ({"a": entry(shape=(2**62, 4))}, 8), ({"a": entry(shape=(2**62, 4, 0), end=0)}, 0),
        ({"a": entry(shape=(2**32, 2**32))}, 8), ({"a": entry(shape=(2**61,), end=2**63)}, 8),
        ({"a": entry(end=2**64 - 1)}, 8), ({"a": entry(shape=(-2,))}, 8), ({"a": entry(shape=(2.0,))}, 8),
        ({"a": entry(shape=("2",))}, 8), ({"a": {"dtype": "F32", "shape": [2]}}, 8), ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8), ({"a": entry(extra=1)}, 8), ({"a": 3}, 8), ({"a": None}, 8),
        ({"__metadata__": {"k": "v"}}, 0), ({"__metadata__": {"k": 1}}, 0), ({"__metadata__": []}, 0), ({"__metadata__": None}, 0),
        ({"__metadata__": {"k": {"l": "v"}}}, 0), ({"": entry()}, 8),
    ]:
        yield image(header, bytes(size))
    for length in (0, 1, 2**32, 100_000_001, 2**63, 2**64 - 1, 2**64 - 8):
        yield struct.pack("<Q", length) + b"{}"
    for cut in range(len(good)):
        yield good[:cut]


def accepted(data):
    try:
        safetensors.deserialize(data)
        return True
    except Exception:
        return False


def main():
    (ROOT / "sharded").mkdir(parents=True, exist_ok=True)
    tensors = mixed()
    save_file(tensors, ROOT / "mixed.safetensors", metadata={"format": "pt", "note": "fixture"})
    expected = values(tensors)
    weight_map = {}
    for shard, part in shards().items():
        save_file(part, ROOT / "sharded" / shard, metadata={"format": "pt"})
        weight_map |= {name: shard for name in part}
        expected |= values(part)
    index = {"metadata": {"total_size": 104}, "weight_map": weight_map}
    (ROOT / "sharded/model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (ROOT / "values.json").write_text(json.dumps(expected, indent=1) + "\n")
    seen = list(dict.fromkeys(candidates()))
    verdicts = [{"file": base64.b64encode(data).decode(), "accepted": accepted(data)} for data in seen]
    (ROOT / "verdicts.json").write_text("[\n" + ",\n".join(map(json.dumps, verdicts)) + "\n]\n")
    print(len(verdicts), "files,", sum(v["accepted"] for v in verdicts), "accepted")


if __name__ == "__main__":
    main()
