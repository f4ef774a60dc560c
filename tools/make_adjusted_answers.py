#!/usr/bin/env python3
"""Makes tests/data/adjusted_answers.json: the greedy answers of models/demo under transformers' logits processors.

    python tools/make_adjusted_answers.py      # needs torch and transformers

Each case has `prompt`, `params` (sampling_params as a request has them), `tokens` (computed in f32) and `gap` (the logit gap between
the likeliest and the second, at each of them). Repetition penalty, bias and bad words are transformers' own; frequency and presence
penalty, which it does not have, are OpenAI's definition. Words become tokens as vLLM does it: also with a space before them, where
that is as many tokens and another first one.
"""
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import (NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor,
                                                    SequenceBiasLogitsProcessor)

SequenceBiasLogitsProcessor._validate_arguments = lambda self: None  # it refuses the id 0
ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS = 48
PROMPTS = ("Once upon a time", "What is 37 + 45?", "The sky was", "23 + 58 =")


class Answers:
    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/demo")
        self.model = AutoModelForCausalLM.from_pretrained(ROOT / "models/demo", dtype=torch.float32).eval()
        self.allowed_ids = self.model.config.vocab_size

    def ids_of(self, words):
        ids = []
        for word in words:
            for prefix in ("", " "):
                tokens = self.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
                if not prefix or (tokens[0] != ids[-1][0] and len(tokens) == len(ids[-1])):
                    ids.append(tokens)
        return ids

    def adjust(self, scores, prompt, answer, params):
        """vLLM's order: allowed tokens, bad words, bias, repetition, frequency and presence penalty."""
        scores = scores.clone()[None]
        if "allowed_token_ids" in params:
            mask = torch.ones(scores.shape[1], dtype=torch.bool)
            mask[params["allowed_token_ids"]] = False
            scores[0, mask] = -torch.inf
        if "bad_words" in params:  # of the answer: one id that is in no word stands for an empty one
            scores = NoBadWordsLogitsProcessor(self.ids_of(params["bad_words"]))(torch.tensor([answer or [-1]]), scores)
        if "logit_bias" in params:
            bias = [[[int(i)], float(b)] for i, b in params["logit_bias"].items()]
            scores = SequenceBiasLogitsProcessor(bias)(torch.tensor([prompt]), scores)
        if "repetition_penalty" in params:
            scores = RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])(torch.tensor([prompt + answer]), scores)
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=scores.shape[1])
        scores -= params.get("frequency_penalty", 0.0) * counts
        scores -= params.get("presence_penalty", 0.0) * (counts > 0)
        return scores[0]

    def answer(self, text, params):
        prompt = self.tokenizer.encode(text)
        tokens, gaps, cache = [], [], None
        with torch.no_grad():
            for _ in range(TOKENS):
                out = self.model(torch.tensor([tokens[-1:] or prompt]), past_key_values=cache, use_cache=True)
                logits, cache = out.logits[0, -1].double(), out.past_key_values
                best = torch.topk(self.adjust(logits, prompt, tokens, params), 2)
                gaps.append(min(round((best.values[0] - best.values[1]).item(), 6), 1e6))
                tokens.append(best.indices[0].item())
        return dict(prompt=text, params=params, tokens=tokens, gap=gaps)

    def cases(self):
        for text in PROMPTS:
            plain = self.answer(text, {})["tokens"]
            # Tokens that the plain answer has most are unlikelier, those that it never has likelier.
            bias = {str(t): -3.5 for t in plain[::5]} | {str(t): 2.25 for t in range(0, 1000, 90) if t not in plain}
            piece = lambda begin, end: self.tokenizer.decode(plain[begin:end]).strip() or "a"
            words = [piece(0, 1), piece(1, 3), piece(5, 9), piece(20, 22), "the", "and they"]
            allowed = sorted(set(plain[1:]) | set(range(100, 1000, 7)))
            for params in ({"repetition_penalty": 1.3}, {"repetition_penalty": 0.9}, {"frequency_penalty": 0.8},
                           {"presence_penalty": 2.0}, {"presence_penalty": -1.5, "frequency_penalty": 0.5},
                           {"logit_bias": bias}, {"bad_words": words}, {"allowed_token_ids": allowed},
                           {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.6, "logit_bias": bias},
                           {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.6, "logit_bias": bias,
                            "bad_words": words, "allowed_token_ids": allowed}):
                yield self.answer(text, params)


def main():
    made = list(Answers().cases())
    target = ROOT / "tests/data/adjusted_answers.json"
    target.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in made) + "\n]\n")
    print(f"{len(made)} cases, {target.stat().st_size >> 10} KiB, smallest gap {min(g for c in made for g in c['gap'])}")


if __name__ == "__main__":
    main()
