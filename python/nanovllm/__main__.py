"""`python -m nanovllm` and the script `nanovllm`: the program, which the package brings."""

from __future__ import annotations

import os
import sys


def main() -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nanovllm")
    os.execv(program, ["nanovllm", *sys.argv[1:]])


if __name__ == "__main__":
    main()
