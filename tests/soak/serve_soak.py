#!/usr/bin/env python3
"""Mixed random traffic against `nanovllm serve`: tests/soak/serve_soak.py PROGRAM MODEL [SECONDS]

Clients of all endpoints come, stream, read slowly, leave at any moment and send what is wrong. Every half a minute they rest, and then
nothing may be left of them: no request, no block, no descriptor, and counters that agree with each other and with what was answered. A
request with a seed has the same bytes whenever it comes. In the middle 10,000 connections do nothing for a while. After the first half
memory may grow by 1 MiB an hour, and by 1 MiB that an allocator moves about. Prints a line of progress a rest, and a verdict."""
import asyncio
import json
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import threading
import time

from client import Client, Left, events

CLIENTS, REST_EVERY, IDLE_CONNECTIONS = 24, 30, 10000
QUESTIONS = ["What is 37 + 45?", "Tell me a story.", "Count to ten.", "x" * 300]
WRONG = [b"", b"{", b"[]", b'{"messages": []}', b'{"messages": 5}', b'{"prompt": [1e99]}', b"[" * 5000, b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}',
         b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', b"\xff\xfe"]
PATHS = {"/v1/chat/completions": "chat", "/v1/completions": "completion", "/v1/responses": "response", "/v1/messages": "message"}


class Server:
    def __init__(self, program, model):
        self.process = subprocess.Popen(
            [program, "serve", model, "--served-model-name", "demo", "--port", "0", "--device", "cpu", "--threads", "1", "--no-access-log",
             "--max-num-seqs", "16", "--block-size", "16", "--num-gpu-blocks-override", "96", "--max-model-len", "768",
             "--max-num-queued-reqs", "64"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if match := re.search(r"serving demo on http://(\S+):(\d+)", line):
                self.host, self.port = match[1], int(match[2])
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def client(self):
        return Client(self.host, self.port)

    def facts(self):
        """Resident bytes, descriptors, threads."""
        proc = pathlib.Path(f"/proc/{self.process.pid}")
        status = (proc / "status").read_text()
        return {"bytes": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024, "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
                "descriptors": len(os.listdir(proc / "fd"))}

    async def metrics(self):
        client = self.client()
        _, text = await client.ask("GET", "/metrics")
        client.close()
        values = {}
        for line in text.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[re.sub(r'model_name="demo",engine="0",?', "", name).replace("{}", "").removeprefix("vllm:")] = float(value)
        return values


class Soak:
    def __init__(self, server, seconds):
        self.server, self.seconds = server, seconds
        self.random = random.Random(time.time_ns() if "SOAK_SEED" not in os.environ else int(os.environ["SOAK_SEED"]))
        self.sent, self.whole, self.left, self.refused, self.full, self.tokens, self.rests = 0, 0, 0, 0, 0, 0, 0
        self.answers, self.asked, self.resting, self.at_rest, self.failures, self.memory = {}, {}, None, 0, [], []

    def check(self, condition, what):
        if not condition and len(self.failures) < 20:
            self.failures.append(what)

    # -- Traffic

    def draw(self):
        """A request: path, body, and whether its answer must be the same each time."""
        r, path = self.random, self.random.choice(list(PATHS))
        seeded = r.random() < 0.3
        question = r.choice(QUESTIONS[:3]) if seeded else r.choice(QUESTIONS) + r.choice(["", " Please.", str(r.random())])
        size = 32 if seeded else r.choice([1, 4, 16, 60, 200])
        body = {"temperature": 0.8, "seed": r.randrange(4)} if seeded else {"temperature": r.choice([0, 0.7, 1.5])}
        body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": size}
        if path == "/v1/completions":
            body["prompt"] = question if seeded or r.random() < 0.7 else [r.randrange(1, 500) for _ in range(r.randrange(1, 200))]
        elif path == "/v1/responses":
            body["input"] = question
        else:
            body["messages"] = [{"role": "user", "content": question}]
        if not seeded and path in ("/v1/chat/completions", "/v1/completions"):
            body |= r.choice([{}, {}, {"n": r.randrange(1, 5)}, {"repetition_penalty": 1.2}, {"ignore_eos": True}, {"stop": ["e"]}, {"logit_bias": {"5": 3}},
                              {"bad_words": ["the"]}, {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2, "echo": True}])
        if r.random() < 0.6 and "echo" not in body:
            body["stream"] = True
        return path, body, seeded

    async def work(self, number):
        client, r = self.server.client(), self.random
        while time.monotonic() < self.end:
            if self.resting:
                client.close()
                self.asked.pop(client, None)
                self.at_rest += 1
                await self.resting.wait()
            try:
                await self.one(client, r)
            except Left:
                self.left += 1
            except Exception as error:
                client.close()
                self.check(False, f"a client: {error!r}")
                await asyncio.sleep(0.1)
        client.close()

    async def one(self, client, r):
        self.sent += 1
        if r.random() < 0.05:
            status, text = await client.ask("POST", r.choice(list(PATHS) + ["/nowhere"]), r.choice(WRONG))
            self.check(400 <= status < 500 and len(text) < 65536, f"{status} for a wrong request: {text[:200]}")
            self.refused += 1
            return
        if r.random() < 0.05:
            status, _ = await client.ask("GET", r.choice(["/health", "/v1/models", "/metrics", "/load", "/version", "/openapi.json"]))
            return self.check(status == 200, f"{status} for a page")
        path, body, seeded = self.draw()
        leave_after = r.choice([-1, 0, 1, 500, 3000]) if r.random() < 0.2 else None
        self.asked[client] = (time.monotonic(), path, body, leave_after)
        status, text = await client.ask("POST", path, json.dumps(body).encode(), leave_after, pause=0.05 if r.random() < 0.05 else 0)
        if status == 503:
            self.full += 1
            return await asyncio.sleep(r.random())
        self.check(status == 200, f"{path} {body}: {status} {text[:300]}")
        if status == 200:
            self.take(path, body, seeded, text)

    def take(self, path, body, seeded, text):
        self.whole += 1
        streamed = "stream" in body
        said = text_of(PATHS[path], events(text) if streamed else [json.loads(text)], streamed)
        self.check(b'"error":{' not in text, f"{path} {body}: {text[-300:]}")
        if not streamed:
            usage = json.loads(text)["usage"]
            self.tokens += usage.get("completion_tokens", usage.get("output_tokens"))
        if not seeded:
            return
        key = json.dumps([path, {name: value for name, value in body.items() if name != "stream"}])
        first = self.answers.setdefault(key, said)
        self.check(first == said, f"{key}: {said!r}, and before {first!r}")

    # -- Rests

    async def rest(self):
        """All clients wait until the server has been looked at."""
        self.resting, self.at_rest = asyncio.Event(), 0
        try:
            limit = time.monotonic() + 300
            while self.at_rest < CLIENTS and time.monotonic() < limit:
                await asyncio.sleep(0.05)
            self.check(self.at_rest == CLIENTS, f"{CLIENTS - self.at_rest} clients still wait for an answer: {list(self.asked.values())}")
            for _ in range(500):
                metrics = await self.server.metrics()
                if metrics["kv_cache_usage_perc"] == 0 and metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0:
                    break
                await asyncio.sleep(0.02)
            self.look(metrics)
        finally:
            event, self.resting = self.resting, None
            event.set()

    def look(self, m):
        self.rests += 1
        ended = sum(m[f'request_success_total{{finished_reason="{reason}"}}'] for reason in ("stop", "length", "abort", "error"))
        rejected = sum(value for name, value in m.items() if name.startswith("admission_rejections_total"))
        for name in "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting":
            self.check(m[name] == 0, f"at rest {name} is {m[name]}")
        self.check(m["request_params_n_count"] == m["e2e_request_latency_seconds_count"] + rejected,
                   f"{m['request_params_n_count']} requests, {m['e2e_request_latency_seconds_count']} ended, {rejected} rejected")
        self.check(m["request_params_n_sum"] >= ended >= m["request_params_n_sum"] - 4 * rejected, f"{ended} answers of {m['request_params_n_sum']}")
        self.check(m["request_generation_tokens_sum"] <= m["generation_tokens_total"], "more tokens were delivered than generated")
        self.check(self.tokens <= m["request_generation_tokens_sum"], f"{self.tokens} tokens in answers, {m['request_generation_tokens_sum']} counted")
        self.check(m["prefix_cache_hits_total"] <= m["prefix_cache_queries_total"], "more prefix hits than tokens")
        self.check(rejected <= self.full + self.left, f"{rejected} rejections, {self.full} of them seen")
        self.check(m['request_success_total{finished_reason="error"}'] == 0, "requests failed")
        facts = self.server.facts()
        self.memory.append((time.monotonic() - self.begin, facts["bytes"]))
        self.base = getattr(self, "base", facts)
        for name in "threads", "descriptors":
            self.check(facts[name] <= self.base[name] + (name == "descriptors"), f"{facts[name]} {name}, {self.base[name]} at first")
        print(f"{self.memory[-1][0]:6.0f} s  {self.sent} requests, {self.whole} whole, {self.left} left, {self.refused} wrong, {self.full} queue full, "
              f"{m['generation_tokens_total']:.0f} tokens, {m['num_preemptions_total']:.0f} preemptions, {facts['bytes'] / 2**20:.1f} MiB, {len(self.failures)} failures",
              flush=True)

    async def idle_connections(self):
        """Connections that do nothing, and an answer meanwhile; their memory comes and goes."""
        count = min(IDLE_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
        before, clients = self.server.facts(), []
        for _ in range(count):
            clients.append(self.server.client())
            status, _ = await clients[-1].ask("GET", "/health")
            self.check(status == 200, f"{status} for an idle connection")
        during = self.server.facts()
        self.check(during["descriptors"] >= count, f"{during['descriptors']} descriptors for {count} connections")
        per_connection = (during["bytes"] - before["bytes"]) / count
        self.check(per_connection < 20000, f"{per_connection:.0f} bytes per idle connection")
        status, _ = await self.server.client().ask("POST", "/v1/completions", b'{"prompt": "1 + 1 =", "max_tokens": 2}')
        self.check(status in (200, 503), f"{status} beside idle connections")
        for client in clients:
            client.close()
        print(f"        {count} idle connections: {per_connection:.0f} bytes each", flush=True)

    async def run(self):
        self.begin = time.monotonic()
        self.end = self.begin + self.seconds
        workers = [asyncio.create_task(self.work(i)) for i in range(CLIENTS)]
        had_idle = False
        while (now := time.monotonic()) < self.end:
            await asyncio.sleep(max(0, min(REST_EVERY, self.seconds / 8, self.end - now - 1)))
            if time.monotonic() > self.end - 2:
                break
            if not had_idle and time.monotonic() > self.begin + self.seconds / 4:
                had_idle = True
                await self.idle_connections()
            await self.rest()
        await asyncio.gather(*workers)
        self.check(had_idle, "there was no time for idle connections")
        self.check_memory()

    def check_memory(self):
        """A line through the second half of the samples."""
        half = [(t / 3600, b / 2**20) for t, b in self.memory if t > self.seconds / 2]
        if len(half) < 3:
            return self.check(False, f"{len(half)} samples of memory are too few: run longer")
        mean_t, mean_b = (sum(column) / len(half) for column in zip(*half))
        slope = sum((t - mean_t) * (b - mean_b) for t, b in half) / sum((t - mean_t) ** 2 for t, _ in half)
        hours = half[-1][0] - half[0][0]
        print(f"        memory: {slope:+.2f} MiB/h over the last {hours * 60:.1f} min, {slope * hours:+.2f} MiB", flush=True)
        self.check(slope * hours <= 1 + hours, f"memory grew by {slope * hours:.2f} MiB in {hours * 60:.1f} minutes")


def text_of(kind, parts, streamed):
    """The text of all choices of an answer, whatever its form."""
    if kind in ("chat", "completion"):
        texts = {}
        for part in parts:
            for choice in part.get("choices", []):
                said = choice.get("text") or (choice.get("delta" if streamed else "message") or {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + said
        return [texts[i] for i in sorted(texts)]
    if kind == "response":
        return ["".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta") if streamed else
                "".join(content["text"] for item in parts[0]["output"] for content in item.get("content", []))]
    return ["".join(part["delta"].get("text", "") for part in parts if part["type"] == "content_block_delta") if streamed else
            "".join(block["text"] for block in parts[0]["content"])]


def main():
    program, model = sys.argv[1:3]
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 1200
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    server = Server(program, model)
    soak = Soak(server, seconds)
    try:
        asyncio.run(soak.run())
        server.process.terminate()
        soak.check(server.process.wait(60) == 0, f"the server ended with {server.process.returncode}")
    finally:
        server.process.kill()
    for failure in soak.failures:
        print("FAILED:", failure)
    print(f"{soak.whole} answers, {soak.rests} rests, {len(soak.failures)} failures")
    sys.exit(1 if soak.failures else 0)


if __name__ == "__main__":
    main()
