"""Questions whose answer is asked for as JSON of a given form: its keys, an outline, or a schema."""

import json
from random import Random

import arithmetic
import questions
import small_talk

# The entries of a form: the key's names, the first being the usual one, and the type of its value.
KEYS = {
    "a": (["a", "first", "x"], "integer"), "b": (["b", "second", "y"], "integer"), "op": (["op", "operator"], "string"),
    "result": (["result", "sum", "difference"], "integer"), "name": (["name", "who"], "string"), "thing": (["thing", "item"], "string"),
    "question": (["question"], "string"), "answer": (["answer"], "string"),
}
SUM_FORMS = [["a", "b", "result"], ["a", "op", "b", "result"], ["op", "a", "b", "result"], ["result"], ["question", "answer"], ["answer"]]
PROBLEM_FORMS = [["name", "a", "op", "b", "result", "thing"], ["name", "thing", "a", "op", "b", "result"], ["a", "op", "b", "result"], ["name", "thing"]]
QUESTION_FORMS = [["question", "answer"], ["answer"]]


def names_of(rng: Random, form: list[str], operator: str | None) -> dict[str, str]:
    """The name of each key of a form; `sum` and `difference` only where they fit."""
    unfit = {"+": "difference", "-": "sum", None: ""}[operator]
    usual = rng.random() < 0.6
    return {key: rng.choice([n for n in KEYS[key][0] if n != unfit][: 1 if usual and key != "result" else None]) for key in form}


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def schema(names: dict[str, str], like_pydantic: bool, closed: bool) -> str:
    types = {name: {"type": KEYS[key][1]} for key, name in names.items()}
    end = {"additionalProperties": False} if closed else {}
    if like_pydantic:
        types = {name: {"title": name.capitalize(), **value} for name, value in types.items()}
        return json.dumps({**end, "properties": types, "required": list(types), "title": "Form", "type": "object"})
    return json.dumps({"type": "object", "properties": types, "required": list(types), **end})


def instruction(rng: Random, names: dict[str, str]) -> str:
    words = list(names.values())
    draw = rng.random()
    if draw < 0.4:
        key = "keys" if len(words) > 1 else "key"
        return rng.choice([f"Answer as JSON with the {key} {listed(words)}.", f"Answer in JSON with the {key} {', '.join(words)}.",
                           f"Give the answer as JSON with the {key} {listed(words)}.", f"Reply with JSON: {', '.join(words)}."])
    if draw < 0.75:
        outline = "{" + ", ".join(f'"{word}": ...' for word in words) + "}"
        return rng.choice(["Answer as JSON: ", "Answer in this form: ", "Reply with JSON of this form: ", "Use this JSON form: "]) + outline
    text = schema(names, rng.random() < 0.5, rng.random() < 0.5)
    return rng.choice(["Answer as JSON of this schema: ", "Reply with JSON that fits this schema: ", "Answer as JSON. Schema: "]) + text


def asked(rng: Random, question: str, names: dict[str, str], values: dict, system: str | None) -> tuple[str, str, str | None]:
    """The user's message, the answer and the system message: the instruction stands in one of the messages."""
    answer = json.dumps({name: values[key] for key, name in names.items()}, ensure_ascii=False)
    how = instruction(rng, names)
    if rng.random() < 0.5:
        return question, answer, f"{system} {how}" if system else how
    return (f"{question}{rng.choice([' ', chr(10)])}{how}" if rng.random() < 0.75 else f"{how}\n{question}"), answer, system


def of_sum(rng: Random, a: int, operator: str, b: int, form: list[str] | None = None, system: str | None = None) -> tuple[str, str, str | None]:
    question, answer = arithmetic.question(rng, a, operator, b)
    values = {"a": a, "op": operator, "b": b, "result": arithmetic.result(a, operator, b), "question": question, "answer": answer}
    return asked(rng, question, names_of(rng, form or rng.choice(SUM_FORMS), operator), values, system)


def of_problem(rng: Random, a: int, operator: str, b: int, form: list[str] | None = None, system: str | None = None) -> tuple[str, str, str | None]:
    """A word problem. The person is "You" where the problem says "I"."""
    question, answer = arithmetic.word_problem(rng, a, operator, b)
    if operator == "-" and a < b:
        a, b = b, a
    words = answer.rstrip(".").split(" ")
    values = {"name": words[0], "thing": words[-1], "a": a, "op": operator, "b": b, "result": arithmetic.result(a, operator, b)}
    return asked(rng, question, names_of(rng, form or rng.choice(PROBLEM_FORMS), operator), values, system)


def of_question(rng: Random, question: str, answer: str, form: list[str] | None = None, system: str | None = None) -> tuple[str, str, str | None]:
    return asked(rng, question, names_of(rng, form or rng.choice(QUESTION_FORMS), None), {"question": question, "answer": answer}, system)


def random_form(rng: Random, seen: list[tuple[int, int]], system: str | None) -> tuple[str, str, str | None]:
    draw = rng.random()
    if draw < 0.60:
        return of_sum(rng, *arithmetic.random_problem(rng, seen), system=system)
    if draw < 0.80:
        return of_problem(rng, *arithmetic.random_problem(rng, seen), system=system)
    drawn = rng.choice([questions.random_question, questions.random_question, questions.random_question, small_talk.small_talk, arithmetic.out_of_range])
    return of_question(rng, *drawn(rng), system=system)
