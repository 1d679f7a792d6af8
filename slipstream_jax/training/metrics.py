"""Metrics of predictions, computed in float64.

A metric is a function of the labels and logits of n examples, f64[n] both, to a
number. A `MeanMetric` is known by means over examples. Where all metrics of an
evaluation are, only exact sums are kept, so any cut of the examples gives the
same bits. Otherwise all scores are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import choose, UserError

Metric = Callable[
  [Float[np.ndarray, ' n'], Float[np.ndarray, ' n']], float | None
]
"""Maps labels and logits, f64[n] both, to a number, or to None where the labels
do not define it. Its name is that of the function."""

_RESERVED = 'examples', 'heads', 'values'


class Predictions(NamedTuple):
  """Labels and logits of scored examples, which is all that metrics need."""

  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T'] | None
  """1.0 for a click, else 0.0, or any number that logits predict; [n, T] of T
  heads. None if an example has no label."""
  logits: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  """Log odds of a click, or predicted labels."""


@dataclasses.dataclass(frozen=True, repr=False)
class Metrics:
  """Quality of predictions. Each metric is an attribute: `metrics.auc`.

  Attributes:
    examples: examples scored.
    values: metrics by name. None where the labels do not define a metric.
    heads: metrics of each head, where the model has several. `values` are then
      means over heads of the metrics that all heads have, or None where that of
      a head is None.
  """

  examples: int
  values: Mapping[str, float | None]
  heads: tuple['Metrics', ...] = ()

  def __getattr__(self, name: str) -> Any:
    values = self.__dict__.get('values', {})
    if name not in values:
      raise AttributeError(
        f'metrics must be one of {", ".join(values)}, got {name!r}; give it to'
        ' Trainer(..., metrics=[...])'
      )
    return values[name]

  def __dir__(self) -> Iterable[str]:
    return [*super().__dir__(), *self.values]

  def __repr__(self) -> str:
    figures = {'examples': self.examples, **self.values}
    text = ', '.join(f'{name}={value!r}' for name, value in figures.items())
    heads = f', heads={self.heads}' if self.heads else ''
    return f'Metrics({text}{heads})'

  def _asdict(self) -> dict[str, Any]:
    """Returns all figures by name, 'examples' first and 'heads' last."""
    return {'examples': self.examples, **self.values, 'heads': self.heads}


@dataclasses.dataclass(frozen=True)
class MeanMetric:
  """A metric that means over examples define.

  >>> import slipstream_jax as slip
  >>> bias = slip.MeanMetric('bias', lambda y, z: [z - y], lambda mean: mean)
  >>> float(bias(np.array([1.0, 2.0]), np.array([1.5, 2.5])))
  0.5
  """

  name: str
  terms: Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]
  value: Callable[..., float | None]

  def __call__(self, labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Returns the metric of examples, at least one."""
    return self.value(*(float(np.mean(t)) for t in self.terms(labels, logits)))


def _losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
  # From logits, because the logarithm of a probability of 0 is infinite.
  return np.logaddexp(0.0, logits) - labels * logits


def _normalized(log_loss: float, rate: float) -> float | None:
  if not 0.0 < rate < 1.0:
    return None
  entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
  return float(log_loss / entropy)


def auc(
  labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
) -> float | None:
  """Returns the area under the ROC curve; ties count one half (Mann-Whitney).

  Labels above 0.5 are clicks. It is None if one class is absent, and NaN if a
  score is NaN.
  """
  clicks = labels > 0.5
  positive = float(np.count_nonzero(clicks))
  negative = len(labels) - positive
  if not (positive and negative):
    return None
  if np.isnan(scores).any():
    return math.nan
  _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
  # Equal scores share the mean of their ranks, which count from 1.
  ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
  above = ranks[clicks].sum() - positive * (positive + 1) / 2
  return float(above / (positive * negative))


log_loss = MeanMetric('log_loss', lambda y, z: [_losses(y, z)], float)
"""Mean cross entropy in nats."""
normalized_entropy = MeanMetric(
  'normalized_entropy', lambda y, z: [_losses(y, z), y], _normalized
)
"""Log loss divided by the log loss of the base rate (He et al., 2014). None if
one class is absent."""
accuracy = MeanMetric('accuracy', lambda y, z: [(z > 0) == (y > 0.5)], float)
"""Share of examples on the right side of probability 0.5."""
calibration = MeanMetric(
  'calibration',
  lambda y, z: [probabilities(z), y],
  lambda mean, rate: mean / rate if rate > 0 else None,
)
"""Mean predicted probability over the share of clicks; 1 is ideal. None without
a click."""
rmse = MeanMetric('rmse', lambda y, z: [(z - y) ** 2], math.sqrt)
"""Root of the mean squared difference of logits and labels, in their unit."""
mae = MeanMetric('mae', lambda y, z: [abs(z - y)], float)
"""Mean absolute difference of logits and labels, in their unit."""

CLICKS = auc, log_loss, normalized_entropy, accuracy, calibration
"""Metrics of a loss of clicks, such as `optax.sigmoid_binary_cross_entropy`."""
NUMBERS = rmse, mae
"""Metrics of a loss that compares logits with labels: `optax.squared_error`."""


def name_of(metric: Metric) -> str:
  """Returns the name of a metric in `Metrics`."""
  if isinstance(metric, MeanMetric):
    return metric.name
  return getattr(metric, '__name__', '')


METRICS: dict[str, Metric] = {name_of(m): m for m in (*CLICKS, *NUMBERS)}
"""All metrics of the library by name."""


def check_metrics(metrics: object, where: str) -> tuple[Metric, ...] | None:
  """Returns a user's metrics, or None if there are none to check.

  Args:
    metrics: a list of functions, of `MeanMetric` or of names in `METRICS`.
    where: 'function, argument'.

  Raises:
    UserError: it is something else, or a metric has no name of its own.
  """
  if metrics is None:
    return None
  if not isinstance(metrics, list | tuple):
    raise UserError(
      'metrics must be a list of functions of labels and logits',
      got=repr(metrics),
      where=where,
      hint='give one such as [slip.auc, my_metric], or leave it out',
    )
  chosen = tuple(
    choose(METRICS, one, where, 'or a function of labels and logits')
    if not callable(one)
    else one
    for one in metrics
  )
  names = [name_of(metric) for metric in chosen]
  for name, metric in zip(names, metrics, strict=True):
    own = isinstance(name, str) and name.isidentifier()
    if not own or name in _RESERVED or names.count(name) > 1:
      raise UserError(
        'a metric must have a name of its own, which is an attribute of the'
        ' results',
        got=repr(name) if isinstance(name, str) else repr(metric),
        where=where,
        hint='define it with def, under another name',
      )
  return chosen


_WATCHED = {'log_loss': 1, 'rmse': 1, 'mae': 1, 'auc': -1, 'accuracy': -1}
"""Metrics that early stopping can watch, and the sign that makes less better.
The first one that there is counts."""


def watched(metrics: Metrics) -> float:
  """Returns the number that early stopping wants to be low, or NaN.

  It is of `METRICS`, or the sum over heads that have no metric in common.
  """
  for name, sign in _WATCHED.items():
    if name in metrics.values:
      value = metrics.values[name]
      return math.nan if value is None else sign * value
  return sum(map(watched, metrics.heads)) if metrics.heads else math.nan


def check_watched(chosen: Sequence[Metric] | None) -> None:
  """Checks that early stopping can watch one of a user's metrics.

  Raises:
    UserError: none of them says which of two values is better.
  """
  if chosen is not None and not {*map(name_of, chosen)} & {*_WATCHED}:
    raise UserError(
      f'patience watches one of the metrics {", ".join(_WATCHED)}',
      got=', '.join(map(name_of, chosen)) or 'no metrics',
      where='Trainer, metrics',
      hint='add one, such as slip.rmse, or give monitor',
    )


def merge(parts: list[Predictions]) -> Predictions:
  """Concatenates predictions."""
  nothing = np.empty(0, np.float32)
  labels, logits = zip(*(parts or [Predictions(nothing, nothing)]), strict=True)
  known = all(part is not None for part in labels)
  return Predictions(
    np.concatenate(labels) if known else None, np.concatenate(logits)
  )


def compute(
  predictions: Predictions, chosen: Sequence[Sequence[Metric]] = (CLICKS,)
) -> Metrics:
  """Computes the metrics of at least one scored example.

  Args:
    predictions: with labels.
    chosen: metrics of each head, or of all.

  Raises:
    UserError: there is no example, or one has no label, or a user's metric is
      no number.
  """
  tally = Tally(chosen)
  tally.add(predictions)
  return tally.metrics()


class Tally:
  """Merges predictions part by part, and computes their metrics."""

  def __init__(self, chosen: Sequence[Sequence[Metric]] = (CLICKS,)) -> None:
    """Has no examples. The metrics are as in `compute`."""
    self._chosen, self._examples = chosen, 0
    self._heads: list[_HeadTally] = []
    self._one_head = True

  def add(self, part: Predictions) -> None:
    """Adds examples.

    Raises:
      UserError: they have no labels.
    """
    if part.labels is None:
      raise UserError(
        'metrics compare predictions with labels',
        got='examples without labels',
        where='evaluate, source',
        hint='give labels, or only predict',
      )
    self._examples += len(part.logits)
    self._one_head = part.logits.ndim == 1
    columns = (
      [part]
      if self._one_head
      else [*zip(part.labels.T, part.logits.T, strict=True)]
    )
    if not self._heads:
      of_all = len(self._chosen) == 1
      chosen = [*self._chosen] * (len(columns) if of_all else 1)
      self._heads = [_HeadTally(metrics) for metrics in chosen]
    for head, (labels, logits) in zip(self._heads, columns, strict=True):
      head.add(labels, logits)

  def metrics(self) -> Metrics:
    """Returns the metrics of all examples that were added.

    Raises:
      UserError: there is none, or a user's metric is no number.
    """
    count = self._examples
    if not count:
      raise UserError(
        'metrics need at least one scored example',
        got='none',
        where='evaluate, source',
        hint='give a source that has not ended, with examples of some weight',
      )
    with np.errstate(invalid='ignore'):  # a model that diverged gives NaN
      heads = tuple(Metrics(count, one.values(count)) for one in self._heads)
    if self._one_head:
      return heads[0]
    shared = [
      name for name in heads[0].values if all(name in h.values for h in heads)
    ]
    means = {
      name: _mean_over_heads([h.values[name] for h in heads]) for name in shared
    }
    return Metrics(count, means, heads)


class _HeadTally:
  """Scores of one head, or the exact sums that all its metrics need."""

  def __init__(self, metrics: Sequence[Metric]) -> None:
    self._metrics = metrics
    self._scores: list[tuple[np.ndarray, np.ndarray]] = []
    means = [one for one in metrics if isinstance(one, MeanMetric)]
    self._means = means if len(means) == len(metrics) else None
    self._sums: dict[tuple[str, int], list[float]] = {}

  def add(self, labels: np.ndarray, logits: np.ndarray) -> None:
    if self._means is None:
      self._scores.append((labels, logits))
      return
    given = labels.astype(np.float64), logits.astype(np.float64)
    for metric in self._means:
      for number, term in enumerate(metric.terms(*given)):
        key = metric.name, number
        values = np.asarray(term, np.float64)
        self._sums[key] = exact_sum(self._sums.get(key, []), values)

  def values(self, count: int) -> dict[str, float | None]:
    if self._means is None:
      columns = zip(*self._scores, strict=True)
      given = [np.concatenate(c).astype(np.float64) for c in columns]
      return {name_of(m): _number(m, m(*given)) for m in self._metrics}
    means: dict[str, list[float]] = {}
    for (name, _), total in self._sums.items():
      means.setdefault(name, []).append(math.fsum(total) / count)
    return {m.name: _number(m, m.value(*means[m.name])) for m in self._means}


def exact_sum(
  before: Sequence[float], values: Float[np.ndarray, ' n']
) -> list[float]:
  """Returns a few numbers whose sum is exactly that of all the numbers given.

  `math.fsum` of them is the sum, rounded once, whatever the order was. If one
  is not finite, neither is the sum.
  """
  rest, total = [*before, *values.tolist()], list[float]()
  if not np.isfinite(rest).all():
    return [float(np.sum(rest))]
  while part := math.fsum(rest):  # rounded, so something may remain
    total.append(part)
    rest.append(-part)
  return total


def _mean_over_heads(values: Sequence[float | None]) -> float | None:
  numbers = [value for value in values if value is not None]
  return float(np.mean(numbers)) if len(numbers) == len(values) else None


def _number(metric: Metric, value: Any) -> float | None:
  """Returns the value of a metric as a number."""
  if value is None:
    return None
  if np.ndim(value) or not isinstance(np.asarray(value).item(), int | float):
    raise UserError(
      f'metric {name_of(metric)} must return a number, or None',
      got=repr(value),
      where='Trainer, metrics',
      hint='return one for all examples, such as their mean',
    )
  return float(value)


def probabilities(logits: Float[np.ndarray, '...']) -> Float[np.ndarray, '...']:
  """Returns probabilities of clicks, with the shape and dtype of the logits."""
  # 1 / (1 + e^-x) in a form that no logit makes overflow.
  return np.exp(-np.logaddexp(0.0, -logits))
