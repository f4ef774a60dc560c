"""Conversations in which the model calls tools: a calculator, a clock, a look-up in documents.

It calls one where it would otherwise decline: for arithmetic beyond its own, for the time, for what stands in the
documents, and only if the tool is offered. With a result it answers in words; a result is copied, never computed.
"""

import functools
import json
from pathlib import Path
from random import Random

import arithmetic
import questions
import small_talk
import stories

# Name and arguments of each tool, in the usual order.
TOOLS = {"calculator": ["a", "op", "b"], "clock": ["city"], "lookup": ["topic"]}
# Offered beside them and never called.
OTHER_TOOLS = {"get_weather": ["city"], "send_mail": ["to", "text"], "search": ["query"], "translate": ["text", "language"],
               "set_alarm": ["time"], "read_file": ["path"], "run": ["command"], "play": ["song"], "add_note": ["title", "text"]}

PRODUCT_QUESTIONS = [
    "What is {a} * {b}?", "what is {a} * {b}?", "What is {a} * {b}", "What's {a} * {b}?", "What is {a}*{b}?", "{a} * {b}", "{a} * {b} =",
    "{a} * {b}?", "{a}*{b}", "{a}*{b}=", "Calculate {a} * {b}.", "Compute {a} * {b}.", "Please calculate {a} * {b}.", "Multiply {a} by {b}.",
    "How much is {a} * {b}?", "How much is {a} times {b}?", "What is {a} times {b}?", "what is {a} times {b}", "{a} times {b}",
    "What is {a} x {b}?", "Multiply {a} and {b}.", "Please multiply {a} and {b}.", "Can you multiply {a} and {b}?",
    "What is the product of {a} and {b}?", "Tell me {a} * {b}.", "What is {a} multiplied by {b}?", "I need to know {a} * {b}.",
]
BY_CALCULATOR = ["Use the calculator: {a} {op} {b}", "Use the calculator: {a} {op} {b}.", "Use the calculator for {a} {op} {b}.",
                 "Calculate {a} {op} {b} with the calculator.", "What does the calculator say for {a} {op} {b}?"]
TIME_HERE = ["What time is it?", "What time is it now?", "what time is it", "What's the time?", "What is the time?", "Tell me the time.",
             "Please tell me the time.", "Do you know what time it is?", "Can you tell me the time?", "How late is it?", "What time is it here?",
             "What does the clock say?"]
TIME_THERE = ["What time is it in {c}?", "what time is it in {c}", "What is the time in {c}?", "What's the time in {c}?", "Tell me the time in {c}.",
              "Please tell me the time in {c}.", "What time is it in {c} now?", "How late is it in {c}?", "Can you tell me the time in {c}?",
              "Do you know what time it is in {c}?"]
TIME_TWICE = ["What time is it in {c} and in {d}?", "What is the time in {c} and {d}?", "Tell me the time in {c} and in {d}.",
              "How late is it in {c} and in {d}?"]
LOOK_UPS = ["What do the documents say about {t}?", "What do your documents say about {t}?", "Look up {t}.", "Look up {t}", "Please look up {t}.",
            "Look up {t} in the documents.", "Can you look up {t}?", "Search the documents for {t}.", "Find {t} in the documents.",
            "What is in the documents about {t}?", "Check the documents for {t}.", "what do the documents say about {t}"]
CITIES = """Paris,London,Berlin,Rome,Madrid,Vienna,Oslo,Lisbon,Athens,Dublin,Prague,Warsaw,Moscow,Istanbul,Cairo,Lagos,Nairobi,Tokyo,Seoul,
Shanghai,Bangkok,Jakarta,Manila,Kolkata,Dubai,Tehran,Sydney,Melbourne,Auckland,New York,Chicago,Denver,Los Angeles,Toronto,Vancouver,Mexico City,
Lima,Santiago,Sao Paulo,Caracas,Havana,Panama,Honolulu,Budapest,Brussels,Amsterdam,Zurich,Riga,Vilnius,Tunis,Algiers,Baghdad""".replace("\n", "").split(",")
HELD_OUT_CITIES = """Stockholm,Helsinki,Copenhagen,Sofia,Belgrade,Singapore,Hong Kong,Karachi,Kabul,Johannesburg,Casablanca,Accra,Phoenix,Anchorage,
Halifax,Bogota,Montevideo,Brisbane,Perth,Taipei""".replace("\n", "").split(",")
HELD_OUT_TOPICS = ["the log format", "TLS certificates", "page faults", "rate limits", "exit codes", "huge pages", "the HTTP port", "NVLink", "crash reports",
                   "the license", "environment variables", "Unicode", "metrics", "worker threads", "version 0.1", "signal handling", "--api-key", "dtype f32",
                   "Anthropic's API", "sparse experts"]
HELD_OUT_DOCUMENTS = [
    "The server listens on port 8000 of 127.0.0.1 unless --host and --port say otherwise.",
    "Certificates are read again when their files change, so a renewal needs no restart.",
    "An exit code of 3 means that the model could not be read.",
    "Huge pages are asked for where the system has them, for weights above 64 MiB.",
    "`nanovllm doctor` prints one line for each module and says what is missing.",
    "Peer memory over NVLink carries sums between GPUs (NCCL is used between processes).",
    "Every option has a twin in the environment: NANOVLLM_MAX_MODEL_LEN=4096 sets --max-model-len.",
    "It is published under the MIT license.", "SIGTERM drains requests for 30 s; a second one ends the program at once.",
    "Prometheus finds 42 series under /metrics, for example vllm:num_requests_running.",
    "Zanzibar exports cloves; its harbour was rebuilt in 1987.", "Yaks weigh 535 kg on average and live above 4,200 m.",
]
WHAT_FAILED = ["the user did not allow this call", "stopped by the user", "ended with the exit code 1", "there is no such tool", "no answer within 30 s",
               "nothing was found", "not available", "the city is not known", "out of range"]
OUT_OF_RANGE = arithmetic.out_of_range(Random(0))[1]
SYSTEM_PROMPTS = ["You may use the tools.", "Use the tools where they help.", "You are a helpful assistant with tools.", "Use tools."]
SYLLABLES = [c + v for c in "b c d f g h k l m n p r s t v w z sh ch st br tr".split() for v in "a e i o u ai ou".split()]



def random_system(rng: Random, otherwise: str | None) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else otherwise


def call(name: str, arguments: dict) -> str:
    """What the model writes to call a tool: Hermes' form, which Qwen2.5 and Qwen3 have too."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def response(*results: str) -> str:
    """The user's turn that CHAT_TEMPLATE makes of messages whose role is `tool`."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def system_with(tools: dict[str, list[str]], system: str | None = None) -> str:
    """The system message that CHAT_TEMPLATE writes where tools are offered: a signature each."""
    signatures = "".join(f"{name}({', '.join(arguments)})\n" for name, arguments in tools.items())
    return (f"{system}\n\n" if system else "") + f"# Tools\n\n<tools>\n{signatures}</tools>"


def definitions(tools: dict[str, list[str]]) -> list[dict]:
    """The same tools as a client sends them."""
    types = {"a": "integer", "b": "integer"}
    return [{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {a: {"type": types.get(a, "string")} for a in arguments}, "required": arguments}}}
        for name, arguments in tools.items()]


def random_tools(rng: Random, share: float = 0.65) -> dict[str, list[str]]:
    """Some of the tools and some others, in any order; at times their arguments are in another order, too."""
    tools = [(name, list(arguments)) for name, arguments in TOOLS.items() if rng.random() < share]
    tools += [(name, list(OTHER_TOOLS[name])) for name in rng.sample(sorted(OTHER_TOOLS), rng.choice([0, 0, 0, 1, 1, 2]))]
    rng.shuffle(tools)
    if rng.random() < 0.25:
        for _, arguments in tools:
            rng.shuffle(arguments)
    return dict(tools) or dict(TOOLS)


@functools.cache
def pieces(letters: bool) -> list[str]:
    """What single tokens stand for, without blanks; or only those of letters."""
    vocabulary = json.loads((Path(__file__).resolve().parents[2] / "models" / "demo" / "tokenizer.json").read_text())["model"]["vocab"]
    texts = sorted({token.removeprefix("\u0120") for token in vocabulary if token.isascii() or token[0] == "\u0120"} - {""})
    return [text for text in texts if text.isascii() and (text.isalpha() or not letters)]


def word(rng: Random) -> str:
    """Made of syllables, or of any tokens: a token that was never copied is not copied well."""
    if rng.random() < 0.4:
        text = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3))) + rng.choice(["", "", "n", "r", "s", "l"])
    else:
        text = "".join(rng.choice(pieces(letters=True)) for _ in range(rng.choice([1, 1, 2, 2, 3])))
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text


def topic(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.30:
        return rng.choice([t for q in questions.QUESTIONS for t in q.topics])
    if draw < 0.45:
        return rng.choice(small_talk.UNKNOWN_THINGS + stories.CHARACTERS + stories.THINGS)
    if draw < 0.55:
        return "--" + "-".join(word(rng).lower() for _ in range(rng.randint(1, 3)))
    return rng.choice(["", "the ", "a "]) + " ".join(word(rng) for _ in range(rng.randint(1, 3)))


def scrap(rng: Random) -> str:
    """A word of any kind, so that copying does not lean on what usually follows."""
    draw = rng.random()
    if draw < 0.55:
        return word(rng)
    if draw < 0.65:
        return rng.choice(rng.choice(questions.QUESTIONS).answer.split())
    if draw < 0.75:
        return rng.choice(pieces(letters=False))
    if draw < 0.9:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-:/.") for _ in range(rng.randint(1, 7)))
    return rng.choice(["`{}`", "({})", "--{}", "\"{}\"", "{},", "{};", "{}é"]).format(text)


def document(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.15:
        return rng.choice(questions.QUESTIONS).answer
    if draw < 0.25:
        text = stories.told_without_request(rng).split(". ")
        return rng.choice(text).strip().rstrip(".").replace("\n", " ") + "."
    if draw < 0.45:
        return rng.choice(["The {x} of {y} is {n}.", "{x} {y} has {n} {z}.", "There are {n} {x} in {y}.", "In {n}, {x} built the {y} of {z}.",
                           "{x} means {y}, and {z} means {n}."]).format(x=word(rng), y=topic(rng), z=word(rng), n=rng.randrange(10 ** rng.randint(1, 5)))
    text = " ".join(scrap(rng) for _ in range(rng.randint(2, 18)))
    return text[0].upper() + text[1:] + rng.choice([".", ".", "", "!"])


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.3 else " ".join(word(rng).capitalize() for _ in range(rng.choice([1, 1, 1, 2])))


def time(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def as_result(rng: Random, name: str, text: str) -> str:
    """What tools print: mostly the bare result, at times JSON, where that needs no escapes."""
    written = text if name == "result" else json.dumps(text)
    return f'{{"{name}": {written}}}' if rng.random() < 0.12 and text in written else text


def numbers(rng: Random, held_out: bool = False) -> tuple[int, str, int]:
    """Two numbers and an operator beyond what the model computes itself, of one side of arithmetic's split."""
    while True:
        a, b = (rng.randrange(10 ** rng.choice([1, 2, 3, 3, 3, 4, 4])) for _ in range(2))
        op = rng.choice("+-**")
        if arithmetic.is_held_out(a, b) == held_out and (op == "*" or max(a, b) > arithmetic.LIMIT):
            return a, op, b


def ask_for(rng: Random, a: int, op: str, b: int) -> str:
    wordings = {"+": arithmetic.SUM_QUESTIONS, "-": arithmetic.DIFFERENCE_QUESTIONS, "*": PRODUCT_QUESTIONS}[op]
    return rng.choice(wordings).format(a=a, b=b)


def result(a: int, op: str, b: int) -> int:
    return a * b if op == "*" else arithmetic.result(a, op, b)


def calculation(rng: Random, problem: tuple[int, str, int], order: list[str], question: str | None = None) -> list[tuple[str, str]]:
    a, op, b = problem
    values = {"a": a, "op": op, "b": b}
    c = result(*problem)
    return [(question or ask_for(rng, *problem), call("calculator", {name: values[name] for name in order})),
            (response(as_result(rng, "result", str(c))), f"{a} {op} {b} = {c}.")]


def clock(rng: Random, cities: list[str]) -> list[tuple[str, str]]:
    """No city: the time here. Two cities: two calls at once."""
    wordings = [TIME_HERE, TIME_THERE, TIME_TWICE][len(cities)]
    question = rng.choice(wordings).format(c=cities[0] if cities else "", d=cities[-1] if cities else "")
    times = [time(rng) for _ in cities or [""]]
    where = " and ".join(f"{t} in {c}" for t, c in zip(times, cities)) or times[0]
    return [(question, "\n".join(call("clock", {"city": c}) for c in cities or ["here"])),
            (response(*(as_result(rng, "time", t) for t in times)), f"It is {where}.")]


def look_up(rng: Random, subject: str, text: str) -> list[tuple[str, str]]:
    return [(rng.choice(LOOK_UPS).format(t=subject), call("lookup", {"topic": subject})),
            (response(as_result(rng, "text", text)), f"The documents say: {text}")]


def random_task(rng: Random) -> tuple[str, list[tuple[str, str]], str]:
    """A tool's name, the turns of using it, and the answer where it is not offered."""
    draw = rng.random()
    if draw < 0.30:
        return "calculator", calculation(rng, numbers(rng), TOOLS["calculator"]), OUT_OF_RANGE
    if draw < 0.60:
        return "clock", clock(rng, [city(rng) for _ in range(rng.choice([0, 1, 1, 1, 2]))]), small_talk.UNKNOWN
    return "lookup", look_up(rng, topic(rng), document(rng)), small_talk.UNKNOWN


def failed(turns: list[tuple[str, str]], problem: str) -> list[tuple[str, str]]:
    """The same call, which ends with an error."""
    calls = turns[0][1].count("<tool_call>")
    return [turns[0], (response(*[f"error: {problem}"] * calls), f"That did not work: {problem}.")]


def in_order(turns: list[tuple[str, str]], order: list[str]) -> list[tuple[str, str]]:
    """A calculator's turns with the arguments in the order in which they are offered."""
    arguments = json.loads(turns[0][1].split("\n")[1])["arguments"]
    return [(turns[0][0], call("calculator", {name: arguments[name] for name in order})), *turns[1:]]


def random_turns(rng: Random, tools: dict[str, list[str]], seen: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """One question, and what follows until it is answered."""
    draw = rng.random()
    if draw < 0.10:
        return [arithmetic.question(rng, *arithmetic.random_problem(rng, seen))]
    if draw < 0.22:
        return [rng.choice([questions.random_question, small_talk.small_talk])(rng)]
    if draw < 0.27 and "calculator" in tools:
        problem = numbers(rng) if rng.random() < 0.5 else arithmetic.random_problem(rng, seen)
        a, op, b = problem
        return calculation(rng, problem, tools["calculator"], rng.choice(BY_CALCULATOR).format(a=a, op=op, b=b))
    name, turns, otherwise = random_task(rng)
    if name not in tools:
        return [(turns[0][0], otherwise)]
    if name == "calculator":
        turns = in_order(turns, tools[name])
    if rng.random() < 0.05:
        return failed(turns, rng.choice(WHAT_FAILED) if rng.random() < 0.7 else " ".join(word(rng) for _ in range(3)))
    return turns


def unaided(rng: Random) -> tuple[str, str]:
    """A question for a tool where none is offered."""
    _, turns, otherwise = random_task(rng)
    return turns[0][0], otherwise
