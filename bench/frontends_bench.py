#!/usr/bin/env python3
"""The front ends beside the engine on one GPU: bench/frontends_bench.py DIRECTORY MODEL [NAME...]

NAME: program, http, python, schema, start; all of them unless told. DIRECTORY holds the package `nanovllm` (build/release/python), its program
among it. MODEL needs config.json and, but for `program`, a tokenizer; its weights are random. The workload is nano-vLLM's bench.py: 256 prompts of
100 to 1,024 tokens, 100 to 1,024 new ones each, drawn with seed 0."""
import asyncio
import json
import multiprocessing
import pathlib
import random
import statistics
import subprocess
import sys
import time

from serve_bench import Server, show

CLIENTS, PROCESSES = 256, 8


def workload():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(CLIENTS)]
    return prompts, [random.randint(100, 1024) for _ in prompts]


def bench_program(program, model, times=2):
    """The engine alone: its first pass is the figure that the others are compared with; the second finds its prompts in the prefix cache."""
    for _ in range(times):
        out = subprocess.run([program, "bench", "throughput", model, "--load-format", "dummy"], capture_output=True, text=True, check=True)
        print(*[line for line in out.stdout.splitlines() if line.startswith("|")][-2:], sep="\n", flush=True)


def gpu_server(program, model):
    return Server(program, model, "--load-format", "dummy", "--max-num-seqs", "512", device=())


async def ask(host, port, prompt, tokens, stream):
    fields = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.6, "stream": stream}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(body) + body)
    size, last = 0, b""
    while data := await reader.read(65536):
        assert size or data.startswith(b"HTTP/1.1 200"), data
        size, last = size + len(data), (last + data)[-64:]
    assert not stream or b"[DONE]" in last
    writer.close()


def clients(host, port, share, stream, begin):
    async def all_of_them():
        await asyncio.gather(*(ask(host, port, prompt, tokens, stream) for prompt, tokens in share))
    begin.wait()
    asyncio.run(all_of_them())


def bench_http(program, model):
    requests = list(zip(*workload()))
    for stream in (False, True, False, True):
        with gpu_server(program, model) as server:
            begin = multiprocessing.Barrier(PROCESSES + 1)
            shares = [(server.host, server.port, requests[p::PROCESSES], stream, begin) for p in range(PROCESSES)]
            running = [multiprocessing.Process(target=clients, args=share) for share in shares]
            for process in running:
                process.start()
            begin.wait()
            start = time.perf_counter()
            for process in running:
                process.join()
                assert process.exitcode == 0
            seconds = time.perf_counter() - start
        show(f"HTTP, {CLIENTS} clients, {'streamed' if stream else 'whole'}", f"{seconds:.3f} s", f"{sum(r[1] for r in requests) / seconds:.0f} tok/s")


def bench_start(program, model):
    starts = []
    for _ in range(3):
        begin = time.perf_counter()
        with gpu_server(program, model):
            starts.append(time.perf_counter() - begin)
    show("exec to serving", f"{statistics.median(starts):.2f} s", f"(fastest {min(starts):.2f}, slowest {max(starts):.2f})")


def bench_python(program, model):
    from nanovllm import LLM, SamplingParams
    prompts, tokens = workload()
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in tokens]
    llm = LLM(model, load_format="dummy", max_model_len=4096)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    for _ in range(3):
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        show("Python, llm.generate of the workload", f"{seconds:.3f} s", f"{sum(tokens) / seconds:.0f} tok/s")
        llm.reset_prefix_cache()
    llm.exit()


SCHEMA = {
    "type": "array", "minItems": 500, "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "place", "tags", "age"], "properties": {
            "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "place": {"type": "object", "additionalProperties": False, "required": ["city", "at"], "properties": {
                "city": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}}}}}}


def bench_schema(program, model, tokens=512):
    """Tokens a second with a schema in none, half and all of the rows; no answer ends before its last token."""
    from nanovllm import LLM, SamplingParams, StructuredOutputsParams
    llm = LLM(model, load_format="dummy", max_model_len=4096)
    free = {"temperature": 1.0, "ignore_eos": True, "max_tokens": tokens}
    for rows in (64, 1):
        prompts = [[(7 * i + j) % 1000 for j in range(64)] for i in range(rows)]
        rates = {}
        for _ in range(4):  # the first of each compiles the schema and records graphs
            for constrained in (0, rows // 2, rows):
                params = [SamplingParams(seed=i, structured_outputs=StructuredOutputsParams(json=SCHEMA) if i < constrained else None, **free)
                          for i in range(rows)]
                llm.reset_prefix_cache()
                begin = time.perf_counter()
                done = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                count = sum(len(output["token_ids"]) for output in done)
                rates.setdefault(constrained, []).append(count / seconds)
        base = statistics.median(rates[0][1:])
        for constrained, found in rates.items():
            rate = statistics.median(found[1:])
            show(f"{rows} rows, {constrained} with a schema", f"{rate:.0f} tok/s", f"{100 * rate / base:.1f} %")
    llm.exit()


def main():
    directory, model, names = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:]
    sys.path.insert(0, str(directory))
    for name in names or ("program", "http", "python", "schema", "start"):
        globals()[f"bench_{name}"](directory / "nanovllm/nanovllm", model)


if __name__ == "__main__":
    main()
