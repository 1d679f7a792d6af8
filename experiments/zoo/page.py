"""The page on a zoo: one table, one picture, and how both were made."""

from collections.abc import Sequence
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments.common import page
from experiments.common.estimates import (
  change,
  Estimate,
  mean,
  middle,
  quality,
  sure,
)
from slipstream_jax.data.source import Dataset

HTML = 'zoo.html'
_NOTES = [
  'All models have the same data, order of examples, number of steps, and '
  'widths of the MLPs below and above the interaction. They do not have the '
  'same number of parameters or FLOPs, which the table has.',
  'Each model was trained with each rate, a factor on the learning rates of '
  'the config. The rate with the lowest mean loss in training, over the last '
  'fifth of the steps, is shown. Held-out examples chose nothing.',
  'Intervals in brackets are at 95 %, by Student t over seeds. "Minus" is the '
  'difference to the first model, paired by seed. Normalized entropy is the '
  'log loss over that of the share of clicks.',
  'Parameters and FLOPs are those of the dense layers, without rows. FLOPs are '
  'counted by XLA for an example, forward and backward. A step is one of '
  'training alone, without compiling and scoring. It includes rows.',
  'All figures are computed from zoo.csv beside this page.',
]


class Cell(NamedTuple):
  """A model with a rate, which is trained once for every seed."""

  model: str
  rate: float
  """Factor on the learning rates of the config."""


class Run(NamedTuple):
  """A finished run: one line of zoo.csv."""

  model: str
  rate: float
  seed: int
  steps: int
  batch_size: int
  seconds: float
  """Seconds of training alone, without compiling."""
  last_loss: float
  """Mean loss of the last fifth of the steps, each before it is taken."""
  log_loss: float
  normalized_entropy: float
  auc: float
  parameters: int
  flops: float
  recall: float = math.nan
  """Recall at 10. NaN of a model that does not rank."""
  ndcg: float = math.nan


_CLICKS = {
  'log loss': 'log_loss',
  'normalized entropy': 'normalized_entropy',
  'AUC': 'auc',
}
_RANKS = {'recall at 10': 'recall', 'NDCG at 10': 'ndcg'}


def _qualities(run: Run) -> dict[str, str]:
  """Returns the fields that say how good a run is, the main one first."""
  return _CLICKS if np.isnan(run.recall) else _RANKS


def quality_of(run: Run) -> str:
  """Returns the main figure of a run with its name."""
  title, field = next(iter(_qualities(run).items()))
  return f'{title} {quality(getattr(run, field))}'


def best(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Returns each model's runs with its best rate, in the order of seeds."""
  chosen: dict[str, tuple[float, list[Run]]] = {}
  for cell in dict.fromkeys(Cell(run.model, run.rate) for run in runs):
    own = sorted((r for r in runs if r[:2] == cell), key=lambda run: run.seed)
    loss = float(np.mean([run.last_loss for run in own]))
    if cell.model not in chosen or loss < chosen[cell.model][0]:
      chosen[cell.model] = loss, own
  return {model: own for model, (_, own) in chosen.items()}


def figures(runs: Sequence[Run]) -> list[dict[str, str]]:
  """Returns a row of figures for each model with its best rate, as text."""
  chosen = best(runs)
  first, *_ = chosen
  (title, main), *others = _qualities(runs[0]).items()
  control = {run.seed: getattr(run, main) for run in chosen[first]}
  rows = []
  for model, own in chosen.items():
    less = [
      getattr(run, main) - control[run.seed]
      for run in own
      if run.seed in control
    ]
    step = mean([1000 * run.seconds / run.steps for run in own])
    speed = mean([run.steps * run.batch_size / run.seconds for run in own])
    rows.append(
      {
        'model': model,
        'rate': f'{own[0].rate:g}',
        title: sure(_mean(own, main), quality),
        f'minus {first}': '-' if model == first else sure(mean(less), change),
        **{name: middle(_mean(own, x), quality) for name, x in others},
        'parameters': f'{own[0].parameters:,}',
        'FLOPs': f'{own[0].flops:,.0f}',
        'ms a step': sure(step, '{:.2f}'.format),
        'examples/s': middle(speed, '{:,.0f}'.format),
        'seeds': str(len(own)),
      }
    )
  return rows


def _mean(runs: Sequence[Run], field: str) -> Estimate | None:
  return mean([getattr(run, field) for run in runs])


def write_page(
  folder: pathlib.Path, data: Dataset, runs: Sequence[Run], about: str
) -> list[dict[str, str]]:
  """Writes the page, and returns its most important figures.

  Args:
    folder: where to write.
    data: the data set of the first seed.
    runs: the finished runs.
    about: what was run, where and when.
  """
  rows, steps = figures(runs), runs[0].steps
  title, main = next(iter(_qualities(runs[0]).items()))
  facts = f'{steps:,} steps of {runs[0].batch_size} examples.'
  if data.bayes_log_loss is not None:
    facts += (
      f' The best possible log loss is {data.bayes_log_loss:.4f}, and the best'
      f' AUC {data.bayes_auc:.4f}, both of the first seed.'
    )
  by_rate = [
    {'model': c.model, 'rate': f'{c.rate:g}'}
    | {
      name: sure(_mean([r for r in runs if r[:2] == c], field), quality)
      for name, field in (
        ('loss in training', 'last_loss'),
        (f'{title} of held-out examples', main),
      )
    }
    for c in dict.fromkeys(Cell(run.model, run.rate) for run in runs)
  ]
  page.write(
    folder / HTML,
    f'A zoo on {data.name}',
    [
      page.Section(
        'Models', [facts, page.Table('', rows), _picture(runs, data)]
      ),
      page.Section('All rates', [page.Table('', by_rate)]),
      page.Section('How to read this', [_NOTES]),
    ],
    'SYNTHETIC DATA: its figures say nothing about real clicks.'
    if data.bayes_auc is not None
    else '',
    about,
  )
  short = ('model', 'rate', *_qualities(runs[0]), 'FLOPs', 'ms a step')
  return [{name: row[name] for name in short} for row in rows]


def _picture(runs: Sequence[Run], data: Dataset) -> page.Picture:
  """Draws the main figure of each model, of all seeds."""
  chosen = best(runs)
  title, main = next(iter(_qualities(runs[0]).items()))
  drawing, (axis,) = page.figure(height=0.5 + 0.35 * len(chosen))
  for number, own in enumerate(chosen.values()):
    values: Any = [getattr(run, main) for run in own]
    axis.plot(values, [number] * len(own), '|', color=page.color('muted'))
    axis.plot(np.mean(values), number, 'o', color=page.color(number))
  axis.set_yticks(range(len(chosen)), [*chosen])
  axis.set_ylim(len(chosen) - 0.5, -0.5)
  axis.set_xlabel(f'{title} of held-out examples')
  if data.bayes_log_loss is not None:
    axis.axvline(data.bayes_log_loss, color=page.color('ink'), linestyle='--')
  about = 'A point is the mean over seeds, and a stroke is one seed.'
  if data.bayes_log_loss is not None:
    about += ' The dashed line is the best possible, of the first seed.'
  return page.Picture(title, drawing, about)
