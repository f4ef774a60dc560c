"""AsyncLLM: one engine for any number of event loops and threads."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm import _core
from nanovllm.config import find_model, to_engine_options
from nanovllm.inputs import PromptType, salt_of, text_of
from nanovllm.llm import checked
from nanovllm.loop_port import GrowingStream, LoopPort, Stream
from nanovllm.outputs import RequestOutput, make_output
from nanovllm.sampling_params import RequestOutputKind, SamplingParams, to_json
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.arg_utils import EngineArgs

__all__ = ["AsyncLLM", "OpenAIError", "Response"]

# Bytes of a prompt from which on it is tokenized on a thread beside the loop.
_LONG_PROMPT = 4096


class OpenAIError(Exception):
    """An endpoint's error: `status` is HTTP's, `body` the answer ({"error": {"message", ...}})."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return f"{self.status}: {error['message'] if error else self.body}"


class Response(NamedTuple):
    """An endpoint's answer as the server would send it; `body` is to be read to its end or closed."""

    status: int
    content_type: str
    body: AsyncIterator[bytes]


class AsyncLLM:
    """A model, loaded, and its engine, for asyncio programs.

    Options are those of LLM, and the server's: `served_model_name, generation_config,
    max_num_queued_reqs, max_num_queued_tokens, request_timeout`. All methods may be called from any
    thread and any event loop.

        async for output in llm.generate("The sky was", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

    Leaving the loop, or cancelling the task, aborts the request.
    """

    def __init__(
        self,
        model: str,
        *,
        served_model_name: str | Sequence[str] = (),
        generation_config: str = "auto",
        max_num_queued_reqs: int = 0,
        max_num_queued_tokens: int = 0,
        request_timeout: float = 0,
        **options: Any,
    ) -> None:
        names = [served_model_name] if isinstance(served_model_name, str) else served_model_name
        directory = find_model(model)
        service = {
            "served_model_names": list(names) or [os.path.expanduser(os.fspath(model))],
            "generation_config": generation_config,
            "max_num_queued_reqs": max_num_queued_reqs,
            "max_num_queued_tokens": max_num_queued_tokens,
            "request_timeout": float(request_timeout),
            "version": _core.__version__,
        }
        self._timeout = float(request_timeout)
        self._engine = _core.AsyncEngine(directory, to_engine_options(directory, options), service)
        weakref.finalize(self, exit_engine, self._engine)
        self._ports: dict[asyncio.AbstractEventLoop, LoopPort] = {}
        self._names: dict[str, int] = {}
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """AsyncLLM() of the options that are not None."""
        return cls(**{name: value for name, value in vars(engine_args).items() if value is not None})

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, as they come: `sampling_params.output_kind` says whether each
        has everything so far (the default; a slow reader misses some), what is new, or the end
        alone. Lower priorities are served earlier (scheduling_policy). ValueError: the request is
        not acceptable. UnavailableError: a queue is full. EngineError: the engine has failed."""
        params = self.get_default_sampling_params() if sampling_params is None else checked(sampling_params)
        number = self._engine.new_request_id()
        port = self._port()
        name = str(number) if request_id is None else request_id
        grows = params.output_kind == RequestOutputKind.CUMULATIVE
        stream = port.open(number, GrowingStream(port.loop, params.n) if grows else None)
        self._names[name] = number
        prompt_token_ids: list[int] | None = None
        try:
            await self._add(port, number, prompt, params, priority)
            text = text_of(prompt)
            while True:
                while not stream.items:
                    await stream.news()
                raw = stream.pop()
                if prompt_token_ids is None:
                    prompt_token_ids = raw[1]
                output = make_output(raw, text, prompt_token_ids, name)
                if output.error is not None and self._engine.has_failed():
                    raise _core.EngineError(output.error)
                yield output
                if output.finished:
                    return
        finally:
            if self._names.get(name) == number:  # a later request may have the name by now
                del self._names[name]
            if port.close(number):
                self._engine.abort_request(number)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several, by the names that generate() was given; their last outputs
        say `abort`."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            number = self._names.get(name)
            if number is not None:
                self._engine.abort_request(number)

    async def openai(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer of one of the server's endpoints, such as "/v1/chat/completions"; without a
        body it is asked by GET. JSON comes as Python's values, other answers as text. Raises
        OpenAIError."""
        response = await self.request(path, None if body is None else to_json(body))
        return _parse(response, b"".join([part async for part in response.body]))

    async def openai_stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The events of an endpoint that streams ("stream": true is set), as Python's values.
        Raises OpenAIError."""
        response = await self.request(path, to_json({**body, "stream": True}))
        parts = response.body
        try:
            if response.content_type != "text/event-stream":
                yield _parse(response, b"".join([part async for part in parts]))
                return
            rest = b""
            async for part in parts:
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    value = _parse_event(event)
                    if value is not None:
                        yield value
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    async def request(self, path: str, body: str | bytes | None = None) -> Response:
        """Asks an endpoint for its answer as it is: what a gateway hands on."""
        port = self._port()
        text = "" if body is None else body if isinstance(body, str) else body.decode()
        try:
            number = self._engine.ask(port.handle, "GET" if body is None else "POST", path, text)
        except BaseException:
            port.end_if_idle()
            raise
        stream = port.open(number)
        parts = self._parts(port, number, stream)
        try:
            status, content_type, first, is_last = await stream.get()
        except BaseException:
            self._leave(port, number)
            raise
        stream.items.appendleft((status, content_type, first, is_last))
        await parts.__anext__()  # its beginning: what has not begun does nothing when it is closed
        return Response(status, content_type, parts)

    async def _parts(self, port: LoopPort, number: int, stream: Stream) -> AsyncIterator[bytes]:
        try:
            yield b""
            is_last = False
            while not is_last:
                _, _, part, is_last = await stream.get()
                if part:
                    yield part
        finally:
            self._leave(port, number)

    def _leave(self, port: LoopPort, number: int) -> None:
        if port.close(number):
            self._engine.abandon(number)

    async def _add(
        self, port: LoopPort, number: int, prompt: PromptType, params: SamplingParams, priority: int
    ) -> None:
        wire, kind = params._wire(priority, salt_of(prompt))
        if kind == RequestOutputKind.CUMULATIVE:
            kind = RequestOutputKind.DELTA  # GrowingStream adds up
        text = text_of(prompt)
        given = (number, port.handle, prompt, wire, kind, self._timeout)
        if (text is None or len(text) < _LONG_PROMPT) and params.structured_outputs is None:
            self._engine.add_request(*given)
            return
        # Long texts take their time to tokenize, and grammars to compile: not on the loop. Where the
        # task is cancelled, the thread goes on, and generate()'s abort holds for what it adds.
        await port.loop.run_in_executor(None, lambda: self._engine.add_request(*given))

    def _port(self) -> LoopPort:
        loop = asyncio.get_running_loop()
        port = self._ports.get(loop)
        if port is None:
            port = self._ports[loop] = LoopPort(loop, self._engine, self._ports)
        return port

    @property
    def tokenizer(self) -> Tokenizer:
        """encode, decode, apply_chat_template."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._engine)
        return self._tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those that the model's generation_config.json recommends."""
        return SamplingParams(**self._engine.default_params())

    async def check_health(self) -> None:
        """Raises EngineError where the engine has failed."""
        if self._engine.has_failed():
            raise _core.EngineError("the engine has failed")

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the engine: device, memory, limits, and notes for the user."""
        return self._engine.info()

    @property
    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made, as of its last step."""
        return self._engine.stats()

    @property
    def num_live(self) -> int:
        """Requests that were accepted and have not finished."""
        return self._engine.num_live()

    async def reset_prefix_cache(self) -> None:
        """Forgets, before the next step, all cached prefixes that no running request uses."""
        self._engine.reset_prefix_cache()

    async def drain(self, seconds: float = 30) -> bool:
        """Refuses new requests and waits for those that run; False where some still do."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._engine.drain, seconds)

    def exit(self) -> None:
        """Ends all requests and frees the engine."""
        self._engine.exit()

    shutdown = exit


def exit_engine(engine: _core.AsyncEngine) -> None:
    """Ends an engine whose owner is gone, before the interpreter is."""
    try:
        engine.exit()
    except RuntimeError:  # a child of fork() has no engine to end
        pass


def _parse(response: Response, body: bytes) -> Any:
    import json

    is_json = response.content_type.startswith("application/json")
    value = json.loads(body) if is_json else body.decode()
    if response.status >= 400:
        raise OpenAIError(response.status, value)
    return value


def _parse_event(event: bytes) -> Any:
    """The value of an event's data line; None for comments and the end's mark."""
    import json

    for line in event.split(b"\n"):
        data = line[5:].strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            value = json.loads(data)
            error = value.get("error") if isinstance(value, dict) else None
            if error:
                raise OpenAIError(int(error.get("code") or 500), value)
            return value
    return None
