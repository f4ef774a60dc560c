"""A module at the place where vLLM's scripts import it from."""

from nanovllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
