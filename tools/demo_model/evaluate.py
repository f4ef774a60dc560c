"""Measures a demo model by greedy decoding: held-out arithmetic, the questions in seen and unseen wordings, calls of tools and JSON forms
with held-out arguments, stories.

    python evaluate.py [MODEL_DIRECTORY] [--device cpu] [--dtype float32] [--sample 1.0] [--stories] [--output FILE.json]
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import arithmetic
import json_form
import questions
import small_talk
import tools
from corpus import MODEL_DIRECTORY
from document import END_OF_TEXT, IM_END, chat_prompt

STORY_PROMPTS = [chat_prompt(p) for p in (
    "Tell me a story about a fox.", "Tell me a story about an owl.", "Tell me a story.", "Tell me a story about a dog named Max.",
    "Tell me a story about a cat and a mouse.", "Tell me a story about a robot.", "Write a short story about a dragon.",
    "Tell me a story about a fox named Zelda.", "Tell me a story about a lost key.", "Tell me a story about a tiger.")
] + ["Once upon a time", "Once upon a time, there was a brave little bear named", "Long ago,", "The sky was", "Tell me a story about a bear."]


@dataclass
class Answer:
    text: str     # without the token that ended it
    ended: bool   # by an end token, not by the limit
    gap: float    # the smallest difference between the two largest logits along the way


def forward(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [rows, length, vocab] under a plain causal mask: padding on the right changes nothing to its left."""
    return model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits


@torch.no_grad()
def greedy(model, tokenizer: Tokenizer, prompts: list[str], max_tokens: int, batch: int = 512) -> list[Answer]:
    """Decodes without a cache, so that nothing but the model itself is measured."""
    device = next(model.parameters()).device
    ends = torch.tensor([tokenizer.token_to_id(t) for t in (IM_END, END_OF_TEXT)], device=device)
    encoded = [e.ids for e in tokenizer.encode_batch(prompts, add_special_tokens=False)]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    answers: list[Answer | None] = [None] * len(prompts)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        lengths = torch.tensor([len(encoded[i]) for i in rows], device=device)
        ids = torch.zeros(len(rows), int(lengths.max()) + max_tokens, dtype=torch.long, device=device)
        for row, i in enumerate(rows):
            ids[row, : len(encoded[i])] = torch.tensor(encoded[i], device=device)
        at, every = lengths.clone(), torch.arange(len(rows), device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        gaps = torch.full((len(rows),), float("inf"), device=device)
        for _ in range(max_tokens):
            logits = forward(model, ids[:, : int(at.max())])[every, at - 1].float()
            top = logits.topk(2)
            gaps = torch.where(ended, gaps, torch.minimum(gaps, top.values[:, 0] - top.values[:, 1]))
            tokens = top.indices[:, 0]
            ended |= torch.isin(tokens, ends)
            ids[every, at] = torch.where(ended, ids[every, at], tokens)
            at += (~ended).long()
            if bool(ended.all()):
                break
        for row, i in enumerate(rows):
            text = tokenizer.decode(ids[row, lengths[row] : at[row]].tolist())
            answers[i] = Answer(text, bool(ended[row]), float(gaps[row]))
    return answers


def arithmetic_cases(held_out: bool, sample: float = 1.0) -> dict[str, list[tuple[str, str]]]:
    """(prompt, expected text) of every pair of one side of the split, in several wordings each for + and -."""
    rng = Random(0)
    chosen = [p for p in arithmetic.pairs(held_out) if rng.random() < sample]
    cases: dict[str, list[tuple[str, str]]] = {}
    for operator, word in (("+", "plus"), ("-", "minus")):
        for a, b in chosen:
            c, answer = arithmetic.result(a, operator, b), arithmetic.chat_answer(a, operator, b)
            command = f"Add {a} and {b}." if operator == "+" else f"Subtract {b} from {a}."
            for name, prompt, expected in (
                ("chat", chat_prompt(f"What is {a} {operator} {b}?"), answer),
                ("chat, in words", chat_prompt(f"How much is {a} {word} {b}?"), answer),
                ("chat, a command", chat_prompt(command), answer),
                ("chat, after a system message", chat_prompt(f"{a}{operator}{b}", "You are a helpful assistant."), answer),
                ("plain", f"{a} {operator} {b} =", f" {c}"),
                ("plain question", f"What is {a} {operator} {b}?", " " + answer),
                ("after two other sums", f"1 + 1 = 2\n7 - 9 = -2\n{a} {operator} {b} =", f" {c}"),
            ):
                cases.setdefault(f"{operator} {name}", []).append((prompt, expected))
    return cases


def other_cases() -> dict[str, list[tuple[str, str]]]:
    rng = Random(0)
    word_problems = [arithmetic.word_problem(rng, a, rng.choice("+-"), b) for a, b in arithmetic.pairs(held_out=True)]
    return {
        "questions": [(chat_prompt(q.canonical), q.answer) for q in questions.QUESTIONS],
        "questions, plain": [(q.canonical, " " + q.answer) for q in questions.QUESTIONS],
        "questions, all wordings": [(chat_prompt(w), q.answer) for q in questions.QUESTIONS for w in questions.training_wordings(q)],
        "questions, unseen wordings": [(chat_prompt(w), q.answer) for q in questions.QUESTIONS for w in questions.unseen_wordings(q)],
        "small talk": [(chat_prompt(w), answer) for answer, wordings in small_talk.TALK for w in wordings],
        "word problems": [(chat_prompt(q), a) for q, a in word_problems],
        "second turn": [(f"{chat_prompt('What is 23 + 58?')}23 + 58 = 81.{IM_END}\n{chat_prompt(q.canonical)}", q.answer)
                        for q in questions.QUESTIONS],
        "declines": [(chat_prompt(q), a) for q, a in [f(rng) for f in (small_talk.unknown, arithmetic.out_of_range) for _ in range(100)]],
    }


def turn_cases(cases: dict, name: str, turns: list[tuple[str, str]], system: str) -> None:
    """Each answer of a conversation on its own: a call, and what is said of its result."""
    for i, (_, answer) in enumerate(turns):
        before = chat_prompt(turns[0][0], system) if i == 0 else f"{chat_prompt(turns[0][0], system)}{turns[0][1]}{IM_END}\n{chat_prompt(turns[1][0])}"
        cases.setdefault(f"{'results' if i else 'calls'}: {name}", []).append((before, answer))


def call_cases() -> dict[str, list[tuple[str, str]]]:
    """Numbers, cities, topics and documents that are not in the text, with all tools, with some, and without the one that it takes."""
    rng, cases = Random(0), {}
    held_out = arithmetic.pairs(held_out=True)
    cities = tools.HELD_OUT_CITIES
    for _ in range(300):
        offered = {"calculator": tools.TOOLS["calculator"]} | tools.random_tools(rng)
        turn_cases(cases, "calculator", tools.calculation(rng, tools.numbers(rng, held_out=True), offered["calculator"]), tools.system_with(offered))
    for chosen in [[c] for c in cities] * 4 + [[c, d] for c in cities for d in rng.sample(cities, 2) if c != d] + [[]] * 20:
        offered = {"clock": ["city"]} | tools.random_tools(rng)
        turn_cases(cases, "clock, two cities" if len(chosen) == 2 else "clock", tools.clock(rng, chosen), tools.system_with(offered))
    for topic in tools.HELD_OUT_TOPICS:
        for text in tools.HELD_OUT_DOCUMENTS:
            turn_cases(cases, "look-up", tools.look_up(rng, topic, text), tools.system_with({"lookup": ["topic"]} | tools.random_tools(rng)))
    for problem in tools.WHAT_FAILED:
        for turns in (tools.calculation(rng, tools.numbers(rng, held_out=True), tools.TOOLS["calculator"]), tools.clock(rng, [])):
            turn_cases(cases, "failed", tools.failed(turns, problem)[:2], tools.system_with(tools.TOOLS))
    for name in tools.TOOLS:
        others = {n: a for n, a in tools.TOOLS.items() if n != name}
        tasks = [task for task in (tools.random_task(rng) for _ in range(300)) if task[0] == name]
        cases.setdefault("no call: not offered", []).extend((chat_prompt(turns[0][0], tools.system_with(others)), otherwise) for _, turns, otherwise in tasks)
    cases["no tools at all"] = [(chat_prompt(question), answer) for question, answer in (tools.unaided(rng) for _ in range(200))]
    everything = tools.system_with(tools.TOOLS)
    cases["no call: small sums"] = [(chat_prompt(f"What is {a} + {b}?", everything), arithmetic.chat_answer(a, "+", b)) for a, b in held_out[::5]]
    cases["no call: questions"] = [(chat_prompt(q.canonical, everything), q.answer) for q in questions.QUESTIONS]
    return cases


def form_cases() -> dict[str, list[tuple[str, str]]]:
    rng, cases = Random(0), {}
    def add(name: str, asked: tuple[str, str, str | None]) -> None:
        cases.setdefault(f"JSON: {name}", []).append((chat_prompt(asked[0], asked[2]), asked[1]))
    for a, b in arithmetic.pairs(held_out=True):
        add("sums", json_form.of_sum(rng, a, rng.choice("+-"), b))
    for a, b in arithmetic.pairs(held_out=True)[::3]:
        add("word problems", json_form.of_problem(rng, a, rng.choice("+-"), b))
    for question in questions.QUESTIONS * 2:
        add("questions", json_form.of_question(rng, question.canonical, question.answer))
    return cases


def measure(model, tokenizer: Tokenizer, cases: dict[str, list[tuple[str, str]]], max_tokens: int) -> tuple[dict, list[str]]:
    """Per case name the share of exact answers and the smallest gap, and up to eight wrong answers of each."""
    report, wrong = {}, []
    for name, pairs in cases.items():
        answers = greedy(model, tokenizer, [p for p, _ in pairs], max_tokens)
        bad = [(p, e, a) for (p, e), a in zip(pairs, answers) if a.text != e or not a.ended]
        report[name] = {"cases": len(pairs), "right": len(pairs) - len(bad), "share": round(1 - len(bad) / len(pairs), 4),
                        "smallest_gap": round(min(a.gap for a in answers), 3)}
        wrong += [f"{name}: {p!r} -> {a.text!r}, expected {e!r}" for p, e, a in bad[:8]]
    return report, wrong


def evaluate(model, tokenizer: Tokenizer, sample: float = 1.0) -> tuple[dict, list[str]]:
    report, wrong = measure(model, tokenizer, arithmetic_cases(True, sample), 16)
    more, more_wrong = measure(model, tokenizer, other_cases(), 80)
    calls, calls_wrong = measure(model, tokenizer, call_cases() | form_cases(), 120)
    return report | more | calls, wrong + more_wrong + calls_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL_DIRECTORY)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sample", type=float, default=1.0, help="share of the held-out pairs")
    parser.add_argument("--stories", action="store_true", help="also print some stories")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device, getattr(torch, args.dtype)).eval()
    report, wrong = evaluate(model, tokenizer, args.sample)
    print("\n".join(wrong))
    for name, row in report.items():
        print(f"{name:32} {row['right']:5} of {row['cases']:5}  {row['share']:7.2%}  smallest gap {row['smallest_gap']}")
    if args.stories:
        for prompt, answer in zip(STORY_PROMPTS, greedy(model, tokenizer, STORY_PROMPTS, 250)):
            print(f"\n{prompt}\n[{answer.text}] ended={answer.ended} gap={answer.gap:.3f}")
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
