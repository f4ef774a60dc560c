"""A user's program, which the types must let pass; it is checked, not run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypedDict

from nanovllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    PromptType,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)


class Message(TypedDict):
    """As OpenAI's client has them."""

    role: str
    content: str


def offline(llm: LLM, prompts: list[TokensPrompt], conversation: list[Message]) -> list[str]:
    plain = [{"role": "user", "content": "Hello"}]
    outputs = llm.chat(plain) + llm.chat(conversation) + llm.chat([conversation, conversation])
    choice = StructuredOutputsParams(choice=["yes", "no"])
    outputs += llm.generate(prompts, [SamplingParams(stop=["."]), SamplingParams(structured_outputs=choice)])
    ids = llm.get_tokenizer().apply_chat_template(conversation, add_generation_prompt=True)
    outputs += llm.generate(ids) + llm.generate([[1, 2], [3]]) + llm.generate(["a", "b"], priority=[1, 0])
    likeliest = [min(p.values(), key=lambda c: c.rank) for p in outputs[0].outputs[0].logprobs or []]
    return [candidate.decoded_token or "" for candidate in likeliest] + [o.outputs[0].text for o in outputs]


async def streamed(prompt: PromptType) -> int:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="Qwen/Qwen3-0.6B", max_num_seqs=8))
    stream: AsyncIterator[RequestOutput] = engine.generate(prompt, SamplingParams(), "name", priority=1)
    return sum([len(output.outputs[0].token_ids) async for output in stream])
