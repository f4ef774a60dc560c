#!/usr/bin/env python3
"""Routers of the field in front of two servers: the share of prompt tokens that the servers find in their prefix caches.

    bench/router_bench.py build/release/bin/nanovllm [--kill] vllm-router --policy cache_aware

32 conversations of 6 turns, whose prompts grow from about 300 to 900 tokens, come from 4 clients in random order; either server's cache holds about half of the
conversations. The router's command gets --worker-urls, --host and --port; {events} in it becomes the flags that tell vllm-router of both servers' KV events. With
--kill one server is killed after a third of the requests, and is back after two thirds."""
import http.client
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

DEMO = str(pathlib.Path(__file__).resolve().parents[1] / "models/demo")
ROUTER, SERVERS = 8100, (8101, 8102)
CONVERSATIONS, TURNS, CLIENTS = 32, 6, 4
WORDS = "river stone lamp morning window garden winter paper bread silver road cloud horse night apple table".split()


def start(program, port):
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port + 100}", "replay_endpoint": f"tcp://127.0.0.1:{port + 200}"}
    command = [program, "serve", DEMO, "--served-model-name", "demo", "--port", str(port), "--device", "cpu", "--threads", "1", "--block-size", "16",
               "--num-gpu-blocks-override", "960", "--max-num-seqs", "8", "--no-access-log", "--kv-events-config", json.dumps(events)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if "serving" in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return server
    sys.exit(f"the server on port {port} did not start")


def counters(port):
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    value = lambda name: sum(float(n) for n in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M))
    return value("vllm:prefix_cache_hits"), value("vllm:prefix_cache_queries"), value("vllm:request_success")


def await_router(router):
    for _ in range(300):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{ROUTER}/v1/models", timeout=2).status == 200:
                return
        except OSError:
            pass
        if router.poll() is not None:
            sys.exit("the router has ended")
        time.sleep(0.2)
    sys.exit("the router does not answer")


def run(at_request):
    """Asks everything and returns the statuses; `at_request` is called with the number of each request before it."""
    dice = random.Random(5)
    order = [c for c in range(CONVERSATIONS) for _ in range(TURNS)]
    dice.shuffle(order)
    speak = lambda n: " ".join(dice.choice(WORDS) for _ in range(n))
    histories = [[{"role": "system", "content": f"{c}: {speak(120)}"}] for c in range(CONVERSATIONS)]
    locks, lock, statuses, position = [threading.Lock() for _ in histories], threading.Lock(), [], iter(range(len(order)))

    def client():
        while True:
            with lock:
                i = next(position, None)
                question = speak(40)
            if i is None:
                return
            at_request(i)
            with locks[order[i]]:
                history = histories[order[i]]
                history.append({"role": "user", "content": question})
                body = json.dumps({"model": "demo", "messages": history, "max_tokens": 8, "ignore_eos": True, "temperature": 0})
                status, answer = 0, {}
                try:
                    connection = http.client.HTTPConnection("127.0.0.1", ROUTER, timeout=120)
                    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                    reply = connection.getresponse()
                    status, answer = reply.status, json.loads(reply.read() or b"{}")
                except (OSError, http.client.HTTPException, ValueError):
                    pass
                text = answer["choices"][0]["message"]["content"] if status == 200 else ""
                history.append({"role": "assistant", "content": text})
                statuses.append((i, status))

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def main():
    arguments = sys.argv[1:]
    program, kills = arguments.pop(0), arguments[0] == "--kill"
    command = arguments[1:] if kills else arguments
    servers = {port: start(program, port) for port in SERVERS}
    urls = [f"http://127.0.0.1:{port}" for port in SERVERS]
    events = [f for url, port in zip(urls, SERVERS) for f in ("--kv-event-source", f"{url}=tcp://127.0.0.1:{port + 100}",
                                                              "--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{port + 200}")]
    command = [f for flag in command for f in (events if flag == "{events}" else [flag])]
    with open("router.log", "w") as log:
        router = subprocess.Popen(command + ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(ROUTER)], stdout=log, stderr=log)
    try:
        await_router(router)
        total = CONVERSATIONS * TURNS
        before = {}

        def at_request(i):
            if kills and i == total // 3:
                servers[SERVERS[1]].kill()
                servers[SERVERS[1]].wait()
            if kills and i == 2 * total // 3:
                servers[SERVERS[1]] = start(program, SERVERS[1])

        before = {port: counters(port) for port in SERVERS}
        statuses = run(at_request)
        after = {port: counters(port) for port in SERVERS}
        hits, queries = (sum(after[p][k] - (0 if kills and p == SERVERS[1] else before[p][k]) for p in SERVERS) for k in (0, 1))
        print(" ".join(command[:8]))
        print(f"{total} requests, answered {sum(s == 200 for _, s in statuses)}, others {sorted((i, s) for i, s in statuses if s != 200)}")
        print(f"prompt tokens {queries:.0f}, found in a cache {hits:.0f}: {100 * hits / queries:.1f} %")
        print("answered by each server:", *(f"{after[p][2] - (0 if kills and p == SERVERS[1] else before[p][2]):.0f}" for p in SERVERS))
    finally:
        router.send_signal(signal.SIGTERM)
        for server in servers.values():
            server.kill()
        try:
            router.wait(10)
        except subprocess.TimeoutExpired:
            router.kill()


if __name__ == "__main__":
    main()
