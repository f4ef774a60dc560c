"""LLMEngine: an engine that its caller steps, with vLLM's methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.inputs import PromptType, text_of
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput, make_output
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import Tokenizer

__all__ = ["LLMEngine"]


class LLMEngine:
    """Requests have names, and step() gives the outputs of those that have ended.

    Options are those of LLM.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._requests: dict[int, tuple[str, str | None]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(**asdict(engine_args))

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """ValueError if the request is not acceptable, or one of that name has not ended."""
        if any(name == request_id for name, _ in self._requests.values()):
            raise ValueError(f"a request {request_id} is running")
        number = self._llm.add_request(prompt, params, priority)
        self._requests[number] = (request_id, text_of(prompt))

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; unknown names are ignored."""
        names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for number, (name, _) in self._requests.items():
            if name in names:
                self._llm.abort_request(number)

    def step(self) -> list[RequestOutput]:
        outputs = []
        for raw in self._llm._step()[0]:
            name, prompt = self._requests.pop(raw[0])
            outputs.append(make_output(raw, prompt, request_id=name))
        return outputs

    def has_unfinished_requests(self) -> bool:
        return not self._llm.is_finished()

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer
