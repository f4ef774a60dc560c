#!/usr/bin/env python3
"""What a request costs through Ray Serve and through `nanovllm serve`, in processor time, and requests a second: bench/ray_bench.py [SECONDS]

PYTHONPATH=build/release/python, in an environment with ray[serve]. models/demo on one thread, 32 clients with a connection for each request,
completions of 16 tokens."""
import asyncio
import os
import pathlib
import statistics
import sys
import time
from importlib.util import find_spec

from frontends_bench import ask
from serve_bench import DEMO, Server, show, thread_seconds

CLIENTS, TOKENS = 32, 16
PORT = 8124


async def load(host, port, seconds, stream):
    """Requests, requests a second, and the median of their times."""
    times, end = [], time.monotonic() + seconds

    async def client(number):
        while time.monotonic() < end:
            begin = time.monotonic()
            await ask(host, port, [number % 1000 + 1, 7, 8], TOKENS, stream)
            times.append(time.monotonic() - begin)

    begin = time.monotonic()
    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return len(times), len(times) / (time.monotonic() - begin), 1000 * statistics.median(times)


def ray_seconds():
    """Processor time by now of Ray's processes, by kind."""
    sums = {"replica": 0.0, "proxy": 0.0, "the rest": 0.0}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            if not command.startswith("ray::") and "/ray/" not in command:
                continue
            kind = "replica" if "ServeReplica" in command else "proxy" if "ProxyActor" in command else "the rest"
            sums[kind] += sum(thread_seconds(process.name).values())
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended
    return sums


def rates(name, host, port, seconds, processor_seconds):
    asyncio.run(load(host, port, 2, False))
    for stream in (False, True):
        before = processor_seconds()
        count, rate, middle = asyncio.run(load(host, port, seconds, stream))
        costs = {kind: 1000 * (value - before[kind]) / count for kind, value in processor_seconds().items()}
        show(
            f"{name}, {'streamed' if stream else 'whole'}",
            f"{sum(costs.values()):.0f} ms of a core for a request",
            ", ".join(f"{kind} {cost:.1f}" for kind, cost in costs.items())
            + f"; {rate:.0f} requests/s, median {middle:.0f} ms; load {os.getloadavg()[0]:.1f}",
        )


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
    rates("Ray", "127.0.0.1", PORT, seconds, ray_seconds)
    serve.shutdown()
    ray.shutdown()
    program = os.path.join(os.path.dirname(find_spec("nanovllm").origin), "nanovllm")
    with Server(program, str(DEMO)) as server:
        rates("nanovllm serve", server.host, server.port, seconds, lambda: {"program": sum(thread_seconds(server.pid).values())})


if __name__ == "__main__":
    main()
