"""The 22 architectures of transformers that are to train in two stages, without a change to the model."""

import transformers

from architectures import language, perception
from zoo.case import Case, by_name

transformers.logging.set_verbosity_error()

CASES: dict[str, Case] = by_name(*language.CASES.values(), *perception.CASES.values())

__all__ = ["CASES"]
