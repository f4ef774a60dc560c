#!/usr/bin/env python3
"""Requests a second through Ray Serve and through `nanovllm serve`, in turns: bench/ray_bench.py [SECONDS]

PYTHONPATH=build/release/python, in an environment with ray[serve]. models/demo on one thread, 32 clients with a connection for each request,
completions of 16 tokens."""
import asyncio
import os
import statistics
import sys
import time
from importlib.util import find_spec

from frontends_bench import ask
from serve_bench import DEMO, Server, show

CLIENTS, TOKENS = 32, 16
PORT = 8124


async def load(host, port, seconds, stream):
    """Requests a second, and the median of their times."""
    times, end = [], time.monotonic() + seconds

    async def client(number):
        while time.monotonic() < end:
            begin = time.monotonic()
            await ask(host, port, [number % 1000 + 1, 7, 8], TOKENS, stream)
            times.append(time.monotonic() - begin)

    begin = time.monotonic()
    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return len(times) / (time.monotonic() - begin), 1000 * statistics.median(times)


def rates(name, host, port, seconds):
    asyncio.run(load(host, port, 2, False))
    for stream in (False, True):
        rate, middle = asyncio.run(load(host, port, seconds, stream))
        show(f"{name}, {'streamed' if stream else 'whole'}", f"{rate:.0f} requests/s", f"median {middle:.0f} ms; load {os.getloadavg()[0]:.1f}")


def main():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from nanovllm.ray import app

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    begin = time.monotonic()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    serve.run(app({"model": str(DEMO), "device": "cpu", "num_threads": "1"}))
    show("Ray, start to serving", f"{time.monotonic() - begin:.1f} s", "")
    rates("Ray", "127.0.0.1", PORT, seconds)
    serve.shutdown()
    ray.shutdown()
    program = os.path.join(os.path.dirname(find_spec("nanovllm").origin), "nanovllm")
    with Server(program, str(DEMO)) as server:
        rates("nanovllm serve", server.host, server.port, seconds)


if __name__ == "__main__":
    main()
