"""Measures a demo model by greedy decoding: held-out arithmetic, the questions in seen and unseen wordings, stories.

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
import questions
import small_talk
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
    return report | more, wrong + more_wrong


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
