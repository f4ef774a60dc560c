"""nanovllm.ray on this machine, where Ray is installed (pip install "ray[serve]" httpx); CI does without."""

import asyncio
import os
import random
import time

import pytest
from conftest import DEMO

ray = pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray import serve  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.ray import app  # noqa: E402

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.9}
BODY |= {"top_p": 1, "top_k": 0, "min_p": 0}
REQUESTS = int(os.environ.get("NANOVLLM_TEST_RAY_REQUESTS", "500"))


@pytest.fixture(scope="module")
def address():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    arguments = {"model": DEMO, "device": "cpu", "num_threads": "1", "num_replicas": "2"}
    serve.start(http_options={"port": 8123})
    serve.run(app(arguments))
    yield "http://127.0.0.1:8123"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def expected():
    with LLM(DEMO, device="cpu", num_threads=1) as llm:
        params = [SamplingParams(temperature=0.9, max_tokens=24, seed=s) for s in range(8)]
        return [o["text"] for o in llm.generate([BODY["prompt"]] * 8, params, use_tqdm=False)]


def test_a_replica_answers_as_the_server_does(address, expected):
    answer = httpx.post(f"{address}/v1/completions", json={**BODY, "seed": 3}, timeout=60)
    assert answer.json()["choices"][0]["text"] == expected[3]
    with httpx.stream(
        "POST", f"{address}/v1/completions", json={**BODY, "seed": 3, "stream": True}, timeout=60
    ) as stream:
        events = list(stream.iter_lines())
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert events[-2] == "data: [DONE]"
    refused = httpx.post(f"{address}/v1/completions", json={"prompt": "x", "temperature": -1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == DEMO


def test_a_replica_that_is_killed_comes_back_and_the_others_lose_nothing(address, expected):
    rng = random.Random(1)
    right = cancelled = failed = 0

    async def one(client, number):
        nonlocal right, cancelled, failed
        seed = number % 8
        call = asyncio.create_task(
            client.post(f"{address}/v1/completions", json={**BODY, "seed": seed})
        )
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.1)
            call.cancel()
        try:
            answer = await call
        except asyncio.CancelledError:
            cancelled += 1
            return
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected[seed]
            right += 1
        else:
            failed += 1
            assert answer.status_code >= 500

    async def main():
        gate = asyncio.Semaphore(32)

        async def gated(client, number):
            async with gate:
                await one(client, number)

        async with httpx.AsyncClient(timeout=120) as client:
            tasks = [asyncio.create_task(gated(client, i)) for i in range(REQUESTS)]
            await asyncio.sleep(2)
            actors = ray.util.list_named_actors(all_namespaces=True)
            replica = next(a for a in actors if "nanovllm" in a["name"] and "REPLICA" in a["name"])
            ray.kill(ray.get_actor(**replica), no_restart=False)
            await asyncio.gather(*tasks)

    begin = time.monotonic()
    asyncio.run(main())
    seconds = time.monotonic() - begin
    print(f"{right} right, {cancelled} cancelled, {failed} failed, {REQUESTS / seconds:.0f} /s")
    assert right + cancelled + failed == REQUESTS and failed <= 64
    end = time.monotonic() + 120
    while time.monotonic() < end:
        status = serve.status().applications["default"].deployments["nanovllm"]
        if status.replica_states.get("RUNNING") == 2:
            return
        time.sleep(0.5)
    raise AssertionError("the replica did not come back")
