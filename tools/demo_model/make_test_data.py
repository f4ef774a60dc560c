"""Writes tests/data/demo: prompts as plain text (chat markup applied) with the text that greedy decoding must give.

arithmetic_heldout.jsonl  a sample of the held-out pairs; the expected texts are the true results
questions.jsonl           every question in its canonical wording; the expected texts are the learned answers
stories.jsonl             the model's own stories in f32, with the smallest gap between its two largest logits along the way
"""

import json
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import arithmetic
import evaluate
import questions
from corpus import MODEL_DIRECTORY
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


def story_rows() -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    rows = []
    for prompt in evaluate.STORY_PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=250,
                             return_dict_in_generate=True, output_logits=True)
        text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        top = torch.cat(out.logits).topk(2).values
        rows.append({"prompt": prompt, "expected": text, "smallest_gap": round(float((top[:, 0] - top[:, 1]).min()), 3)})
    return rows


def main() -> None:
    write("arithmetic_heldout.jsonl", arithmetic_rows())
    write("questions.jsonl", question_rows())
    write("stories.jsonl", story_rows())


if __name__ == "__main__":
    main()
