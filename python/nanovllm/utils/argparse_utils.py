"""The parser of vLLM's scripts."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(ArgumentParser):
    """Options may be spelled with underscores: --max_model_len is --max-model-len."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(argument) for argument in given], namespace)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
