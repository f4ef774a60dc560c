"""What the demo model is trained on: documents of segments, each marked as learned (loss) or only read (no loss).

A segment is tokenised on its own, because that is what happens at inference: the prompt is encoded first and the
answer comes token by token after it.
"""

from typing import NamedTuple

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]

# Tools come first, as their signatures; calls and results are written as Qwen2.5 and Qwen3 write them.
CHAT_TEMPLATE = r"""
{%- if tools %}
  {{- '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
  {{- '# Tools\n\n<tools>\n' }}
  {%- for tool in tools %}
    {%- set properties = (tool.function.parameters or {}).properties or {} %}
    {{- tool.function.name + '(' + properties | list | join(', ') + ')\n' }}
  {%- endfor %}
  {{- '</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
  {%- elif not (tools and loop.first and message.role == 'system') %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '' if message.role == 'assistant' else message.content) }}
    {%- for call in message.tool_calls or [] %}
      {{- '\n' if message.content or not loop.first }}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""".lstrip()


class Segment(NamedTuple):
    text: str
    learned: bool


Document = list[Segment]


def chat_prompt(question: str, system: str | None = None) -> str:
    """What CHAT_TEMPLATE makes of one user message (after a system message, if any) with add_generation_prompt."""
    head = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    return f"{head}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


def chat(turns: list[tuple[str, str]], system: str | None = None) -> Document:
    """A conversation of (question, answer) turns. Learned: the answers and the <|im_end|> after each."""
    document = []
    for i, (question, answer) in enumerate(turns):
        document.append(Segment(("\n" if i else "") + chat_prompt(question, system if i == 0 else None), False))
        document.append(Segment(answer + IM_END, True))
    return document


def completion(prompt: str, continuation: str) -> Document:
    """Plain text without chat markup. Learned: the continuation and the <|endoftext|> after it."""
    return [Segment(prompt, False), Segment(continuation + END_OF_TEXT, True)]


def plain(text: str) -> Document:
    """Plain text, all of it learned, so that any beginning of it can be continued."""
    return [Segment(text + END_OF_TEXT, True)]
