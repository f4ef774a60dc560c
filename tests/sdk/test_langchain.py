"""langchain-openai: invoke, stream, batch and ainvoke, on chat completions and on responses."""
from langchain_openai import ChatOpenAI, OpenAI

from server import KEY, QUESTION, run


def model(server, **options):
    return ChatOpenAI(model="demo", base_url=server.url + "/v1", api_key=KEY, temperature=0, **options)


def test_invoke_and_stream(server):
    whole = model(server).invoke(QUESTION)
    assert "82" in whole.content and whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in model(server, stream_usage=True).stream(QUESTION)) == whole.content


def test_batch(server):
    answers = model(server).batch([QUESTION, "What is 1 + 1?"])
    assert "82" in answers[0].content and "2" in answers[1].content


def test_responses(server):
    answer = model(server, use_responses_api=True).invoke(QUESTION)
    assert "82" in answer.text


def test_completions(server):
    llm = OpenAI(model="demo", base_url=server.url + "/v1", api_key=KEY, temperature=0, max_tokens=4)
    assert "81" in llm.invoke("23 + 58 =")


async def test_async(server):
    assert "82" in (await model(server).ainvoke(QUESTION)).content


if __name__ == "__main__":
    run(dict(globals()))
