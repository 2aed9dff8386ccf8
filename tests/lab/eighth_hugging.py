"""Stub."""

from tests.lab.fault import Fault

__all__ = ["EIGHTH_HUGGING"]

EIGHTH_HUGGING: list[Fault] = []
