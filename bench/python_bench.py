"""Times the Python package: its import, and what it adds to a token at batch 1.

    PYTHONPATH=build/release/python python3 bench/python_bench.py models/demo

The time of the event loop's thread is its CPU time, so other programs of the machine do not count.
"""

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

TOKENS = 1500


def import_ms(module):
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(15)
    ]
    return f"{1000 * statistics.median(runs):.1f} ms (best {1000 * min(runs):.1f})"


def cpu_seconds_of_program(model, tokens):
    program = os.path.join(os.path.dirname(find_spec("nanovllm").origin), "nanovllm")
    command = [program, "generate", model, "-q", "--device", "cpu", "-t", "1", "--max-num-seqs", "1"]
    command += ["--generation-config", "vllm", "--prompt", "x", "--ignore-eos", "--seed", "1"]
    command += ["--max-tokens", str(tokens)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def generate_us(model):
    """CPU time of a token of the program and of generate(), measured in turns."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, device="cpu", num_threads=1, max_num_seqs=1)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    runs = []
    for _ in range(7):
        begin = time.process_time()
        llm.generate(["x"], params, use_tqdm=False)
        ours = time.process_time() - begin
        program = cpu_seconds_of_program(model, TOKENS) - cpu_seconds_of_program(model, 1)
        runs.append((1e6 * program / TOKENS, 1e6 * ours / TOKENS))
    llm.exit()
    return [min(run[i] for run in runs) for i in (0, 1)]


async def asyncio_us():
    """The time that asyncio itself takes to wake a task by a descriptor."""
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
    from nanovllm import AsyncLLM, SamplingParams

    llm = AsyncLLM(model, device="cpu", num_threads=1, max_num_seqs=1)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    results = []
    for kind in (0, 1):
        params.output_kind = kind
        for _ in range(3):
            begin = time.thread_time()
            count = 0
            async for output in llm.generate("x", params):
                count += 1
                output.outputs[0].text
            results.append((kind, 1e6 * (time.thread_time() - begin) / count))
    llm.exit()
    return {kind: min(us for k, us in results if k == kind) for kind in (0, 1)}


def main():
    model = sys.argv[1]
    print("import nanovllm          ", import_ms("nanovllm"))
    print("import nanovllm.async_llm", import_ms("nanovllm.async_llm"))
    print("import asyncio           ", import_ms("asyncio"))
    program, ours = generate_us(model)
    print(f"CPU time of a token: program {program:.1f} us, generate() {ours:.1f} us")
    times = asyncio.run(async_us(model))
    print(f"async for, a token: {times[0]:.1f} us of the loop's thread, {times[1]:.1f} in pieces;")
    print(f"asyncio alone, a wake-up: {asyncio.run(asyncio_us()):.1f} us")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
