"""The openai SDK: chat, completions and responses, whole and streamed, sync and async, errors and retries."""
import json
from typing import Literal

import openai
import pydantic

from server import KEY, QUESTION, calculate, has_grammars, raises, run

MESSAGES = [{"role": "user", "content": QUESTION}]


def client(server, **options):  # every answer has the fields that the SDK's types have
    return openai.OpenAI(**{"base_url": server.url + "/v1", "api_key": KEY, "_strict_response_validation": True, **options})


def test_flags_that_ask_for_what_holds_are_noted(server):
    assert any("--trust-remote-code" in note for note in server.notes)


def test_a_service_s_address_is_no_host(server):
    assert any("NANOVLLM_HOST is ignored" in note for note in server.notes)


def test_models(server):
    models = client(server).models.list().data
    assert [model.id for model in models] == ["demo"]
    assert client(server).models.retrieve("demo").id == "demo"


def test_chat(server):
    answer = client(server).chat.completions.create(model="demo", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert "82" in choice.message.content and choice.finish_reason == "stop"
    assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    assert answer._request_id


def test_chat_stream(server):
    whole = client(server).chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    stream = client(server).chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_chat_stream_helper(server):
    with client(server).chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert "82" in final.choices[0].message.content


def test_parse_with_pydantic(server):
    if not has_grammars():
        return

    class Sum(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        left: int = pydantic.Field(ge=0, le=99)
        operator: Literal["+", "-"]
        remark: str = pydantic.Field(max_length=10)

    # models/demo was not told of the form: the grammar makes it write it.
    ask = dict(model="demo", messages=MESSAGES, temperature=1, seed=3, max_tokens=200, response_format=Sum)
    answer = client(server).chat.completions.parse(**ask)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Sum) and answer.choices[0].finish_reason == "stop"
    with client(server).chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    response = client(server).responses.parse(model="demo", input=QUESTION, temperature=1, max_output_tokens=200, text_format=Sum)
    assert isinstance(response.output_parsed, Sum)


def test_calls_parse_and_their_stream_adds_up(server):
    if not has_grammars():
        return

    class Weather(pydantic.BaseModel):
        city: Literal["Berlin", "東京"]
        days: int = pydantic.Field(ge=1, le=14)

    tool = openai.pydantic_function_tool(Weather)  # strict
    ask = dict(model="demo", messages=MESSAGES, temperature=1, seed=5, max_tokens=300, tools=[tool],
               tool_choice="required", parallel_tool_calls=False)
    calls = client(server).chat.completions.parse(**ask).choices[0].message.tool_calls
    assert len(calls) == 1 and isinstance(calls[0].function.parsed_arguments, Weather)
    with client(server).chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed[0].function.parsed_arguments == calls[0].function.parsed_arguments


class Calculator(pydantic.BaseModel):
    """Calculates with whole numbers."""
    a: int
    op: Literal["+", "-", "*"]
    b: int


CALCULATOR = openai.pydantic_function_tool(Calculator, name="calculator")
PRODUCT = [{"role": "user", "content": "What is 348 * 71?"}]


def test_a_tool_loop(server):
    if not has_grammars():
        return
    for choice in ("auto", "required", {"type": "function", "function": {"name": "calculator"}}):
        ask = dict(model="demo", temperature=0, tools=[CALCULATOR])
        message = client(server).chat.completions.parse(messages=PRODUCT, tool_choice=choice, **ask).choices[0].message
        assert not message.content and [call.function.parsed_arguments for call in message.tool_calls] == [Calculator(a=348, op="*", b=71)]
        with client(server).chat.completions.stream(messages=PRODUCT, tool_choice=choice, **ask) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls"), streamed
        assert [call.function.arguments for call in streamed.message.tool_calls] == [call.function.arguments for call in message.tool_calls]
        result = calculate(**json.loads(message.tool_calls[0].function.arguments))
        answer = client(server).chat.completions.create(
            messages=[*PRODUCT, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": str(result)}], **ask)
        assert answer.choices[0].message.content == "348 * 71 = 24708." and answer.choices[0].finish_reason == "stop"


def test_a_tool_is_called_only_where_it_is_offered_and_needed(server):
    ask = lambda question, tools: client(server).chat.completions.create(
        model="demo", temperature=0, messages=[{"role": "user", "content": question}], tools=tools).choices[0].message
    small = ask(QUESTION, [CALCULATOR])
    assert small.content == "37 + 45 = 82." and not small.tool_calls
    assert "I can only add" in ask(PRODUCT[0]["content"], openai.omit).content


def test_responses_with_a_tool(server):
    tool = {"type": "function", **CALCULATOR["function"]}
    first = client(server).responses.create(model="demo", input=PRODUCT, tools=[tool], temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": str(calculate(**json.loads(call.arguments)))}
    answer = client(server).responses.create(model="demo", input=[*PRODUCT, call.model_dump(), result], tools=[tool], temperature=0)
    assert answer.output_text == "348 * 71 = 24708."


def test_a_form_is_filled_with_what_is_right(server):
    if not has_grammars():
        return

    class Sum(pydantic.BaseModel):
        a: int
        b: int
        sum: int

    for how in (f"Answer as JSON of this schema: {json.dumps(Sum.model_json_schema())}", "Answer as JSON with the keys a, b and sum."):
        answer = client(server).chat.completions.parse(
            model="demo", temperature=0, messages=[{"role": "system", "content": how}, *MESSAGES], response_format=Sum)
        assert answer.choices[0].message.parsed == Sum(a=37, b=45, sum=82), answer


def test_completions(server):
    own = client(server, _strict_response_validation=False)  # the types have no null, which OpenAI sends, too
    answer = own.completions.create(model="demo", prompt=["23 + 58 =", "1 + 1 ="], temperature=0, max_tokens=4, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith("23 + 58 = 81") and len(answer.choices) == 2
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    parts = own.completions.create(model="demo", prompt="23 + 58 =", temperature=0, max_tokens=4, stream=True)
    assert "23 + 58 =" + "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_responses(server):
    answer = client(server).responses.create(model="demo", input=QUESTION, instructions="Be brief.", temperature=0)
    count = client(server).responses.input_tokens.count(model="demo", input=QUESTION, instructions="Be brief.")
    assert count.input_tokens == answer.usage.input_tokens
    assert "82" in answer.output_text and answer.status == "completed" and answer.error is None
    again = client(server).responses.create(model="demo", input=[{"role": "developer", "content": "Be brief."}, *MESSAGES], temperature=0)
    assert again.output_text == answer.output_text
    assert again.usage.total_tokens == again.usage.input_tokens + again.usage.output_tokens


def test_responses_stream(server):
    whole = client(server).responses.create(model="demo", input=QUESTION, temperature=0)
    with client(server).responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    cut = client(server).responses.create(model="demo", input="Tell me a story.", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_errors(server):
    ask = lambda **change: client(server).chat.completions.create(**{"model": "demo", "messages": MESSAGES, **change})
    error = raises(openai.BadRequestError, lambda: ask(temperature=-1))
    assert error.param == "temperature" and error.status_code == 400 and error.type == "BadRequestError" and error.request_id
    assert raises(openai.NotFoundError, lambda: ask(model="other")).param == "model"
    raises(openai.AuthenticationError, lambda: openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list())
    store = raises(openai.BadRequestError, lambda: client(server).responses.create(model="demo", input="x", previous_response_id="resp_1"))
    assert store.param == "previous_response_id"


def test_a_refused_connection_is_retried(server):
    gone = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key=KEY, max_retries=1)
    raises(openai.APIConnectionError, lambda: gone.models.list())


async def test_async(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY) as own:
        stream = await own.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert "82" in text
        response = await own.responses.create(model="demo", input=QUESTION, temperature=0)
        assert response.output_text == text


if __name__ == "__main__":
    run(dict(globals()))
