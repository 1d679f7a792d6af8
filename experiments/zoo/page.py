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
  'the config. Half of the held-out examples, every second batch, choose the '
  'rate with the least log loss, or the most recall. The other half gives all '
  'figures.',
  'Intervals in brackets are at 95 %, by Student t over seeds. "Minus" is the '
  'difference to the first model, paired by seed. Normalized entropy is the '
  'log loss over that of the share of clicks.',
  'Parameters and FLOPs are those of the dense layers, without rows. FLOPs are '
  'counted by XLA for an example, forward and backward. A step is one of '
  'training alone, without compiling and scoring. It includes rows.',
  'All figures are computed from zoo.csv beside this page.',
]


_WHOLE = 'whole Criteo Kaggle log, held out at random'
_100K = 'ml-100k, all movies ranked, '
_1M = 'ml-1m, 3 stars or more, 10 or more ratings of users and movies, the last'
PUBLISHED: dict[str, tuple[tuple[str, str, str, str], ...]] = {
  'criteo': (
    ('DeepFM', 'log loss 0.4508, AUC 0.8007', _WHOLE, 'arXiv 1703.04247'),
    ('NASRec', 'log loss 0.4399, AUC 0.8118', _WHOLE, 'arXiv 2207.07187'),
  ),
  'movielens': (
    ('BPR', 'recall 0.2368, NDCG 0.2768', f'{_100K}random', 'RecBole, README'),
    ('BPR', 'recall 0.2523, NDCG 0.2920', f'{_100K}random', 'RecBole, pages'),
    ('GRU4Rec', 'recall 0.1103, NDCG 0.0513', f'{_100K}last', 'RecBole, pages'),
    ('SASRec', 'recall 0.2468, NDCG 0.1286', _1M, 'RecBole, pages'),
  ),
}
"""Figures that others publish, by format of the data: model, figures, which
examples, and where."""


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
  choosing: float
  """Log loss, or recall at 10, of the half that chooses the rate."""
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
  sign = 1 if np.isnan(runs[0].recall) else -1
  chosen: dict[str, tuple[float, list[Run]]] = {}
  for cell in dict.fromkeys(Cell(run.model, run.rate) for run in runs):
    own = sorted((r for r in runs if r[:2] == cell), key=lambda run: run.seed)
    loss = sign * float(np.mean([run.choosing for run in own]))
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
        (f'{title} of the half that chooses', 'choosing'),
        (f'{title} of the other half', main),
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
      *_published(data),
      page.Section('How to read this', [_NOTES]),
    ],
    'SYNTHETIC DATA: its figures say nothing about real clicks.'
    if data.bayes_auc is not None
    else '',
    about,
  )
  short = ('model', 'rate', *_qualities(runs[0]), 'FLOPs', 'ms a step')
  return [{name: row[name] for name in short} for row in rows]


def _published(data: Dataset) -> list[page.Section]:
  """Returns a section of published figures for such data, if there are any."""
  names = 'model', 'figures', 'examples', 'source'
  rows = [
    dict(zip(names, row, strict=True)) for row in PUBLISHED.get(data.format, ())
  ]
  said = (
    'Figures that others publish for data of this format. Only those of the'
    ' same examples, held out alike, can be compared with the ones above.'
  )
  return [page.Section('Published', [said, page.Table('', rows)])][: len(rows)]


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
