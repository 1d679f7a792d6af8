"""Results of `Trainer.train`, and a picture of them."""

import os
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.engine.clock import Payoff
from slipstream_jax.engine.counters import Counters
from slipstream_jax.errors import UserError
from slipstream_jax.selection.gain import APART, VERDICTS
from slipstream_jax.training.metrics import Metrics

SHORT = 0.02
"""Share by which what is left out may be below what was asked, unsaid."""
_SMOOTHED = 200  # points of the curve of the loss


class Validation(NamedTuple):
  """Results of one validation."""

  step: int
  """Steps taken since the start of training."""
  metrics: Metrics
  """Metrics of the held-out examples, as `Trainer.evaluate` returns them."""
  best: bool
  """Whether the watched metric was better than in all validations before."""
  seconds: float
  """Time that it took."""


class History(NamedTuple):
  """Results of `Trainer.train`."""

  losses: Float[np.ndarray, ' steps']
  """Weighted mean loss of each step's batch, f32."""
  counters: Counters
  """Totals since the start of training."""
  events: tuple[dict[str, Any], ...]
  """Decisions of the schedule, in order."""
  payoff: Payoff | None = None
  """Whether leaving examples out saves time. None if that was not measured,
  which takes up to 100 steps after some were left out."""
  steps: Int[np.ndarray, ' steps'] = np.empty(0, np.int64)
  """The steps of the losses, counted since the start of training, i64."""
  validations: tuple[Validation, ...] = ()
  """The validations, in order."""
  asked: float | None = None
  """Share of all examples that `Skip.drop` asks to leave out. None if there is
  no such target."""

  def __repr__(self) -> str:
    parts = [f'{len(self.losses):,} steps']
    if len(self.losses):
      parts.append(f'loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}')
    parts += self.skipping_in_words()
    if self.validations:
      parts.append(f'{len(self.validations)} validations')
    if self.best is not None:
      parts.append(f'the best after step {self.best.step:,}')
    return f'History({", ".join(parts)})'

  def skipping_in_words(self) -> list[str]:
    """Returns what was left out, and what speaks against it; [] if nothing."""
    left_out, seen = self.counters.examples_dropped, self.counters.examples_seen
    if not (left_out or self.asked):
      return []
    words = [f'{left_out:,} of {seen:,} examples left out']
    if self.asked and left_out < (self.asked - SHORT) * seen:
      words[0] += f', fewer than the {self.asked:.0%} asked for'
    if self.choosing is not None:
      words.append(f'does choosing pay? {self.choosing}')
    return words

  @property
  def choosing(self) -> str | None:
    """Whether choosing examples by scores pays: yes, no or unknown, and why.

    By the last report of the scorer in these events, and the last validation.
    None: there was no report.
    """
    reports = [event for event in self.events if 'verdict' in event]
    if not reports:
      return None
    last = self.validations[-1:]  # none, or one
    of_model = [numbers_of(one.metrics).get('log_loss') for one in last]
    losses = reports[-1]['scorer_log_loss'], *of_model
    return pays_in_words(reports[-1]['verdict'], self.payoff, *losses)

  @property
  def best(self) -> Validation | None:
    """The best validation. None if there was none with a number."""
    return next((one for one in self.validations[::-1] if one.best), None)

  def curve(self, metric: str) -> Float[np.ndarray, ' validations']:
    """Returns a metric of each validation by its name, NaN where it is None.

    Raises:
      UserError: the metrics have no such number.
    """
    known = self._metrics()
    if metric not in known:
      raise UserError(
        'a curve must be of a metric that the validations have',
        got=repr(metric),
        where='History.curve, metric',
        hint=f'use one of {", ".join(known)}' if known else 'validate first',
      )
    values = [numbers_of(v.metrics).get(metric) for v in self.validations]
    return np.array(values, np.float64)

  def _metrics(self) -> list[str]:
    """Returns the names of the metrics of all validations."""
    numbers = (numbers_of(one.metrics) for one in self.validations)
    return [*dict.fromkeys(name for some in numbers for name in some)]

  def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
    """Draws the loss, and the metrics of the validations below it.

    Args:
      path: of a picture to write, such as 'run.png'. None: none.

    Returns:
      The figure of matplotlib. A notebook shows it.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
      from matplotlib.figure import Figure
    except ImportError as error:
      raise UserError(
        'a plot needs matplotlib',
        got=error,
        where='History.plot',
        hint="install it with pip install 'slipstream_jax[fit]'",
      ) from error
    others = [name for name in self._metrics() if name != 'log_loss'][:3]
    figure = Figure(
      figsize=(7, 3.2 + 1.6 * len(others)), layout='constrained', dpi=120
    )
    ratios = [2.4] + [1.0] * len(others)
    plots = figure.subplots(
      len(ratios), sharex=True, squeeze=False, height_ratios=ratios
    )[:, 0]
    self._draw_losses(plots[0])
    for plot, name in zip(plots[1:], others, strict=True):
      self._draw_metric(plot, name)
      plot.set_ylabel(name.replace('_', '\n'))
    for plot in plots:
      plot.spines[['top', 'right']].set_visible(False)
      plot.grid(alpha=0.25)
    plots[-1].set_xlabel('step')
    if path is not None:
      figure.savefig(path)
    return figure

  def _draw_losses(self, plot: Any) -> None:
    """Draws each loss, their moving mean, and the log loss of validations."""
    plot.set_ylabel('loss')
    if not len(self.losses):
      return
    width = max(1, len(self.losses) // _SMOOTHED)
    if width > 1:
      plot.plot(self.steps, self.losses, color='tab:blue', alpha=0.2, lw=0.8)
    means = np.convolve(self.losses, np.ones(width) / width, 'valid')
    name = f'training, mean of {width} steps' if width > 1 else 'training'
    plot.plot(self.steps[width - 1 :], means, color='tab:blue', label=name)
    # The first steps and a few single ones would set the scale.
    seen = [*np.percentile(means, [0, 98])]
    if 'log_loss' in self._metrics():
      self._draw_metric(plot, 'log_loss')
      seen += [*self.curve('log_loss')]
    low, high = np.nanmin(seen), np.nanmax(seen)
    margin = 0.08 * (high - low) or 0.1
    if np.isfinite(margin):
      plot.set_ylim(low - margin, high + margin)
    plot.legend(frameon=False)

  def _draw_metric(self, plot: Any, name: str) -> None:
    """Draws a metric of the validations, and a line at the best one."""
    steps = [one.step for one in self.validations]
    how = {'color': 'tab:orange', 'marker': 'o', 'ms': 3}
    plot.plot(steps, self.curve(name), label='validation', **how)
    if self.best is not None:
      label = f'best, step {self.best.step:,}'
      plot.axvline(self.best.step, color='0.5', lw=0.8, ls='--', label=label)


def pays_in_words(
  verdict: int,
  payoff: Payoff | None,
  scorer: float | None = None,
  model: float | None = None,
) -> str:
  """Returns whether choosing by scores pays: yes, no or unknown, and why.

  Args:
    verdict: a place in `VERDICTS`.
    payoff: whether it saves time. None: that was not measured.
    scorer: log loss of the scores, before their labels were learned from.
    model: log loss of the model on held-out examples. None: not known.
  """
  if verdict == 3:
    return f'unknown, as there were {VERDICTS[verdict]}'
  if verdict:
    return f'no, {VERDICTS[verdict]}'
  if payoff is not None and not payoff.pays:
    return f'no, {cost_in_words(payoff)}'
  if scorer and model and max(scorer / model, model / scorer) > APART:
    losses = f'(log loss {scorer:.4f}, and {model:.4f} of the model)'
    far, hint = 'worse', 'what they call easy may still teach it'
    if model > scorer:
      far, hint = 'better', 'train it better first'
    return (
      f'unknown, because the scores are far {far} than the model {losses}: '
      f'{hint}'
    )
  if payoff is None:
    return (
      'unknown, because it was not measured whether that saves time: the run '
      'was too short, the model is the scorer, or an accelerator takes smaller '
      'steps'
    )
  return 'yes, the scores tell what teaches little, and it saves time'


def cost_in_words(payoff: Payoff) -> str:
  """Returns that skipping costs more time than it saves."""
  needed = payoff.step_ms_to_pay
  if needed is None:
    why = 'choosing takes the cores that the steps need, as they run on the CPU'
  else:
    why = (
      f'it pays where a step takes the device more than {needed:.3g} ms, and '
      f'here it takes {payoff.step_ms:.3g} ms'
    )
  return (
    f'leaving out {payoff.left_out:.0%} of the examples costs more time than '
    f'it saves: {why}'
  )


def numbers_of(metrics: Metrics) -> dict[str, float]:
  """Returns the metrics that have a value, by name."""
  values = metrics.values.items()
  return {name: float(value) for name, value in values if value is not None}
