"""Trains supernets, the nets sampled from them, and random nets beside."""

from collections.abc import Callable, Sequence
import json
import math
import pathlib
import sys
from typing import Any
import zlib

import ml_collections
import numpy as np

from experiments.common import build, cli, datasets, errors, machine, report
from experiments.common.meter import compiled
from experiments.common.progress import Bar
from experiments.common.results import keep_config, read, write
from experiments.common.usage import config_flag, CONFIGS, keys_of, load_config
from experiments.common.workdir import folder, writable
from experiments.search import page
from experiments.search.page import FOUND, OWN, RANDOM, SUPERNET, Trial, WORDS
from experiments.search.supernet import (
  INTERACTIONS,
  own_net,
  recipe_of,
  space_of,
  supernet_steps,
  with_net,
)
from experiments.zoo.job import configured, Entry, measure, trained
from experiments.zoo.page import Cell
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import choose, UserError
from slipstream_jax.files import replace
from slipstream_jax.models.supernet import (
  ARCHITECTURE,
  cost_of,
  decisions,
  Logits,
  Net,
  sampled,
)

TRIALS = 'search.csv'
_TRIES = 1000  # draws of a net that is new and within the budget


def search(
  config: ml_collections.ConfigDict,
  data: str | None,
  budget: float,
  prices: Sequence[str],
  supernet: float,
  nets: int,
  widths: Sequence[str],
  interactions: Sequence[str],
  rate: float,
  seeds: int,
  steps: int,
  workdir: str | None,
) -> None:
  """Runs every trial of every seed, unless it is finished, and writes a page.

  The arguments are those of the program.

  Raises:
    UserError: bad settings, data or folder.
  """
  compiled()  # starts counting
  if data is not None:
    config.data.path = data
  if steps:
    config.train.steps = steps
  _check_model(config.model)
  [factor] = _numbers([str(rate)], '--rate', 1e-6)
  entry, cell = Entry(config.model.name), Cell(OWN, factor)
  skip = config.skip.mode
  config.skip.mode = 'off'
  config = configured(config, entry, cell, config.seed)
  errors.check(config)
  flags: dict[str, Any] = {
    'budget': _numbers([str(budget)], '--budget', 1e-3)[0],
    'prices': _numbers(prices, '--prices', 0.0),
    'supernet': _numbers([str(supernet)], '--supernet', 1e-3)[0],
    'nets': nets,
    'widths': [int(one) for one in widths and _numbers(widths, '--widths', 2)],
    'interactions': [*interactions],
  }
  for name in interactions:
    choose(INTERACTIONS, name, '--interactions')
  screen = report.console()
  place = writable(str(folder(workdir, 'search-')), '--workdir')
  again = cli.again(*([] if workdir else [f'--workdir={place}']))
  keep_config(place, config, **flags)
  rows = read(place / TRIALS, Trial._fields, WORDS)
  trials = [Trial(**row) for row in rows]

  def keep(trial: Trial) -> None:
    trials.append(trial)
    write(place / TRIALS, Trial._fields, (one._asdict() for one in trials))
    screen.print(page.in_words(trial), highlight=False)

  first = datasets.dataset(config)
  report.introduce(screen, first, place)
  for seed in range(config.seed, config.seed + seeds):
    own = config.copy_and_resolve_references()
    own.seed = seed
    done = [one for one in trials if one.seed == seed]
    with Bar(screen, None, 'step', 'starting') as bar:
      _Seed(own, done, keep, **flags).run(bar)
    best = page.best([one for one in trials if one.seed == seed], budget)
    if FOUND in best:
      net = _net(best[FOUND].what)
      of_net = with_net(own, net)
      of_net.skip.mode = skip
      _write_config(place / f'found_{seed}.py', of_net, again)
  about = machine.in_words(machine.here(again))
  table = page.write_page(place, first, trials, budget, about)
  screen.print(report.table('the best net of each search', table))
  screen.print(f'written to {place}', highlight=False)


def _net(text: str) -> Net:
  """Returns a net from its JSON."""
  one = json.loads(text)
  widths = tuple(one['bottom']), tuple(one['top'])
  return Net(*widths, one['interaction'], tuple(one['dims']))


def _check_model(model: ml_collections.ConfigDict) -> None:
  """Checks that a space can be made around the model of a config."""
  wanted = {'name': 'dlrm', 'first_order': False, 'normalization': 'none'}
  for key, value in {**wanted, 'dims': None}.items():
    if model.get(key) != value:
      raise UserError(
        f'a search starts from a DLRM whose {key} is {value!r}',
        got=repr(model.get(key)),
        where=f'config.model.{key}',
        hint=f'set --config.model.{key}={value}, or take'
        ' configs/criteo.py:planted',
      )


def _numbers(words: Sequence[str], flag: str, least: float) -> list[float]:
  """Returns the numbers, ascending, each once.

  Raises:
    UserError: there is none, or one is too small or no number.
  """
  try:
    numbers = sorted({float(word) for word in words})
  except ValueError:
    numbers = []
  if not numbers or not all(least <= one < math.inf for one in numbers):
    raise UserError(
      f'{flag} needs numbers of at least {least:g}',
      got=','.join(words) or 'none',
      where=flag,
      hint='see --help',
    )
  return numbers


class _Seed:
  """The trials of one seed."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    done: Sequence[Trial],
    keep: Callable[[Trial], None],
    budget: float,
    prices: Sequence[float],
    supernet: float,
    nets: int,
    widths: Sequence[int],
    interactions: Sequence[str],
  ) -> None:
    """Runs nothing yet. `keep` is called with each trial that is finished."""
    self._config, self._keep = config, keep
    self._prices, self._nets, self._most_supernet = prices, nets, supernet
    self._done = {trial.key: trial for trial in done}
    self._data = datasets.dataset(config)
    self._steps = build.total_steps(config, self._data)
    self._space, self._inputs = space_of(
      config, self._data, widths, interactions, budget
    )
    self._own = own_net(config, self._data)
    self._most = budget * cost_of(self._inputs, self._own)[0]

  def run(self, bar: Bar) -> None:
    """Runs the trials that are not finished."""
    self._trained(bar, OWN, 0.0, 0, self._own)
    seconds = 0.0
    for price in self._prices:
      supernet = self._supernet(bar, price)
      logits = json.loads(supernet.what)
      seconds += supernet.seconds
      for number, net in enumerate(self._sampled(logits, price, self._nets)):
        seconds += self._trained(bar, FOUND, price, number, net).seconds
    equal = {name: np.zeros(x) for name, x in decisions(self._space).items()}
    spent = 0.0
    # No price is below 0, so random nets have other draws than all supernets.
    for number, net in enumerate(self._sampled(equal, -1.0, _TRIES)):
      if spent < seconds:
        spent += self._trained(bar, RANDOM, 0.0, number, net).seconds

  def _sampled(self, logits: Logits, price: float, count: int) -> list[Net]:
    """Returns up to `count` nets within the budget, each once.

    Each seed and price has draws of its own. If no net drawn is within the
    budget, returns the one with the fewest FLOPs.
    """
    key = zlib.crc32(repr(price).encode())
    rng = np.random.default_rng([self._config.seed, key])
    draws = [sampled(self._space, logits, rng) for _ in range(_TRIES)]
    draws = list(dict.fromkeys(draws))
    flops = {net: cost_of(self._inputs, net)[0] for net in draws}
    within = [net for net in draws if flops[net] <= self._most]
    return within[:count] or [min(draws, key=flops.__getitem__)]

  def _supernet(self, bar: Bar, price: float) -> Trial:
    """Returns the trial that trains a supernet, with its logits in JSON."""
    key = self._config.seed, SUPERNET, price, 0
    if key in self._done:
      return self._done[key]
    config, space, inputs = self._config, self._space, self._inputs
    steps = supernet_steps(
      space, inputs, self._own, self._steps, self._most_supernet
    )
    # Logits must not see the examples that weights have learned by heart.
    if self._data.train_examples is not None:
      once = self._data.train_examples // config.data.batch_size
      steps = max(1, min(steps, once))
    recipe = recipe_of(config, self._data, space, inputs, price, steps)
    self._begin(bar, f'supernet at price {price:g}', steps)
    trainer, meter = trained(config, self._data, recipe, steps, bar, 0)
    logits = to_host(trainer.state.params[ARCHITECTURE])
    as_lists = {name: x.tolist() for name, x in logits.items()}
    trial = Trial(*key, json.dumps(as_lists), meter.seconds)
    self._keep(trial)
    return trial

  def _trained(
    self, bar: Bar, kind: str, price: float, number: int, net: Net
  ) -> Trial:
    """Returns the trial that trains one net from scratch."""
    key = self._config.seed, kind, price, number
    if key in self._done:
      return self._done[key]
    config = with_net(self._config, net)
    recipe = build.recipe(config, self._data, self._steps)
    self._begin(bar, f'{kind} net {number + 1}', self._steps)
    cell = Cell(kind, 1.0)
    run = measure(config, cell, self._data, recipe, self._steps, bar, 0)
    flops, elements = cost_of(self._inputs, net)
    trial = Trial(
      *key,
      what=json.dumps(net._asdict()),
      seconds=run.seconds,
      choosing=run.choosing,
      log_loss=run.log_loss,
      auc=run.auc,
      flops=flops,
      elements=elements,
    )
    self._keep(trial)
    return trial

  def _begin(self, bar: Bar, what: str, steps: int) -> None:
    bar.begin(f'seed {self._config.seed}  {what}', steps)


def _write_config(
  path: pathlib.Path, config: ml_collections.ConfigDict, command: str
) -> None:
  """Writes a config as a file that changes the one of the command line.

  Args:
    path: the file.
    config: what the file is to return.
    command: the command that made the config.
  """
  base = config_flag(sys.argv[1:])
  assert base is not None
  file, _, variant = base.partition(':')
  if pathlib.Path(file).resolve().parent == CONFIGS:
    name = f"f'{{CONFIGS}}/{pathlib.Path(file).name}:{variant}'"
  else:
    name = repr(f'{pathlib.Path(file).resolve()}:{variant}')
  before = dict(keys_of(load_config(base)))
  lines = [
    f'  config.{key} = {value!r}'
    for key, value in keys_of(config)
    if key not in before or before[key] != value
  ]
  replace(
    path, _CONFIG.format(command=command, name=name, lines='\n'.join(lines))
  )


_CONFIG = '''"""A net that a search found:

    {command}
"""

import ml_collections

from experiments.common.usage import CONFIGS, load_config


def get_config() -> ml_collections.ConfigDict:
  """Returns the settings."""
  config = load_config({name})
{lines}
  return config
'''
