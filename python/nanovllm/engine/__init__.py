"""Modules at the places where vLLM's scripts import them from."""
