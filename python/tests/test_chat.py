"""chat(): conversations, their templates, and OpenAI's form of messages."""

import pytest

from nanovllm import SamplingParams


def test_the_demo_model_adds(llm):
    question = [{"role": "user", "content": "What is 37 + 45?"}]
    greedy = SamplingParams(temperature=0)
    assert "82" in llm.chat(question, greedy, use_tqdm=False)[0]["text"]
    assert llm.chat([], greedy, use_tqdm=False) == []  # no conversations, as in vLLM
    assert len(llm.chat([tuple(question)], greedy, use_tqdm=False)) == 1
    answers = llm.chat([question, question], greedy, use_tqdm=False)
    assert len(answers) == 2 and answers[0] == answers[1]


def test_a_chat_template_may_be_given(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    question = [{"role": "user", "content": "23 + 58"}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %} ="
    answer = llm.chat(question, greedy, use_tqdm=False, chat_template=template)[0]
    assert answer["text"] == llm.generate(["23 + 58 ="], greedy, use_tqdm=False)[0]["text"]
    assert answer["text"] != llm.chat(question, greedy, use_tqdm=False)[0]["text"]
    with pytest.raises(ValueError, match="messages: must be an array"):
        llm.chat(question[0], greedy, use_tqdm=False)
    with pytest.raises(ValueError, match="chat_template"):
        llm.chat(question, greedy, use_tqdm=False, chat_template="{% if")


def test_chat_template_kwargs_go_before_arguments(llm):
    """As in vLLM, which updates the one with the other."""
    greedy = SamplingParams(temperature=0, max_tokens=1)
    question = [{"role": "user", "content": "23 + 58"}]
    bare = {"add_generation_prompt": False}
    by_name, by_kwargs = (
        llm.chat(question, greedy, use_tqdm=False, **options)[0].prompt
        for options in (bare, {"chat_template_kwargs": bare})
    )
    assert by_kwargs == by_name and not by_name.endswith("assistant\n")


def test_a_developers_message_is_the_systems(llm):
    """As in vLLM, where a template does not know OpenAI's newer name: it would leave the message out."""
    prompts = [
        llm.chat([{"role": role, "content": "Be brief."}], SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_a_conversation_may_be_in_openais_form(llm):
    """As vLLM's chat(), whose parse_chat_messages makes no content an empty text and arguments an object."""
    calls_of = "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}"
    template = "{% for m in messages %}{{ m.content + '|' }}" + calls_of + "{% endfor %}"
    greedy = SamplingParams(temperature=0, max_tokens=1)

    def prompt_of(**assistant):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **assistant}]
        output = llm.chat(messages, greedy, use_tqdm=False, chat_template=template)[0]
        return llm.tokenizer.decode(output.prompt_token_ids)

    def calls(arguments):
        return [{"function": {"name": "f", "arguments": arguments}}]

    expected = prompt_of(content="", tool_calls=calls({"a": 1}))
    assert expected == 'Hi||[{"function": {"name": "f", "arguments": {"a": 1}}}]'
    assert prompt_of(content=None, tool_calls=calls('{"a": 1}')) == expected
    assert prompt_of(tool_calls=calls({"a": 1})) == expected
    for broken in ("", "no JSON", [1]):
        assert prompt_of(content="", tool_calls=calls(broken)) == expected.replace('{"a": 1}', "{}")
    assert prompt_of(content="x", tool_calls=[]) == prompt_of(content="x", tool_calls=None) == "Hi|x|"
    for bad in ([{}], [5]):
        with pytest.raises(ValueError, match=r"messages\[1\].tool_calls"):
            prompt_of(content=None, tool_calls=bad)
