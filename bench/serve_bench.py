#!/usr/bin/env python3
"""The server's cost beside the model: bench/serve_bench.py build/release/bin/nanovllm [seconds]

The model is one layer of 32 columns with random weights and the demo model's tokenizer, so that the engine costs next to nothing. All
figures are by the processor time of the server's process (user and system, all threads), whatever the client costs and whoever shares the
machine; "core" means a second of it."""
import http.client
import json
import os
import pathlib
import re
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
        (directory / name).symlink_to(DEMO / name)


def process_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def start(program, model):
    server = subprocess.Popen([program, "serve", model, "--load-format", "dummy", "--device", "cpu", "--threads", "1", "--port", "0",
                               "--no-access-log", "--max-num-queued-reqs", "100000"], stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if match := re.search(r"serving .* on http://(\S+)", line):
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return server, match[1]
    sys.exit("the server did not start")


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


def rate(server, address, body, seconds, tokens):
    load(address, body, 0.3)
    begin = process_seconds(server.pid)
    answered = load(address, body, seconds)
    used = process_seconds(server.pid) - begin
    return answered / used, answered * tokens / used


def idle_memory(server, address, count=1000):
    host, port = address.split(":")
    before = resident_bytes(server.pid)
    connections = [http.client.HTTPConnection(host, int(port)) for _ in range(count)]
    for connection in connections:
        connection.request("GET", "/health")
        connection.getresponse().read()
    time.sleep(0.5)
    used = (resident_bytes(server.pid) - before) / count
    for connection in connections:
        connection.close()
    return used


def main():
    program, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as name:
        make_model(pathlib.Path(name))
        server, address = start(program, name)
        print(f"bytes per idle connection        {idle_memory(server, address):8.0f}")
        for stream in (False, True):
            requests, _ = rate(server, address, chat(max_tokens=16, stream=stream), seconds, 16)
            print(f"chat, 16 tokens, {'streamed' if stream else 'whole   '}       {requests:8.0f} requests/s per core")
        _, tokens = rate(server, address, chat(max_tokens=512, stream=True), seconds, 512)
        print(f"chat, 512 tokens, streamed       {tokens:8.0f} tokens/s per core")
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
