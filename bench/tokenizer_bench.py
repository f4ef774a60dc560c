#!/usr/bin/env python3
"""Tokenizing speed against the Hugging Face library: same text, one thread, CPU time, same run.

usage: tokenizer_bench.py PROGRAM TEXT_FILE MODEL_DIRECTORY...     (PROGRAM is the built tokenizer_bench)
"""
import json
import os
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402  (after the environment is set)


def reference(directory, text):
    start = time.process_time()
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    load = time.process_time() - start
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        encoding = tokenizer.encode(text, add_special_tokens=False)
        best = min(best, time.process_time() - start)
    return {"load_ms": load * 1e3, "mb_per_s": len(text.encode()) / best / 1e6, "tokens": len(encoding.ids)}


def main():
    program, text_file, *directories = sys.argv[1:]
    text = open(text_file, encoding="utf-8", newline="").read()
    print(f"{'tokenizer':16} {'ours MB/s':>10} {'HF MB/s':>9} {'ratio':>6} {'ours load ms':>13} {'HF load ms':>11}")
    for directory in directories:
        ours = json.loads(subprocess.run([program, directory, text_file], check=True, capture_output=True).stdout)
        theirs = reference(directory, text)
        assert ours["tokens"] == theirs["tokens"], directory
        print(
            f"{os.path.basename(directory):16} {ours['mb_per_s']:10.1f} {theirs['mb_per_s']:9.2f} "
            f"{ours['mb_per_s'] / theirs['mb_per_s']:6.1f} {ours['load_ms']:13.0f} {theirs['load_ms']:11.0f}"
        )


if __name__ == "__main__":
    main()
