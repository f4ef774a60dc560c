"""The way from an engine's thread to the tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from nanovllm import _core

__all__: list[str] = []


class Waiter(asyncio.Future[None]):
    """What the task of a stream waits for. The task goes on from the port's own callback; by a plain
    future it would go on in the loop's next round."""

    __slots__ = ("_context", "_wake_up")

    def add_done_callback(
        self, fn: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        self._wake_up = fn
        self._context = copy_context() if context is None else context

    def go_on(self) -> None:
        self.set_result(None)
        self._context.run(self._wake_up, self)

    def go_on_soon(self) -> None:
        self.set_result(None)
        self.get_loop().call_soon(self._wake_up, self, context=self._context)

    def cancel(self, msg: Any = None) -> bool:
        if not super().cancel(msg):
            return False
        self.get_loop().call_soon(self._wake_up, self, context=self._context)
        return True


class Stream:
    """The news of one request that were not read yet."""

    __slots__ = ("items", "waiter", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[Any] = deque()
        self.waiter: Waiter | None = None
        self._loop = loop

    def put(self, item: Any) -> None:
        self.items.append(item)

    def pop(self) -> Any:
        return self.items.popleft()

    def news(self) -> Waiter:
        """To be awaited while there are no items."""
        self.waiter = waiter = Waiter(loop=self._loop)
        return waiter

    async def get(self) -> Any:
        while not self.items:
            await self.news()
        return self.pop()


class GrowingStream(Stream):
    """The same of a request whose reader wants everything so far. The engine gives what is new: to
    give all of it anew with each token would take the longer the longer the answer is."""

    __slots__ = ("_answers", "_prompt")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        super().__init__(loop)
        self._answers: list[list[Any]] = [[i, "", [], None, None, None] for i in range(count)]
        self._prompt: tuple[Any, Any] = (None, None)  # token ids, log probabilities

    def pop(self) -> Any:
        number, _, _, finished, error, _, metrics = self.items.pop()
        self.items.clear()  # a slow reader misses some
        ids, prompt_logprobs = self._prompt
        answers = [
            (index, text, token_ids[:], logprobs and logprobs[:], reason, stop)
            for index, text, token_ids, logprobs, reason, stop in self._answers
        ]
        return number, ids, answers, finished, error, prompt_logprobs, metrics

    def put(self, item: Any) -> None:
        if item[1]:
            self._prompt = (item[1], item[5])
        for index, text, token_ids, logprobs, reason, stop in item[2]:
            answer = self._answers[index]
            answer[1] += text
            answer[2] += token_ids
            if logprobs is not None:
                answer[3] = [*(answer[3] or ()), *logprobs]
            answer[4], answer[5] = reason, stop
        self.items.append(item)


class LoopPort:
    """The way from the engine to one event loop, as long as a request of the loop is under way. It
    belongs to the loop's thread; the engine wakes it once a step at most (port.h)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: _core.AsyncEngine,
        ports: dict[asyncio.AbstractEventLoop, LoopPort],
    ) -> None:
        self.loop = loop
        self.handle = _core.Port()
        self._engine = engine
        self._ports = ports
        self._streams: dict[int, Stream] = {}
        loop.add_reader(self.handle.fileno(), self._take)

    def open(self, number: int, stream: Stream | None = None) -> Stream:
        stream = self._streams[number] = stream or Stream(self.loop)
        return stream

    def close(self, number: int) -> bool:
        """Forgets a stream; True if its end had not come."""
        unfinished = self._streams.pop(number, None) is not None
        self.end_if_idle()
        return unfinished

    def end_if_idle(self) -> None:
        if not self._streams and self._ports.get(self.loop) is self:
            self.loop.remove_reader(self.handle.fileno())
            del self._ports[self.loop]

    def _take(self) -> None:
        waiters = []
        for number, item, is_last in self._engine.take(self.handle):
            stream = self._streams.get(number)
            if stream is None:
                continue  # it was left
            stream.put(item)
            if is_last:
                # The rest is the reader's: close() must not abort what has ended.
                del self._streams[number]
            waiter = stream.waiter
            if waiter is not None and not waiter.done():
                stream.waiter = None
                waiters.append(waiter)
        # One that raises KeyboardInterrupt must not take the others along.
        if len(waiters) == 1:
            waiters[0].go_on()
        else:
            for waiter in waiters:
                waiter.go_on_soon()
