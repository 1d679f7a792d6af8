"""How figures are written."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.common.report import size
from experiments.pages.estimates import Estimate

NONE = '-'
"""What stands where nothing is known."""
Form = Callable[[float], str]


def number(value: float | None, form: str = '{:,.3g}') -> str:
  """A number, or that it is not known."""
  return NONE if value is None else form.format(value)


def times(value: float) -> str:
  """How many times as much."""
  return f'{value:.2f}' if value < 99.5 else f'{value:,.3g}'


def amount(value: float) -> str:
  """Bytes per example."""
  return f'{value:,.0f}' if value >= 99.5 else f'{value:.3g}'


def share(value: float) -> str:
  """A part of a whole."""
  return f'{value:.1%}'


def quality(value: float) -> str:
  """AUC and log loss."""
  return f'{value:.4f}'


def change(value: float) -> str:
  """A small difference, with its sign; of the last digit, none is 0."""
  return f'{value:+.4f}'.replace('-0.0000', '+0.0000')


def bytes_of(value: float | None) -> str:
  """Bytes in the largest unit below them."""
  return NONE if value is None else size(value)


def middle(estimate: Estimate | None, form: Form) -> str:
  """The mean alone."""
  return NONE if estimate is None else form(estimate.mean)


def interval(estimate: Estimate | None, form: Form) -> str:
  """The interval alone."""
  if estimate is None or estimate.low is None or estimate.high is None:
    return NONE
  return f'{form(estimate.low)} to {form(estimate.high)}'


def joined(texts: Sequence[Any]) -> str:
  """A list within a sentence."""
  words = [str(text) for text in texts]
  if len(words) < 2:
    return ''.join(words)
  return f'{", ".join(words[:-1])} and {words[-1]}'
