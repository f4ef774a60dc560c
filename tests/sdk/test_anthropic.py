"""The anthropic SDK: messages, whole and streamed, sync and async, count_tokens, errors."""
from typing import Literal

import anthropic

from server import KEY, QUESTION, has_grammars, raises, run

MESSAGES = [{"role": "user", "content": QUESTION}]
ASK = {"model": "demo", "max_tokens": 100, "messages": MESSAGES}  # models/demo is greedy unless told otherwise


def client(server, **options):
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": KEY, **options})


def test_message(server):
    message = client(server).messages.create(**ASK)
    assert "82" in message.content[0].text and message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_a_bearer_token_is_a_key_too(server):
    own = client(server, api_key=None, auth_token=KEY)
    assert "82" in own.messages.create(**ASK).content[0].text


def test_stream(server):
    whole = client(server).messages.create(**ASK)
    with client(server).messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    raw = [event.type for event in client(server).messages.create(**ASK, stream=True)]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]


def test_system_blocks_and_stop_sequences(server):
    message = client(server).messages.create(**ASK, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert message.content[0].text
    stopped = client(server).messages.create(**ASK, stop_sequences=["82"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "82"


def test_count_tokens(server):
    count = client(server).messages.count_tokens(model="demo", messages=MESSAGES)
    assert count.input_tokens == client(server).messages.create(**ASK).usage.input_tokens


def test_tool_runner(server):
    if not has_grammars():
        return

    cities = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Berlin", "Tokyo"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"sunny in {city}"

    # models/demo has to be made to call, and so it does again when it has the result.
    runner = client(server).beta.messages.tool_runner(
        **{**ASK, "max_tokens": 300}, tools=[get_weather], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_iterations=2, thread=False)
    messages = list(runner)
    assert len(messages) == 2 and len(cities) >= 1 and set(cities) <= {"Berlin", "Tokyo"}, (messages, cities)
    assert all(message.stop_reason == "tool_use" for message in messages)


def test_errors(server):
    error = raises(anthropic.BadRequestError, lambda: client(server).messages.create(**ASK, extra_body={"temperature": -1}))
    assert error.body["error"]["type"] == "invalid_request_error" and "temperature" in error.body["error"]["message"]
    error = raises(anthropic.BadRequestError, lambda: client(server).messages.create(**ASK, extra_body={"thread": {"type": "create"}}))
    assert "thread is not supported" in error.body["error"]["message"]
    raises(anthropic.NotFoundError, lambda: client(server).messages.create(**{**ASK, "model": "other"}))
    raises(anthropic.AuthenticationError, lambda: client(server, api_key="wrong").messages.create(**ASK))
    raises(anthropic.BadRequestError, lambda: client(server).messages.create(
        **ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}]))


async def test_async(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY) as own:
        async with own.messages.stream(**ASK) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert "82" in text


if __name__ == "__main__":
    run(dict(globals()), "--tool-call-parser", "hermes")
