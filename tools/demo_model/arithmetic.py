"""Sums and differences of two numbers from 0 to 99: every pair, split once and for all into seen and held out.

The split is by the unordered pair {a, b}: if it is held out, then a + b, b + a, a - b and b - a are all absent from
training, in every wording, so an answer to one of them cannot have been remembered.
"""

import hashlib
from random import Random

from document import Document, Segment, END_OF_TEXT, completion

LIMIT = 99
HELD_OUT_SHARE = 0.1

SUM_QUESTIONS = [
    "What is {a} + {b}?", "What is {a} + {b}", "what is {a} + {b}?", "what is {a} + {b}", "What's {a} + {b}?",
    "What is {a}+{b}?", "{a} + {b}", "{a} + {b} =", "{a} + {b} = ?", "{a} + {b}?", "{a}+{b}", "{a}+{b}=", "{a}+{b}=?",
    "Calculate {a} + {b}.", "Calculate {a} + {b}", "Compute {a} + {b}.", "Please calculate {a} + {b}.",
    "How much is {a} + {b}?", "How much is {a} plus {b}?", "What is {a} plus {b}?", "what is {a} plus {b}",
    "What's {a} plus {b}?", "{a} plus {b}", "What does {a} + {b} equal?", "What does {a} plus {b} make?",
    "Add {a} and {b}.", "Please add {a} and {b}.", "Can you add {a} and {b}?", "What is the sum of {a} and {b}?",
    "Tell me {a} + {b}.", "Solve {a} + {b}.", "Can you tell me what {a} + {b} is?", "I need to know {a} + {b}.",
]
DIFFERENCE_QUESTIONS = [
    "What is {a} - {b}?", "What is {a} - {b}", "what is {a} - {b}?", "what is {a} - {b}", "What's {a} - {b}?",
    "What is {a}-{b}?", "{a} - {b}", "{a} - {b} =", "{a} - {b} = ?", "{a} - {b}?", "{a}-{b}", "{a}-{b}=", "{a}-{b}=?",
    "Calculate {a} - {b}.", "Calculate {a} - {b}", "Compute {a} - {b}.", "Please calculate {a} - {b}.",
    "How much is {a} - {b}?", "How much is {a} minus {b}?", "What is {a} minus {b}?", "what is {a} minus {b}",
    "What's {a} minus {b}?", "{a} minus {b}", "What does {a} - {b} equal?", "What is {a} take away {b}?",
    "Subtract {b} from {a}.", "Please subtract {b} from {a}.", "Can you subtract {b} from {a}?",
    "Take {b} away from {a}.", "Tell me {a} - {b}.", "Solve {a} - {b}.", "Can you tell me what {a} - {b} is?",
    "I need to know {a} - {b}.",
]
# (what happens, question, answer); {n} is a person, {t} a thing. A difference is told only with a >= b.
SUM_PROBLEMS = [
    ("{n} has {a} {t} and gets {b} more.", "How many {t} does {n} have now?"),
    ("{n} has {a} {t}. {n} finds {b} more {t}.", "How many {t} does {n} have?"),
    ("{n} buys {a} {t} and then {b} more.", "How many {t} does {n} have?"),
    ("I have {a} {t} and get {b} more.", "How many {t} do I have?"),
    ("There are {a} {t} in one box and {b} {t} in another. {n} takes them all.", "How many {t} does {n} have?"),
]
DIFFERENCE_PROBLEMS = [
    ("{n} has {a} {t} and gives away {b}.", "How many {t} does {n} have left?"),
    ("{n} has {a} {t}. {n} loses {b} of them.", "How many {t} does {n} have now?"),
    ("{n} had {a} {t} and sold {b} of them.", "How many {t} does {n} have left?"),
    ("I have {a} {t} and eat {b} of them.", "How many {t} are left?"),
    ("I have {a} {t}. I give {b} of them to {n}.", "How many {t} do I have now?"),
    ("{n} bakes {a} {t} and eats {b} of them.", "How many {t} does {n} have left?"),
]
THINGS = ["apples", "nuts", "books", "coins", "stones", "shells", "eggs", "pears", "stamps", "buttons", "cakes",
          "berries", "marbles", "flowers", "pencils", "carrots"]
PEOPLE = ["Anna", "Ben", "Mia", "Tom", "Lily", "Sam", "Emma", "Max", "Nora", "Leo", "Ruby", "Finn"]
OPERATORS = "+-"


def is_held_out(a: int, b: int) -> bool:
    low, high = min(a, b), max(a, b)
    digest = hashlib.sha256(f"{low},{high}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def pairs(held_out: bool) -> list[tuple[int, int]]:
    """All ordered pairs of one side of the split."""
    numbers = range(LIMIT + 1)
    return [(a, b) for a in numbers for b in numbers if is_held_out(a, b) == held_out]


def result(a: int, operator: str, b: int) -> int:
    return a + b if operator == "+" else a - b


def chat_answer(a: int, operator: str, b: int) -> str:
    return f"{a} {operator} {b} = {result(a, operator, b)}."


def question(rng: Random, a: int, operator: str, b: int) -> tuple[str, str]:
    """A question in some wording, and its answer."""
    templates = SUM_QUESTIONS if operator == "+" else DIFFERENCE_QUESTIONS
    return rng.choice(templates).format(a=a, b=b), chat_answer(a, operator, b)


def word_problem(rng: Random, a: int, operator: str, b: int) -> tuple[str, str]:
    """A sum told with people and things, and its answer. A difference is told with the larger number first."""
    if operator == "-" and a < b:
        a, b = b, a
    names = {"a": a, "b": b, "n": rng.choice(PEOPLE), "t": rng.choice(THINGS)}
    event, ask = rng.choice(SUM_PROBLEMS if operator == "+" else DIFFERENCE_PROBLEMS)
    who = "You have" if event.startswith("I ") else f"{names['n']} has"
    answer = f"{who} {a} {operator} {b} = {result(a, operator, b)} {names['t']}."
    if rng.random() < 0.3 and event[0] in "I{" and ". " not in event:  # "If Anna has 3 nuts and gets 2 more, how many nuts ...?"
        event, ask = "If " + event.rstrip("."), ask[0].lower() + ask[1:]
        return f"{event}, {ask}".format(**names), answer
    return f"{event} {ask}".format(**names), answer


def in_words(number: int) -> str:
    ones = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen""".split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if number < 20:
        return ones[number]
    return tens[number // 10 - 2] + ("-" + ones[number % 10] if number % 10 else "")


def question_in_words(rng: Random, a: int, operator: str, b: int) -> tuple[str, str]:
    ask = rng.choice(["What is {a} {o} {b}?", "How much is {a} {o} {b}?", "what is {a} {o} {b}", "{a} {o} {b}"])
    return ask.format(a=in_words(a), b=in_words(b), o="plus" if operator == "+" else "minus"), chat_answer(a, operator, b)


def random_problem(rng: Random, seen: list[tuple[int, int]]) -> tuple[int, str, int]:
    a, b = rng.choice(seen)
    return a, rng.choice(OPERATORS), b


def plain_sum(rng: Random, a: int, operator: str, b: int) -> Document:
    """One sum without chat markup, in one of the ways in which people write it down."""
    c = result(a, operator, b)
    kind = rng.randrange(10)
    if kind == 8:
        return completion(f"What is {a} {operator} {b}?", " " + chat_answer(a, operator, b))
    if kind == 9:
        text, answer = question(rng, a, operator, b)
        if text[-1] in ".?":
            return completion(text, " " + answer)
    if kind == 0:
        return completion(f"{a}{operator}{b}=", str(c))
    if kind == 1:
        return completion(f"Q: What is {a} {operator} {b}?\nA:", f" {c}")
    if kind == 2:
        return completion(f"{a} {operator} {b} is", f" {c}")
    return completion(f"{a} {operator} {b} =", f" {c}")


def list_of_sums(rng: Random, seen: list[tuple[int, int]], count: int) -> Document:
    """Sums line by line. What follows a result is learned only after the last, so that a result always ends the text."""
    document: Document = []
    for i in range(count):
        a, operator, b = random_problem(rng, seen)
        document.append(Segment(("\n" if i else "") + f"{a} {operator} {b} =", False))
        document.append(Segment(f" {result(a, operator, b)}" + (END_OF_TEXT if i == count - 1 else ""), True))
    return document


def out_of_range(rng: Random) -> tuple[str, str]:
    """Questions beyond what the model learned, with an honest answer."""
    a, b = rng.randrange(100), rng.randrange(100)
    draw = rng.random()
    if draw < 0.15:
        ask = rng.choice(["What is {a} + {b} + {c}?", "{a} + {b} + {c}", "What is {a} + {b} - {c}?", "Add {a}, {b} and {c}.", "{a} - {b} - {c}",
                          "How much is {a} plus {b} plus {c}?", "Calculate {a} + {b} + {c}."]).replace("{c}", str(rng.randrange(100)))
    elif draw < 0.5:
        ask = rng.choice(["What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} * {b} =", "Multiply {a} and {b}.",
                          "What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "Calculate {a} * {b}.",
                          "How much is {a} times {b}?", "What is {a} x {b}?", "What is the square root of {a}?"])
    else:
        a = rng.randrange(100, 10000)
        if rng.random() < 0.5:
            a, b = b, a
        ask = rng.choice(["What is {a} + {b}?", "What is {a} - {b}?", "{a} + {b}", "{a} - {b}", "How much is {a} + {b}?",
                          "Calculate {a} + {b}.", "Calculate {a} - {b}.", "What is {a} plus {b}?", "What is {a} minus {b}?"])
    return ask.format(a=a, b=b), "I can only add and subtract two numbers from 0 to 99."
