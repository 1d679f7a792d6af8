"""The page on a search: its best nets, their costs, and how both were made."""

from collections.abc import Sequence
import json
import math
import pathlib
from typing import NamedTuple

from experiments.common import page
from experiments.common.estimates import (
  change,
  mean,
  middle,
  NONE,
  quality,
  ratio,
  sure,
  times,
)
from slipstream_jax.data.source import Dataset

HTML = 'search.html'
OWN, SUPERNET, FOUND, RANDOM = 'own', 'supernet', 'found', 'random'
"""Kinds of trials: the config's own model, a supernet, a net that was sampled
from one, and a random net."""
WORDS = 'kind', 'what'


class Trial(NamedTuple):
  """A finished training: one line of search.csv."""

  seed: int
  kind: str
  price: float
  """Price of the supernet, or of the one that the net is from."""
  number: int
  what: str
  """The net, or a supernet's logits, in JSON."""
  seconds: float
  """Seconds of training alone, without compiling."""
  choosing: float = math.nan
  """Log loss of the half that chooses a net."""
  log_loss: float = math.nan
  """Log loss of the other half."""
  auc: float = math.nan
  flops: float = math.nan
  """FLOPs of an example, forward, without rows."""
  elements: float = math.nan
  """Elements of all tables."""

  @property
  def key(self) -> tuple[int, str, float, int]:
    """The trial's seed, kind, price and number, which name it."""
    return self.seed, self.kind, self.price, self.number


_NOTES = [
  'All nets have the same data, order of examples, number of steps and rates. '
  'A net is chosen by its log loss on every second batch of the held-out '
  'examples, among those within the budget. The other batches give all '
  'figures.',
  'Intervals in brackets are at 95 %, by Student t over seeds. "Own" is the '
  'model of the config. "Minus own" is the difference to it, paired by seed. '
  'FLOPs are those of a forward pass without rows, elements those of all '
  'tables. Both are divided by those of the own model, and are geometric '
  'means over seeds.',
  'Costs are seconds of training, without compiling and scoring, divided by '
  'those of the own model. Random nets were trained until they had cost as '
  'much as all supernets and their nets.',
  'All figures are computed from search.csv beside this page.',
]


def in_words(trial: Trial) -> str:
  """Returns a line about a finished trial."""
  head = f'seed {trial.seed}  {trial.kind}'
  if trial.kind == SUPERNET:
    return f'{head} at price {trial.price:g}: {trial.seconds:.1f} s'
  return (
    f'{head} net {trial.number + 1}: log loss {quality(trial.log_loss)},'
    f' {trial.flops:,.0f} FLOPs, {net_in_words(trial)}'
  )


def net_in_words(trial: Trial) -> str:
  """Returns the widths, the interaction and the dims of a net."""
  net = json.loads(trial.what)
  below, above = ('-'.join(map(str, net[key])) for key in ('bottom', 'top'))
  dims = ' '.join(map(str, net['dims']))
  return f'bottom {below}, {net["interaction"]}, top {above}, dims {dims}'


def best(trials: Sequence[Trial], budget: float) -> dict[str, Trial]:
  """Returns the best net of each kind, by the half that chooses, of one seed.

  Args:
    trials: the trials of the seed.
    budget: most FLOPs of a net, as a multiple of those of the own model.
  """
  chosen = {one.kind: one for one in trials if one.kind == OWN}
  for trial in trials:
    is_net = trial.kind in (FOUND, RANDOM)
    if is_net and trial.flops <= budget * chosen[OWN].flops:
      kept = chosen.setdefault(trial.kind, trial)
      if trial.choosing < kept.choosing:
        chosen[trial.kind] = trial
  return chosen


class _Beside(NamedTuple):
  """Nets of several seeds, each beside the own model of its seed."""

  nets: list[Trial]
  own: list[Trial]

  def row(self) -> dict[str, str]:
    """Returns figures over the seeds, as text."""
    pairs = list(zip(self.nets, self.own, strict=True))
    less = mean([net.log_loss - own.log_loss for net, own in pairs])
    row = {'log loss': sure(mean([net.log_loss for net in self.nets]), quality)}
    row['minus own'] = sure(less, change)
    for name in ('flops', 'elements'):
      tops, bottoms = (
        [getattr(pair[side], name) for pair in pairs] for side in (0, 1)
      )
      title = {'flops': 'FLOPs'}.get(name, name)
      row[f'{title} of own'] = middle(ratio(tops, bottoms), times)
    return row


def _by_seed(trials: Sequence[Trial]) -> dict[int, list[Trial]]:
  seeds: dict[int, list[Trial]] = {}
  for trial in trials:
    seeds.setdefault(trial.seed, []).append(trial)
  return seeds


def _cost(
  seeds: dict[int, list[Trial]], kinds: Sequence[str], price: float | None
) -> str:
  """Returns the cost of trials in runs of the own model, over the seeds."""
  spent, own = [], []
  for trials in seeds.values():
    spent.append(
      sum(
        one.seconds
        for one in trials
        if one.kind in kinds and price in (None, one.price)
      )
    )
    own += [one.seconds for one in trials if one.kind == OWN]
  return sure(ratio(spent, own), times)


def figures(trials: Sequence[Trial], budget: float) -> list[dict[str, str]]:
  """Returns a row for the own model, the search and the random search."""
  seeds, rows = _by_seed(trials), []
  chosen = [best(own, budget) for own in seeds.values()]
  for kind, kinds in {
    OWN: [OWN],
    FOUND: [SUPERNET, FOUND],
    RANDOM: [RANDOM],
  }.items():
    having = [one for one in chosen if kind in one]
    beside = _Beside([o[kind] for o in having], [o[OWN] for o in having])
    count = sum(trial.kind == kind for trial in trials) / len(seeds)
    row = {'net': kind, **beside.row(), 'nets a seed': f'{count:.1f}'}
    if kind == OWN:
      row['minus own'] = NONE
    row['cost in runs'] = _cost(seeds, kinds, None)
    rows.append({**row, 'seeds': str(len(having))})
  return rows


def _prices(trials: Sequence[Trial]) -> list[dict[str, str]]:
  """Returns a row for the best net of each price, whatever its FLOPs."""
  seeds, rows = _by_seed(trials), []
  prices = sorted({one.price for one in trials if one.kind == SUPERNET})
  for price in prices:
    nets, own = [], []
    for of_seed in seeds.values():
      some = [t for t in of_seed if t.kind == FOUND and t.price == price]
      if some:
        nets.append(min(some, key=lambda trial: trial.choosing))
        own += [trial for trial in of_seed if trial.kind == OWN]
    row = {'price': f'{price:g}', **_Beside(nets, own).row()}
    row['cost of the supernet in runs'] = _cost(seeds, [SUPERNET], price)
    rows.append(row)
  return rows


def write_page(
  folder: pathlib.Path,
  data: Dataset,
  trials: Sequence[Trial],
  budget: float,
  about: str,
) -> list[dict[str, str]]:
  """Writes the page, and returns its most important figures.

  Args:
    folder: where to write.
    data: the data set of the first seed.
    trials: the finished trials.
    budget: as for `best`.
    about: what was run, where and when.
  """
  rows = figures(trials, budget)
  nets = [
    {'seed': str(seed), 'net': kind, 'is': net_in_words(trial)}
    for seed, own in _by_seed(trials).items()
    for kind, trial in best(own, budget).items()
  ]
  facts = (
    f'Nets have at most {budget:g} times the FLOPs of the own model. Each price'
    ' has a supernet, from which nets were sampled.'
  )
  page.write(
    folder / HTML,
    f'A search on {data.name}',
    [
      page.Section(
        'Best nets', [facts, page.Table('', rows), _picture(trials)]
      ),
      page.Section('Prices', [page.Table('', _prices(trials))]),
      page.Section('What they are', [page.Table('', nets)]),
      page.Section('How to read this', [_NOTES]),
    ],
    'SYNTHETIC DATA: its figures say nothing about real clicks.'
    if data.bayes_auc is not None
    else '',
    about,
  )
  return rows


def _picture(trials: Sequence[Trial]) -> page.Picture:
  """Draws each net's log loss against its FLOPs, both beside the own model."""
  drawing, (axis,) = page.figure(height=3.2)
  own = {one.seed: one for one in trials if one.kind == OWN}
  for number, kind in enumerate((FOUND, RANDOM)):
    some = [one for one in trials if one.kind == kind]
    axis.plot(
      [one.flops / own[one.seed].flops for one in some],
      [one.log_loss - own[one.seed].log_loss for one in some],
      'ox'[number],
      color=page.color(number),
      label=kind,
      markersize=4,
    )
  axis.plot(1, 0, 's', color=page.color('ink'), label=OWN)
  axis.set_xlabel('FLOPs of own')
  axis.set_ylabel('log loss minus own')
  page.legend(drawing)
  return page.Picture(
    'Log loss against FLOPs',
    drawing,
    'A point is one net of one seed, beside the own model of its seed.',
  )
