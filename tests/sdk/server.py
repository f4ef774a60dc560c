"""nanovllm serve for the tests of this folder: `run(tests)` starts it on a free port and runs them."""
import asyncio
import inspect
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback

KEY = "secret"
QUESTION = "What is 37 + 45?"


class Server:
    def __init__(self, *arguments, preexec=None, environment=()):
        program, model = sys.argv[1:3]
        self.notes = []
        self.process = subprocess.Popen(
            [program, "serve", model, "--served-model-name", "demo", "--port", "0", "--device", "cpu", "--threads", "1",
             "--api-key", KEY, "--trust-remote-code", *arguments],
            stderr=subprocess.PIPE, text=True, preexec_fn=preexec, env={**os.environ, "NANOVLLM_HOST": "tcp://10.0.0.1:80", **dict(environment)})
        for line in self.process.stderr:
            self.notes.append(line)
            if match := re.search(r"serving demo on (\S+)", line):
                self.url = match[1]
                return
        raise RuntimeError("the server did not start:\n" + "".join(self.notes))

    def stop(self):
        self.process.terminate()
        _, rest = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, rest


def run(tests, *arguments):
    """Calls each function of `tests` whose name begins with "test", with a server; exits with 1 if one fails."""
    server = Server(*arguments)
    failed = 0
    for name, test in tests.items():
        if not name.startswith("test"):
            continue
        begin = time.monotonic()
        try:
            result = test(server)
            if inspect.isawaitable(result):
                asyncio.run(result)
            verdict = "passed"
        except Exception:
            traceback.print_exc()
            verdict, failed = "FAILED", failed + 1
        print(f"{verdict} {name} {time.monotonic() - begin:.2f} s", flush=True)
    server.stop()
    sys.exit(1 if failed else 0)


def has_grammars():
    """Whether the program can force structures and calls: its module is built where XGrammar's source could be had."""
    return (pathlib.Path(sys.argv[1]).parent / "libnanovllm-grammar.so").exists()


def calculate(a, op, b):
    """The calculator that models/demo knows."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
