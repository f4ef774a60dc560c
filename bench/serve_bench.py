#!/usr/bin/env python3
"""The server's cost beside the model: bench/serve_bench.py build/release/bin/nanovllm [SECONDS] [NAME...]

NAME: idle, rates, prompt, streams, start, overload; all of them unless told. SECONDS: of each measurement (5).

But for `start` and `overload`, which run models/demo, the model is one of 32 columns with random weights and the demo model's tokenizer, so
that the engine costs little. Rates are by the processor time of the server's threads (user and system), whatever the client costs and
whoever shares the machine; "core" means a second of it, and the engine's thread, which the model is on, counts where that is said. Times are a client's on the same machine, which is to be quiet."""
import asyncio
import http.client
import json
import os
import pathlib
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

TICKS = os.sysconf("SC_CLK_TCK")
DEMO = pathlib.Path(__file__).resolve().parents[1] / "models/demo"


def make_model(directory):
    config = json.loads((DEMO / "config.json").read_text())
    config.update(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if not (directory / name).exists():
            (directory / name).symlink_to(DEMO / name)


def thread_seconds(pid):
    """Processor time of each thread; the main one is the server's I/O thread."""
    def seconds(thread):
        fields = (thread / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return {int(thread.name): seconds(thread) for thread in pathlib.Path(f"/proc/{pid}/task").iterdir()}


def resident_bytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) * 1024


class Server:
    """`nanovllm serve` on a free port."""

    def __init__(self, program, model, *arguments, device=("--device", "cpu", "--threads", "1")):
        self.process = subprocess.Popen([program, "serve", model, *device, "--port", "0", "--no-access-log", *arguments], stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        for line in self.process.stderr:
            if match := re.search(r"serving .* on http://(\S+):(\d+)", line):
                self.host, self.port = match[1], int(match[2])
                break
        else:
            sys.exit("the server did not start")
        self.address = f"{self.host}:{self.port}"
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def metric(self, name):
        connection = http.client.HTTPConnection(self.address)
        connection.request("GET", "/metrics")
        return float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", connection.getresponse().read().decode(), re.M)[1])


def null_server(program, model, *arguments):
    return Server(program, model, "--load-format", "dummy", "--max-num-queued-reqs", "100000", *arguments)


def load(address, body, seconds, clients=32):
    """Requests answered in so many seconds by clients that each send the next as soon as they have the last."""
    answered, end = [0] * clients, time.monotonic() + seconds

    def client(i):
        connection = http.client.HTTPConnection(address)
        while time.monotonic() < end:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            answered[i] += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(answered)


def chat(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "What is 37 + 45?"}], "ignore_eos": True, "temperature": 0, **fields})


def used_since(server, begin):
    """Processor time since thread_seconds() gave `begin`: of all threads, of all but the engine's, of the I/O thread."""
    used = {thread: now - begin.get(thread, 0) for thread, now in thread_seconds(server.pid).items()}
    engine = max(time for thread, time in used.items() if thread != server.pid)
    return sum(used.values()), sum(used.values()) - engine, used[server.pid]


def rate(server, body, seconds):
    """Requests a second of processor time, of the same threads."""
    load(server.address, body, 0.3)
    begin = thread_seconds(server.pid)
    answered = load(server.address, body, seconds)
    return [answered / used for used in used_since(server, begin)]


def request_bytes(body, path="/v1/chat/completions"):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(what, figure, unit):
    print(f"{what:40s} {figure:>12s} {unit}", flush=True)


def bench_idle(program, model, seconds, count=1000):
    with null_server(program, model) as server:
        before = resident_bytes(server.pid)
        connections = [http.client.HTTPConnection(server.address) for _ in range(count)]
        for connection in connections:
            connection.request("GET", "/health")
            connection.getresponse().read()
        time.sleep(0.5)
        show("idle connection", f"{(resident_bytes(server.pid) - before) / count:.0f}", "bytes")


def bench_rates(program, model, seconds):
    with null_server(program, model) as server:
        for stream in (False, True):
            whole, beside, _ = rate(server, chat(max_tokens=16, stream=stream), seconds)
            show(f"chat, 16 tokens, {'streamed' if stream else 'whole'}", f"{beside:.0f}", f"requests/s per core (with the engine's thread {whole:.0f})")
        whole, beside, io = rate(server, chat(max_tokens=512, stream=True), seconds)
        show("chat, 512 tokens, streamed", f"{512 * io:.0f}", f"tokens/s per core of the I/O thread (all threads {512 * whole:.0f})")


def bench_prompt(program, model, seconds):
    """A client's time to the first token beyond the engine's own, of prompts of 1,000 tokens that no cache knows."""
    with null_server(program, model) as server:
        connection, added, sizes, bodies = socket.create_connection((server.host, server.port)), [], [], []
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        words, end = re.findall(r"[a-z]{2,}", (DEMO.parents[1] / "docs/contract.md").read_text()), time.monotonic() + seconds
        length = 400
        while time.monotonic() < end or len(added) < 50:
            text = " ".join(random.choice(words) for _ in range(length))
            body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True})
            before, size = server.metric("time_to_first_token_seconds_sum"), server.metric("prompt_tokens_total")
            begin = time.perf_counter()
            connection.sendall(request_bytes(body))
            answer = b""
            while answer.count(b"data: ") < 2 and b"[DONE]" not in answer:
                answer += connection.recv(65536)
            seen = time.perf_counter() - begin
            while b"0\r\n\r\n" not in answer[-8:]:
                answer += connection.recv(65536)
            tokens = server.metric("prompt_tokens_total") - size
            if abs(tokens - 1000) < 60:
                added.append(1000 * (seen - (server.metric("time_to_first_token_seconds_sum") - before)))
                sizes.append(tokens)
                bodies.append(body[:-1] + ', "cache_salt": "again"}')
            length = max(50, min(1500, round(length * 1000 / tokens)))
        show(f"added to the first token, {statistics.mean(sizes):.0f} tokens", f"{statistics.median(added):.2f}", f"ms (p90 {percentile(added, 0.9):.2f})")
        client, begin = http.client.HTTPConnection(server.address), thread_seconds(server.pid)
        for body in bodies:
            client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            client.getresponse().read()
        show("processor time of such a request", f"{1000 * used_since(server, begin)[1] / len(bodies):.2f}", "ms beside the engine's thread")


def bench_streams(program, model, seconds, count=1000):
    """A program of its own, beside this one's: Python would be the bottleneck, and the engine's thread has to wait for a clock. Tokens are
    bytes, so that a step of all streams costs little."""
    model = pathlib.Path(model) / "bytes"
    model.mkdir()
    make_model(model)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokens = sorted((token for token in tokenizer["model"]["vocab"] if len(token) == 1), key=tokenizer["model"]["vocab"].get)
    tokenizer["model"].update(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    config = json.loads((model / "config.json").read_text())
    config.update(vocab_size=len(tokens), eos_token_id=0, bos_token_id=0)
    for name, value in (("tokenizer", {**tokenizer, "added_tokens": []}), ("config", config), ("tokenizer_config", {}), ("generation_config", {})):
        (model / f"{name}.json").unlink()
        (model / f"{name}.json").write_text(json.dumps(value))
    subprocess.run([pathlib.Path(program).parent / "stream_timing", model, str(count), str(seconds)], check=True)


def bench_start(program, model, seconds, times=20):
    """From exec to the first 200 of /health, models/demo."""
    taken = []
    for _ in range(times):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        begin = time.perf_counter()
        server = subprocess.Popen([program, "serve", DEMO, "--device", "cpu", "--port", str(port), "--quiet"])
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except ConnectionError:
                pass
            time.sleep(0.002)
        taken.append(1000 * (time.perf_counter() - begin))
        server.terminate()
        server.wait()
    show("exec to /health, models/demo", f"{statistics.median(taken):.0f}", f"ms (fastest {min(taken):.0f}, slowest {max(taken):.0f})")


async def ask(server, body):
    """Status and seconds of one request over a connection of its own."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(request_bytes(body))
    status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
    taken = time.perf_counter() - begin
    writer.close()
    return status, taken


async def overload(server, body, seconds, arrivals):
    """Requests that come at random, so many a second, whatever becomes of the others."""
    tasks, end = [], time.perf_counter() + seconds
    at = time.perf_counter()
    while at < end:
        at += random.expovariate(arrivals)
        await asyncio.sleep(max(0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(server, body)))
    done = await asyncio.gather(*tasks)
    return done, time.perf_counter() - end + seconds


def bench_overload(program, model, seconds):
    with Server(program, DEMO, "--max-num-seqs", "16", "--max-num-queued-reqs", "16") as server:
        body = chat(max_tokens=64)
        load(server.address, body, 1, clients=16)
        begin = time.perf_counter()
        capacity = load(server.address, body, seconds, clients=16) / (time.perf_counter() - begin)
        done, taken = asyncio.run(overload(server, body, seconds, 10 * capacity))
        refused = [1000 * t for status, t in done if status == 503]
        assert all(status in (200, 503) for status, _ in done)
        goodput = (len(done) - len(refused)) / taken
        show("capacity, models/demo, 64 tokens", f"{capacity:.1f}", "requests/s")
        show(f"goodput at {len(done) / seconds / capacity:.1f} times that", f"{100 * goodput / capacity:.0f}", f"% ({len(done)} requests, {len(refused)} refused)")
        show("time to a 503", f"{statistics.median(refused):.1f}", f"ms (p99 {percentile(refused, 0.99):.1f})")


def main():
    program, seconds, names = sys.argv[1], 5.0, sys.argv[2:]
    if names and names[0].replace(".", "").isdigit():
        seconds = float(names.pop(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as model:
        make_model(pathlib.Path(model))
        for name in names or ("idle", "rates", "prompt", "streams", "start", "overload"):
            globals()[f"bench_{name}"](program, model, seconds)
        print("load average", *(f"{load:.2f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
