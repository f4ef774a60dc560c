"""Ctrl-C, threads, processes, and the end of an engine."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import DEMO, PROMPTS, SOURCE

from nanovllm import LLM, SamplingParams

LONG = SamplingParams(temperature=1, max_tokens=4000, ignore_eos=True, seed=3)


@pytest.mark.parametrize("name, ranks", [("LLM", 1), ("LLM", 2), ("AsyncLLM", 1)])
def test_ctrl_c_ends_loading(name, ranks):
    # Of 1.2 GB of weights the first are made when the signal comes: memory tells that no others are.
    code = f"""
import resource, signal
from nanovllm import {name}
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    {name}({str(SOURCE / "bench/configs/qwen3-0.6b")!r}, device="cpu", load_format="dummy", num_threads={ranks},
           tensor_parallel_size={ranks}, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=1)
except KeyboardInterrupt:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000


def test_ctrl_c_ends_the_reading_of_prompts():
    code = f"""
import resource, signal
from nanovllm import LLM
llm = LLM({DEMO!r}, device="cpu", num_threads=1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    llm.generate(["a b " * 700] * 100_000, use_tqdm=False)  # 600 MB of tokens
except KeyboardInterrupt:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 700


def test_ctrl_c_ends_generate_and_leaves_the_engine_as_it_was(llm):
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        llm.generate(PROMPTS * 400, LONG, use_tqdm=False)  # minutes on any machine
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert llm.is_finished() and llm.stats["running"] == 0
    assert llm.generate(PROMPTS, params, use_tqdm=False) == expected


def test_other_threads_run_while_the_engine_works(llm):
    counts, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    begin = time.monotonic()
    llm.generate(PROMPTS * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    seconds = time.monotonic() - begin
    done.set()
    thread.join()
    # With the GIL held it would not count at all.
    assert counts[0] > 10 * min(1, seconds)


def test_threads_that_share_an_llm_get_their_own_answers(llm):
    def params(seed):
        return SamplingParams(seed=seed, max_tokens=12)

    expected = [llm.generate(PROMPTS[0], params(i), use_tqdm=False)[0]["text"] for i in range(8)]
    got = [None] * 8

    def work(i):
        got[i] = llm.generate(PROMPTS[0], params(i), use_tqdm=False)[0]["text"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_of_fork_is_refused_with_a_sentence(llm):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate(["x"], SamplingParams(), use_tqdm=False)
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        message = file.read()
    # An engine of the child's own would wait for OpenMP's threads, which are missing there.
    assert "made before fork()" in message and "`spawn`" in message and "in the child" not in message


@pytest.mark.parametrize("work", ["llm.generate(['x'] * 200, params, use_tqdm=False)", "while True: llm.step()"])
def test_a_program_ends_well_while_a_daemons_thread_is_at_work(work):
    code = f"""
import threading, time
from nanovllm import LLM, SamplingParams
llm = LLM({DEMO!r}, device="cpu", num_threads=1)
params = SamplingParams(max_tokens=2000, ignore_eos=True)
for _ in range(50): llm.add_request("x", params)
def work():
    {work}
threading.Thread(target=work, daemon=True).start()
while llm._engine.stats()["steps"] < 20: time.sleep(0.01)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_a_freed_llm_says_so():
    engine = LLM(DEMO, device="cpu", num_threads=1)
    engine.exit()
    engine.exit()
    with pytest.raises(RuntimeError, match="exit"):
        engine.generate(["x"], SamplingParams(), use_tqdm=False)


def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_engines_that_are_dropped_leave_nothing():
    rounds = int(os.environ.get("NANOVLLM_TEST_ENGINES", "40"))
    sizes = []
    for i in range(rounds):
        engine = LLM(DEMO, device="cpu", num_threads=1, max_num_seqs=2, max_model_len=64)
        output = engine.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)
        del engine, output
        gc.collect()
        if i in (rounds // 2, rounds - 1):
            sizes.append((resident_kib(), len(gc.get_objects()), len(os.listdir("/proc/self/fd"))))
    (memory, objects, files), last = sizes
    print(f"{rounds} engines: {memory} KiB, {objects} objects, {files} files at half; {last} at the end")
    assert last[0] - memory < 4096  # one engine's weights alone take 8 MiB
    assert last[1] - objects < rounds
    assert last[2] == files
