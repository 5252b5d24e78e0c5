"""Public bug reports about split training, rebuilt: each docstring tells the story of the issue that it names."""

from cases import structure, training
from zoo.case import Case, by_name

CASES: dict[str, Case] = by_name(*structure.CASES.values(), *training.CASES.values())

__all__ = ["CASES"]
