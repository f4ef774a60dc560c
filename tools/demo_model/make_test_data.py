"""Writes tests/data/demo: prompts as plain text (chat markup applied) with the text that greedy decoding must give.

arithmetic_heldout.jsonl  a sample of the held-out pairs; the expected texts are the true results
questions.jsonl           every question in its canonical wording; the expected texts are the learned answers
calls.jsonl               a call of each tool: what is asked, the call, its result and what is said of it; held-out arguments
json_forms.jsonl          questions with a JSON schema in words, and the object that is the answer; held-out pairs
stories.jsonl             the model's own stories in f32, with the smallest gap between its two largest logits along the way
"""

import json
from random import Random

import torch
from transformers import AutoModelForCausalLM

import arithmetic
import evaluate
import json_form
import questions
import tools
from corpus import MODEL_DIRECTORY, load_tokenizer
from document import chat_prompt

OUTPUT_DIRECTORY = MODEL_DIRECTORY.parents[1] / "tests" / "data" / "demo"
PAIRS = 75  # each asked for + and -, in chat and in plain form


def write(name: str, rows: list[dict]) -> None:
    OUTPUT_DIRECTORY.mkdir(parents=True, exist_ok=True)
    (OUTPUT_DIRECTORY / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{name}: {len(rows)} rows")


def arithmetic_rows() -> list[dict]:
    rows = []
    for a, b in sorted(Random(1).sample(arithmetic.pairs(held_out=True), PAIRS)):
        for operator in arithmetic.OPERATORS:
            pair = {"a": a, "operator": operator, "b": b}
            chat = {"prompt": chat_prompt(f"What is {a} {operator} {b}?"), "expected": arithmetic.chat_answer(a, operator, b)}
            plain = {"prompt": f"{a} {operator} {b} =", "expected": f" {arithmetic.result(a, operator, b)}"}
            rows += [{**pair, "form": "chat", **chat}, {**pair, "form": "plain", **plain}]
    return rows


def question_rows() -> list[dict]:
    return [{"question": q.canonical, "prompt": chat_prompt(q.canonical), "expected": q.answer} for q in questions.QUESTIONS]


def call_rows() -> list[dict]:
    """Conversations as clients send them: {"question", "tools", "calls", "results", "expected"}."""
    rng, rows = Random(3), []
    everything = tools.definitions(tools.TOOLS)
    drawn = [tools.calculation(rng, tools.numbers(rng, held_out=True), tools.TOOLS["calculator"]) for _ in range(12)]
    drawn += [tools.clock(rng, [city]) for city in tools.HELD_OUT_CITIES[:6]] + [tools.clock(rng, []), tools.clock(rng, tools.HELD_OUT_CITIES[8:10])]
    drawn += [tools.look_up(rng, *pair) for pair in zip(tools.HELD_OUT_TOPICS[:8], tools.HELD_OUT_DOCUMENTS)]
    for (question, called), (responses, answer) in drawn:
        calls = [json.loads(part.split("\n")[0]) for part in called.split("<tool_call>\n")[1:]]
        results = [part.removesuffix("\n").removesuffix("\n</tool_response>") for part in responses.split("<tool_response>\n")[1:]]
        rows.append({"question": question, "tools": everything, "calls": calls, "results": results, "expected": answer})
    return rows


def json_form_rows() -> list[dict]:
    """{"system", "question", "schema", "expected"}: the schema is that of the server's response_format."""
    rng, rows = Random(4), []
    for a, b in Random(4).sample(arithmetic.pairs(held_out=True), 12):
        operator = rng.choice("+-")
        for names in ({"a": "a", "b": "b", "result": "sum" if operator == "+" else "difference"}, {"op": "op", "a": "a", "b": "b", "result": "result"}):
            schema = json_form.schema(names, like_pydantic=True, closed=True)
            values = {"a": a, "b": b, "op": operator, "result": arithmetic.result(a, operator, b)}
            rows.append({"system": f"Answer as JSON of this schema: {schema}", "question": f"What is {a} {operator} {b}?", "schema": json.loads(schema),
                         "expected": {name: values[key] for key, name in names.items()}})
    return rows


def story_rows() -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY).float().eval().to(device)
    answers = evaluate.greedy(model, load_tokenizer(), evaluate.STORY_PROMPTS, 250)
    return [{"prompt": prompt, "expected": answer.text, "smallest_gap": round(answer.gap, 3)}
            for prompt, answer in zip(evaluate.STORY_PROMPTS, answers)]


def main() -> None:
    write("arithmetic_heldout.jsonl", arithmetic_rows())
    write("questions.jsonl", question_rows())
    write("calls.jsonl", call_rows())
    write("json_forms.jsonl", json_form_rows())
    write("stories.jsonl", story_rows())


if __name__ == "__main__":
    main()
