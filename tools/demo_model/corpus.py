"""The training corpus: documents drawn from arithmetic, questions, small talk, stories, calls of tools and JSON forms, tokenised into
fixed shapes.

Every document starts at position 0 of a row of its own, as a prompt does at inference; nothing is packed behind another
document, except in the `long` shape, whose rows are conversations of many turns, and in `calls`, which has a few. Labels are -100 where nothing is learned.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

import arithmetic
import json_form
import questions
import small_talk
import stories
import tools
from document import Document, chat, completion, plain

MODEL_DIRECTORY = Path(__file__).resolve().parents[2] / "models" / "demo"
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are a helpful assistant that answers briefly.", "You are a friendly assistant.",
                  "You are the demo model of nano-vllm.cpp.", "Answer in one or two sentences.", "Be brief."]
SHAPES = {"sums": 40, "texts": 240, "calls": 384, "long": 2048}  # tokens per row
PADDING = 0  # under label -100, and to the right of everything that is learned
IGNORED = -100


def random_system(rng: Random) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None


class Corpus:
    """Draws documents; the same seed gives the same documents."""

    def __init__(self, seed: int):
        self.rng = Random(seed)
        self.seen = arithmetic.pairs(held_out=False)

    def sums(self) -> Document:
        rng = self.rng
        problem = arithmetic.random_problem(rng, self.seen)
        if rng.random() < 0.25:
            return arithmetic.plain_sum(rng, *problem)
        return chat([arithmetic.question(rng, *problem)])

    def texts(self) -> Document:
        rng = self.rng
        draw = rng.random()
        if draw < 0.10:
            return self.other_arithmetic()
        if draw < 0.50:
            return chat([questions.random_question(rng)], random_system(rng))
        if draw < 0.60:
            return chat([small_talk.small_talk(rng)], random_system(rng))
        if draw < 0.83:
            return chat([stories.random_story(rng)], random_system(rng))
        if draw < 0.93:
            return plain(stories.told_without_request(rng))
        if draw < 0.95:
            return plain(rng.choice(questions.QUESTIONS).answer)
        return self.unformatted()

    def unformatted(self) -> Document:
        """A question without chat markup, as it comes from `--prompt`."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.6:
            question, answer = questions.random_question(rng)
        elif draw < 0.75:
            question, answer = small_talk.small_talk(rng)
        else:
            question, answer = stories.random_story(rng)
        if draw < 0.2:
            return completion(f"Q: {question}\nA:", " " + answer)
        return completion(question, " " + answer)

    def other_arithmetic(self) -> Document:
        """Arithmetic that is too long for the row of `sums`, and what the model must decline."""
        rng = self.rng
        problem = arithmetic.random_problem(rng, self.seen)
        draw = rng.random()
        if draw < 0.30:
            return chat([arithmetic.question(rng, *problem)], rng.choice(SYSTEM_PROMPTS))
        if draw < 0.45:
            return chat([arithmetic.question_in_words(rng, *problem)], random_system(rng))
        if draw < 0.70:
            return chat([arithmetic.word_problem(rng, *problem)], random_system(rng))
        if draw < 0.85:
            return chat([arithmetic.out_of_range(rng)], random_system(rng))
        return arithmetic.list_of_sums(rng, self.seen, rng.randint(2, 12))

    def calls(self) -> Document:
        """Conversations with tools, and answers as JSON."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.04:
            return chat([tools.unaided(rng)], random_system(rng))
        if draw < 0.42:
            question, answer, system = json_form.random_form(rng, self.seen, random_system(rng))
            return chat([(question, answer)], system)
        offered = tools.random_tools(rng)
        turns = [turn for _ in range(rng.choice([1, 1, 2])) for turn in tools.random_turns(rng, offered, self.seen)]
        return chat(turns, tools.system_with(offered, tools.random_system(rng, random_system(rng))))

    def turn(self) -> tuple[str, str]:
        rng = self.rng
        draw = rng.random()
        if draw < 0.40:
            return arithmetic.question(rng, *arithmetic.random_problem(rng, self.seen))
        if draw < 0.45:
            return arithmetic.word_problem(rng, *arithmetic.random_problem(rng, self.seen))
        if draw < 0.75:
            return questions.random_question(rng)
        if draw < 0.90:
            return small_talk.small_talk(rng)
        return stories.random_story(rng)

    def long(self) -> Document:
        rng = self.rng
        if rng.random() < 0.75:
            return chat([self.turn() for _ in range(60)], random_system(rng))
        offered = tools.random_tools(rng)
        turns = [tools.random_turns(rng, offered, self.seen) if rng.random() < 0.5 else [self.turn()] for _ in range(40)]
        return chat([turn for some in turns for turn in some], tools.system_with(offered, tools.random_system(rng, random_system(rng))))


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))


def encode(tokenizer: Tokenizer, documents: list[Document], length: int, may_cut: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids and labels, both [documents, length] int16. Raises if a document is longer and may not be cut."""
    texts = [segment.text for document in documents for segment in document]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    ids = np.full((len(documents), length), PADDING, np.int16)
    labels = np.full((len(documents), length), IGNORED, np.int16)
    for row, document in enumerate(documents):
        at = 0
        for segment in document:
            piece = next(encodings).ids
            if at + len(piece) > length:
                if not may_cut:
                    raise ValueError(f"a document of {at + len(piece)} tokens does not fit into {length}: {document}")
                piece = piece[: length - at]
            ids[row, at : at + len(piece)] = piece
            if segment.learned:
                labels[row, at : at + len(piece)] = piece
            at += len(piece)
    return ids, labels


def make_rows(shape: str, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    corpus = Corpus(seed)
    return encode(load_tokenizer(), [getattr(corpus, shape)() for _ in range(count)], SHAPES[shape], may_cut=shape in ("calls", "long"))


def make_shape(pool: ProcessPoolExecutor, shape: str, seed: int, count: int, jobs: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """`count` rows of one shape. Does not depend on how many processes the pool has."""
    share = -(-count // jobs)
    futures = [pool.submit(make_rows, shape, seed * 1_000_003 + job, share) for job in range(jobs)]
    parts = [future.result() for future in futures]
    return np.concatenate([p[0] for p in parts])[:count], np.concatenate([p[1] for p in parts])[:count]
