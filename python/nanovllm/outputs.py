"""Outputs of an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


class Logprob(NamedTuple):
    """A candidate at one position. `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


class RequestMetrics(NamedTuple):
    """Seconds since the request was added, and what its prompt took from the cache."""

    queue_time: float
    time_to_first_token: float
    total_time: float
    num_cached_tokens: int
    num_preemptions: int


class CompletionOutput:
    """One answer of a request."""

    __slots__ = ("index", "text", "token_ids", "logprobs", "finish_reason", "stop_reason")

    def __init__(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[dict[int, Logprob]] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> None:
        self.index = index
        self.text = text
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the chosen tokens' log probabilities, if they were asked for."""
        if self.logprobs is None:
            return None
        return sum(next(iter(position.values())).logprob for position in self.logprobs)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"CompletionOutput({values})"


class RequestOutput(dict[str, Any]):
    """What a request has brought: nano-vLLM's dict of "text" and "token_ids" (of the first answer),
    and vLLM's attributes."""

    # With a dict beside them for what users add: attributes in slots are made in half the time.
    __slots__ = (
        *("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished"),
        *("error", "metrics", "__dict__"),
    )

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None
    metrics: RequestMetrics

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens


def make_output(
    raw: tuple[Any, ...],
    prompt: str | None,
    prompt_token_ids: list[int] | None = None,
    request_id: str | None = None,
) -> RequestOutput:
    """A RequestOutput of what _core gives (convert.h)."""
    number, ids, answers, finished, error, prompt_logprobs, metrics = raw
    output = RequestOutput()
    output.outputs = [
        CompletionOutput(*answer) if answer[3] is None else make_scored_answer(*answer)
        for answer in answers
    ]
    first = output.outputs[0] if output.outputs else None
    output["text"] = first.text if first else ""
    output["token_ids"] = first.token_ids if first else []
    output.request_id = str(number) if request_id is None else request_id
    output.prompt = prompt
    output.prompt_token_ids = ids if prompt_token_ids is None else prompt_token_ids
    output.finished = finished
    output.error = error
    output.metrics = tuple.__new__(RequestMetrics, metrics)
    output.prompt_logprobs = prompt_logprobs and [
        make_logprobs(position) or None for position in prompt_logprobs
    ]
    return output


def make_scored_answer(
    index: int, text: str, token_ids: list[int], logprobs: list[Any], reason: Any, stop: Any
) -> CompletionOutput:
    scores = [make_logprobs(position) for position in logprobs]
    return CompletionOutput(index, text, token_ids, scores, reason, stop)


def make_logprobs(position: list[tuple[int, float, int, str | None]]) -> dict[int, Logprob]:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in position}
