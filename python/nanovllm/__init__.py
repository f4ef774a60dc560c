"""nano-vllm.cpp: an inference engine for large language models.

    from nanovllm import LLM, SamplingParams
    llm = LLM("path/to/Qwen3-0.6B")
    outputs = llm.generate(["The sky was"], SamplingParams(temperature=0.6, max_tokens=256))
    print(outputs[0]["text"])

AsyncLLM serves asyncio programs; `python -m nanovllm` is the program of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm._core import (
    DeviceError,
    EngineError,
    ModelError,
    UnavailableError,
    __version__,
)
from nanovllm.llm import LLM, TextPrompt, TokensPrompt
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM, OpenAIError

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DeviceError",
    "EngineError",
    "Logprob",
    "ModelError",
    "OpenAIError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnavailableError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # asyncio takes as long to import as all the rest: programs that do without it do not wait.
    if name in ("AsyncLLM", "OpenAIError"):
        from nanovllm import async_llm

        return getattr(async_llm, name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
