"""Times the Python package: its import, and what it adds to a token at batch 1.

    PYTHONPATH=build/release/python python3 bench/python_bench.py models/demo

Times of tokens are CPU times, so other programs of the machine count by its caches alone, and what is compared is measured in turns, on one
core: of as many rounds as the time allows, the median and the middle half. Two minutes at most, import included, on a machine that is not idle.
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec

SECONDS = 25  # of rounds, for each of the two
TOKENS = 1500
REQUESTS = 8  # one after another, so that the program's start weighs little


def spread(values):
    if len(values) < 4:
        return f"{statistics.median(values):5.1f}"
    low, middle, high = statistics.quantiles(values)
    return f"{middle:5.1f} ({low:.1f} to {high:.1f})"


def import_ms(module):
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [
        1000 * float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(9)
    ]
    return f"{spread(runs)} ms, best {min(runs):.1f}"


def small_model(model, folder):
    """One small layer of random weights, so that what is measured stands out: a token of models/demo takes 5 ms on AVX2."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        os.symlink(os.path.abspath(os.path.join(model, name)), os.path.join(folder, name))


def program_seconds(model, tokens):
    """CPU time of the program for answers of so many tokens, start included."""
    program = os.path.join(os.path.dirname(find_spec("nanovllm").origin), "nanovllm")
    command = [program, "generate", model, "-q", "--device", "cpu", "-t", "1", "--max-num-seqs", "1"]
    command += ["--load-format", "dummy", "--generation-config", "vllm", "-i", "-", "-o", "-"]
    request = {"prompt": "x", "sampling_params": {"max_tokens": tokens, "ignore_eos": True, "seed": 1}}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, input=REQUESTS * (json.dumps(request) + "\n"), text=True, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def generate_us(model):
    """CPU time of a token of the program and of generate(), round by round."""
    from nanovllm import LLM, SamplingParams

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    llm = LLM(model, device="cpu", num_threads=1, max_num_seqs=1, load_format="dummy")

    def seconds(tokens):
        begin = time.process_time()
        llm.generate(REQUESTS * ["x"], SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1), use_tqdm=False)
        return time.process_time() - begin

    seconds(TOKENS)
    rounds, end = [], time.monotonic() + SECONDS
    while len(rounds) < 3 or time.monotonic() < end:
        both = [of(TOKENS) - of(1) for of in (lambda n: program_seconds(model, n), seconds)]
        rounds.append([1e6 * value / (TOKENS - 1) / REQUESTS for value in both])
    llm.exit()
    os.sched_setaffinity(0, cores)
    return rounds


async def wake_up_us():
    """CPU time that asyncio itself takes to wake a task by a descriptor."""
    loop, descriptor = asyncio.get_running_loop(), os.eventfd(0, os.EFD_NONBLOCK)
    waiter = None

    def wake():
        os.eventfd_read(descriptor)
        waiter.set_result(None)

    loop.add_reader(descriptor, wake)
    begin = time.thread_time()
    for _ in range(TOKENS):
        waiter = loop.create_future()
        os.eventfd_write(descriptor, 1)
        await waiter
    loop.remove_reader(descriptor)
    os.close(descriptor)
    return 1e6 * (time.thread_time() - begin) / TOKENS


async def async_us(model):
    """CPU time of the loop's thread for an output: everything so far, what is new, and asyncio's wake-up alone."""
    from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams

    llm = AsyncLLM(model, device="cpu", num_threads=1, max_num_seqs=1, load_format="dummy")

    async def stream_us(kind):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, output_kind=kind)
        begin, count = time.thread_time(), 0
        async for output in llm.generate("x", params):
            count += 1
            output.outputs[0].text
        return 1e6 * (time.thread_time() - begin) / count

    rounds, end = [], time.monotonic() + SECONDS
    while len(rounds) < 3 or time.monotonic() < end:
        kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)
        rounds.append([await stream_us(kind) for kind in kinds] + [await wake_up_us()])
    llm.exit()
    return rounds


def main():
    model = sys.argv[1]
    print(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    print("import nanovllm             ", import_ms("nanovllm"), " (must 60, aim 20)")
    print("import nanovllm.async_llm   ", import_ms("nanovllm.async_llm"))
    with tempfile.TemporaryDirectory() as folder:
        small_model(model, folder)
        rounds, streams = generate_us(folder), asyncio.run(async_us(folder))
    print(f"generate(), a token: program {spread([r[0] for r in rounds])} us, generate() {spread([r[1] for r in rounds])} us;")
    print(f"    added {spread([r[1] - r[0] for r in rounds])} us  (must 5, aim 1), {len(rounds)} rounds")
    whole, pieces, alone = ([r[i] for r in streams] for i in range(3))
    print(f"async for, a token: {spread(whole)} us of the loop's thread, best {min(whole):.1f}  (must 30, aim 15),")
    print(f"    {spread(pieces)} us in pieces, best {min(pieces):.1f}; asyncio's wake-up alone {spread(alone)} us, {len(streams)} rounds")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
