"""A Ray Serve application: replicas of an engine behind OpenAI's endpoints.

    serve run nanovllm.ray:app model=/models/Qwen3-0.6B num_replicas=2

Arguments are the options of AsyncLLM, and `num_replicas` ("auto": by the queue's length),
`min_replicas, max_replicas, target_ongoing_requests, max_ongoing_requests, drain_seconds`. Each
replica takes `tensor_parallel_size` GPUs, or with `device=cpu` `num_threads` CPUs. Ray places
replicas, restarts them and asks check_health(); `pip install "ray[serve]"` brings it.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from nanovllm.async_llm import AsyncLLM

__all__ = ["Engine", "app"]


class Engine:
    """One replica."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = AsyncLLM(**options)

    async def __call__(self, request: Request) -> HttpResponse:
        body = await request.body() if request.method == "POST" else None
        try:
            answer = await self._llm.request(request.url.path, body)
        except UnicodeDecodeError:
            return HttpResponse("the body must be UTF-8", 400)
        if answer.content_type == "text/event-stream":
            return StreamingResponse(answer.body, answer.status, media_type=answer.content_type)
        whole = b"".join([part async for part in answer.body])
        return HttpResponse(whole, answer.status, media_type=answer.content_type)

    async def check_health(self) -> None:
        """Ray asks; a replica whose engine has failed is replaced."""
        await self._llm.check_health()

    async def __del__(self) -> None:
        # Ray takes a replica out of the routing, lets its requests end, then drops it.
        self._llm.exit()


def app(arguments: dict[str, str]) -> serve.Application:
    """The application that `serve run nanovllm.ray:app NAME=VALUE...` runs."""
    options = {name: _value(value) for name, value in arguments.items()}
    if "model" not in options:
        raise ValueError("model is missing: serve run nanovllm.ray:app model=DIRECTORY")
    target = options.pop("target_ongoing_requests", 32)
    scaling: dict[str, Any] = {"num_replicas": options.pop("num_replicas", 1)}
    least, most = options.pop("min_replicas", 1), options.pop("max_replicas", 8)
    if scaling["num_replicas"] == "auto":
        del scaling["num_replicas"]
        scaling["autoscaling_config"] = {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": target,
        }
    on_cpu = options.get("device") == "cpu"
    deployment = serve.deployment(
        Engine,
        name="nanovllm",
        max_ongoing_requests=options.pop("max_ongoing_requests", 512),
        graceful_shutdown_timeout_s=options.pop("drain_seconds", 30),
        health_check_period_s=5,
        ray_actor_options={
            "num_cpus": options.get("num_threads", 1) if on_cpu else 1,
            "num_gpus": 0 if on_cpu else options.get("tensor_parallel_size", 1),
        },
        **scaling,
    )
    return deployment.bind(options)


def _value(text: Any) -> Any:
    """8, 0.9, True or a list where it is one; else the text."""
    try:
        return ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError):
        return text
