import asyncio
import json
import os
import random
import threading
import time
from concurrent.futures import CancelledError
from contextvars import ContextVar

import pytest
from conftest import DEMO

from nanovllm import AsyncLLM, OpenAIError, RequestOutputKind, SamplingParams

PROMPT = "Once upon a time"
LONG = SamplingParams(temperature=1, max_tokens=65000, ignore_eos=True, seed=3)
# With a context of this length LONG takes minutes on any machine.
ENDLESS = {"max_model_len": 65536, "allow_long_max_model_len": True, "cpu_kvcache_bytes": 1 << 30}


@pytest.fixture(scope="module")
def engine():
    made = AsyncLLM(DEMO, device="cpu", num_threads=1, served_model_name="demo", **ENDLESS)
    yield made
    made.exit()


def params(seed=1, max_tokens=24, **more):
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, **more)


async def outputs_of(engine, prompt, sampling):
    return [output async for output in engine.generate(prompt, sampling)]


async def until_running(engine, requests=1):
    while engine.num_live < requests:
        await asyncio.sleep(0.001)


def wait_until_idle(engine):
    end = time.monotonic() + 120
    while engine.num_live > 0:
        assert time.monotonic() < end, "requests are left"
        time.sleep(0.01)


def test_outputs_grow_to_what_the_blocking_engine_gives(engine, llm):
    expected = llm.generate(PROMPT, params(), use_tqdm=False)[0]
    outputs = asyncio.run(outputs_of(engine, PROMPT, params()))
    assert outputs[-1] == expected and outputs[-1].finished
    assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
    for earlier, later in zip(outputs, outputs[1:]):
        assert later["text"].startswith(earlier["text"])
        assert later["token_ids"][: len(earlier["token_ids"])] == earlier["token_ids"]
        assert earlier.prompt_token_ids == later.prompt_token_ids
        assert earlier.request_id == later.request_id


def test_pieces_add_up_and_the_end_comes_alone(engine, llm):
    expected = llm.generate(PROMPT, params(), use_tqdm=False)[0]
    delta = params(output_kind=RequestOutputKind.DELTA)
    pieces = asyncio.run(outputs_of(engine, PROMPT, delta))
    assert "".join(piece["text"] for piece in pieces) == expected["text"]
    assert sum((piece["token_ids"] for piece in pieces), []) == expected["token_ids"]
    final = params(output_kind=RequestOutputKind.FINAL_ONLY)
    assert asyncio.run(outputs_of(engine, PROMPT, final)) == [expected]


def test_a_cancelled_task_and_a_loop_that_is_left_abort_their_requests(engine):
    async def cancelled():
        task = asyncio.create_task(outputs_of(engine, PROMPT, LONG))
        await until_running(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def left():
        async for _ in engine.generate(PROMPT, LONG):
            break

    for leave in (cancelled, left):
        asyncio.run(leave())
        wait_until_idle(engine)
    assert not engine._ports and not engine._names


def test_a_long_prompt_that_is_cancelled_while_it_is_tokenized_leaves_nothing(engine):
    async def main():
        task = asyncio.create_task(outputs_of(engine, "word " * 900, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_idle(engine)


def test_abort_by_name_ends_a_request_with_that_reason(engine):
    async def main():
        async for output in engine.generate(PROMPT, LONG, request_id="mine"):
            assert output.request_id == "mine"
            await engine.abort(name)
        return output

    for name in ["mine", ["mine", "nobody's"]]:
        assert asyncio.run(main()).outputs[0].finish_reason == "abort"


def test_a_name_given_again_is_the_later_requests(engine):
    async def main():
        first = engine.generate(PROMPT, LONG, "same")
        second = engine.generate(PROMPT, LONG, "same")
        await anext(first)
        await anext(second)
        await first.aclose()
        await engine.abort("same")
        return [output async for output in second][-1]

    output = asyncio.run(asyncio.wait_for(main(), 60))
    assert output.outputs[0].finish_reason == "abort"


def test_a_bad_request_is_a_value_error(engine):
    with pytest.raises(ValueError, match="token"):
        asyncio.run(outputs_of(engine, [10**6], params()))
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        asyncio.run(outputs_of(engine, "a", {"temperature": 0}))
    with pytest.raises(TypeError, match="a prompt must be text"):
        asyncio.run(outputs_of(engine, None, params()))
    wait_until_idle(engine)
    assert not engine._ports


def test_the_loop_wakes_up_once_a_step_at_most(engine):
    async def main():
        port = engine._port()
        takes = 0
        take = port._take

        def counted():
            nonlocal takes
            takes += 1
            take()

        port.loop.add_reader(port.handle.fileno(), counted)
        before = engine.stats["steps"]
        await asyncio.gather(*(outputs_of(engine, PROMPT, params(i, 64)) for i in range(8)))
        return takes, engine.stats["steps"] - before

    takes, steps = asyncio.run(main())
    assert 0 < takes <= steps + 1


def test_a_reader_goes_on_in_the_round_of_the_loop_that_brings_its_news(engine):
    async def main():
        port, late = engine._port(), []

        def take():
            port.loop.call_soon(late.append, None)
            port._take()

        port.loop.add_reader(port.handle.fileno(), take)
        count = 0
        async for _ in engine.generate(PROMPT, params(max_tokens=8, ignore_eos=True)):
            assert len(late) == count
            count += 1
            await asyncio.sleep(0)
        return count

    assert asyncio.run(main()) > 0  # one, where the engine is done before the loop first looks


def test_readers_keep_their_context(engine):
    name = ContextVar("name")

    async def read(number):
        name.set(number)
        async for _ in engine.generate(PROMPT, params(number, 16)):
            assert name.get() == number
            await asyncio.sleep(0)  # here the loop gives the task its own context
            number += 10
            name.set(number)

    async def main():
        await read(8)  # alone: it goes on from the port's callback
        await asyncio.gather(*(read(number) for number in range(4)))

    asyncio.run(main())


def test_a_reader_may_wait_for_some_time_only(engine):
    async def main():
        outputs = engine.generate(PROMPT, LONG)
        await outputs.__anext__()
        with pytest.raises(asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(outputs.__anext__(), 0.0001)

    asyncio.run(main())
    wait_until_idle(engine)


def test_many_threads_and_loops_with_random_cancellations_lose_nothing(engine, llm):
    """Four threads with a loop each, and 28 that give them work. NANOVLLM_TEST_SECONDS makes it longer."""
    expected = [llm.generate(PROMPT, params(i), use_tqdm=False)[0] for i in range(8)]
    loops = [asyncio.new_event_loop() for _ in range(4)]
    finished, cancelled, failures = [], [], []
    end = time.monotonic() + float(os.environ.get("NANOVLLM_TEST_SECONDS", "4"))

    def client(number):
        rng = random.Random(number)
        while True:
            seed = rng.randrange(8)
            task = asyncio.run_coroutine_threadsafe(
                outputs_of(engine, PROMPT, params(seed)), loops[number % 4]
            )
            if rng.random() < 0.4:
                time.sleep(rng.choice([0, rng.random() * 0.05]))
                task.cancel()
            try:
                finished.append(task.result(120)[-1] == expected[seed])
            except CancelledError:
                cancelled.append(seed)
            if time.monotonic() > end:
                return

    def work(target, *args):
        try:
            target(*args)
        except BaseException as error:
            failures.append(error)

    runners = [threading.Thread(target=work, args=(loop.run_forever,)) for loop in loops]
    clients = [threading.Thread(target=work, args=(client, i)) for i in range(28)]
    for thread in runners + clients:
        thread.start()
    for thread in clients:
        thread.join()
    wait_until_idle(engine)
    for loop in loops:  # its generators end before it does
        asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
    for thread in runners:
        thread.join()
    for loop in loops:
        loop.close()
    print(f"{len(finished)} finished, {len(cancelled)} cancelled")
    assert not failures and finished and all(finished) and cancelled
    assert not engine._ports and not engine._names


def test_endpoints_answer_without_http(engine, llm):
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "temperature": 0.9}
    body |= {"top_p": 1, "top_k": 0, "min_p": 0}

    async def main():
        models = await engine.openai("/v1/models")
        answer = await engine.openai("/v1/completions", body)
        health = await engine.openai("/health")
        metrics = await engine.openai("/metrics")
        return models, answer, health, metrics

    models, answer, health, metrics = asyncio.run(main())
    assert models["data"][0]["id"] == "demo"
    expected = llm.generate(PROMPT, params(), use_tqdm=False)[0]
    assert answer["choices"][0]["text"] == expected["text"]
    assert answer["usage"]["completion_tokens"] == len(expected["token_ids"])
    assert health == {"status": "ok"} and "vllm:num_requests_running" in metrics


def test_endpoints_stream(engine):
    messages = [{"role": "user", "content": "What is 37 + 45?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}

    async def main():
        whole = await engine.openai("/v1/chat/completions", body)
        chunks = [c async for c in engine.openai_stream("/v1/chat/completions", body)]
        return whole, chunks

    whole, chunks = asyncio.run(main())
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == whole["choices"][0]["message"]["content"] and "82" in text


def test_a_stream_that_is_left_aborts_its_request(engine):
    async def main():
        body = {"prompt": PROMPT, "max_tokens": 65000, "ignore_eos": True}
        async for _ in engine.openai_stream("/v1/completions", body):
            break

    asyncio.run(main())
    wait_until_idle(engine)


@pytest.mark.parametrize("ends", ["closed", "dropped", "loop"])
def test_an_answer_whose_body_nobody_reads_aborts_its_request(engine, ends):
    async def main():
        body = {"prompt": PROMPT, "max_tokens": 65000, "ignore_eos": True, "stream": True}
        response = await engine.request("/v1/completions", json.dumps(body))
        assert response.status == 200
        await until_running(engine)
        if ends == "closed":
            await response.body.aclose()
        elif ends == "dropped":
            del response
            await asyncio.sleep(0.01)  # asyncio closes generators that are garbage
        return response if ends == "loop" else None

    kept = asyncio.run(main())
    wait_until_idle(engine)
    assert kept is None or kept.status == 200


def test_an_endpoints_error_has_its_status(engine):
    async def main(path, body):
        try:
            await engine.openai(path, body)
        except OpenAIError as error:
            return error

    error = asyncio.run(main("/v1/completions", {"prompt": "x", "temperature": -1}))
    assert error.status == 400 and error.body["error"]["param"] == "temperature"
    assert json.dumps(error.body) and "temperature" in str(error)
    assert asyncio.run(main("/nowhere", {})).status == 404


def test_endpoints_take_a_priority_where_the_policy_is_asked_for(engine):
    body = {"prompt": PROMPT, "max_tokens": 2, "priority": 3}
    with pytest.raises(OpenAIError, match="priority needs scheduling_policy priority"):
        asyncio.run(engine.openai("/v1/completions", body))
    made = AsyncLLM(DEMO, device="cpu", num_threads=1, scheduling_policy="priority")
    assert asyncio.run(made.openai("/v1/completions", body))["usage"]["completion_tokens"] == 2
    made.exit()


def test_an_engine_that_drains_takes_no_more_and_a_freed_one_says_so():
    made = AsyncLLM(DEMO, device="cpu", num_threads=1)

    async def main():
        outputs = made.generate(PROMPT, params(max_tokens=100))
        await outputs.__anext__()
        assert await made.drain(120)
        assert [output async for output in outputs][-1].finished
        with pytest.raises(RuntimeError, match="shutting down"):
            await outputs_of(made, PROMPT, params())

    asyncio.run(main())
    made.exit()
    with pytest.raises(RuntimeError, match="exit"):
        asyncio.run(outputs_of(made, PROMPT, params()))


def test_requests_end_when_the_engine_is_freed_under_them():
    made = AsyncLLM(DEMO, device="cpu", num_threads=1, **ENDLESS)

    async def main():
        running = asyncio.create_task(outputs_of(made, PROMPT, LONG))
        body = {"prompt": PROMPT, "max_tokens": 65000, "ignore_eos": True}
        asked = asyncio.create_task(made.openai("/v1/completions", body))
        await until_running(made, 2)
        made.exit()
        return await asyncio.gather(running, asked, return_exceptions=True)

    running, asked = asyncio.run(asyncio.wait_for(main(), 120))
    assert running[-1].outputs[0].finish_reason == "abort"
    assert isinstance(asked, OpenAIError) and asked.status == 503
