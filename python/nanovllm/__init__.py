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
from nanovllm.inputs import PromptType, TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM, OpenAIError
    from nanovllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from nanovllm.engine.async_llm_engine import AsyncLLMEngine
    from nanovllm.engine.llm_engine import LLMEngine

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "DeviceError",
    "EngineArgs",
    "EngineError",
    "LLMEngine",
    "Logprob",
    "ModelError",
    "OpenAIError",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnavailableError",
    "__version__",
]

_LATE = {
    "AsyncLLM": "nanovllm.async_llm",
    "AsyncLLMEngine": "nanovllm.engine.async_llm_engine",
    "OpenAIError": "nanovllm.async_llm",
    "AsyncEngineArgs": "nanovllm.engine.arg_utils",
    "EngineArgs": "nanovllm.engine.arg_utils",
    "LLMEngine": "nanovllm.engine.llm_engine",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


def __getattr__(name: str) -> Any:
    # asyncio takes as long to import as all the rest, dataclasses longer: programs that do without do not wait.
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
