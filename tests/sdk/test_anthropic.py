"""The anthropic SDK: messages, whole and streamed, sync and async, count_tokens, errors."""
from typing import Literal

import anthropic

from server import KEY, QUESTION, calculate, has_grammars, raises, run

MESSAGES = [{"role": "user", "content": QUESTION}]
ASK = {"model": "demo", "max_tokens": 100, "messages": MESSAGES}  # models/demo is greedy unless told otherwise


def client(server, **options):  # every answer has the fields that the SDK's types have
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": KEY, "_strict_response_validation": True, **options})


def test_models(server):
    assert [model.display_name for model in client(server).models.list()] == ["demo"]
    assert client(server).models.retrieve("demo").lifecycle == "active"


def test_message(server):
    message = client(server).messages.create(**ASK)
    assert "82" in message.content[0].text and message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0 and message._request_id


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
    calls = []

    @anthropic.beta_tool
    def calculator(a: int, op: Literal["+", "-", "*"], b: int) -> str:
        """Calculates with whole numbers."""
        calls.append((a, op, b))
        return str(calculate(a, op, b))

    ask = {**ASK, "messages": [{"role": "user", "content": "What is 348 * 71?"}]}
    for stream in (False, True):
        calls.clear()
        runner = client(server).beta.messages.tool_runner(**ask, tools=[calculator], stream=stream, max_iterations=4, thread=False)
        messages = [part.get_final_message() if stream else part for part in runner]
        assert calls == [(348, "*", 71)] and [message.stop_reason for message in messages] == ["tool_use", "end_turn"], messages
        assert messages[-1].content[0].text == "348 * 71 = 24708."


def test_a_call_can_be_forced(server):
    if not has_grammars():
        return
    tools = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"enum": ["Berlin", "Tokyo"]}}, "required": ["city"],
                                                      "additionalProperties": False}}]
    message = client(server).messages.create(**{**ASK, "max_tokens": 300}, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert message.stop_reason == "tool_use" and message.content[-1].input["city"] in ("Berlin", "Tokyo"), message


def test_errors(server):
    error = raises(anthropic.BadRequestError, lambda: client(server).messages.create(**ASK, extra_body={"temperature": -1}))
    assert error.body["error"]["type"] == "invalid_request_error" and "temperature" in error.body["error"]["message"] and error.request_id
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
    run(dict(globals()))
