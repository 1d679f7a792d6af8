"""Writes the report of a reproduction: sentences, tables and pictures.

Every number comes from the folder's files, or from `paper.py`, and then the
page says so.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any

import numpy as np

from experiments.common import estimates, machine, page
from experiments.common.estimates import (
  change,
  Estimate,
  Form,
  middle,
  NONE,
  percent,
  quality,
  times,
)
from experiments.common.page import Section, Table
from experiments.common.report import size
from experiments.reproduce import link, paper, pictures
from experiments.reproduce.groups import (
  ALL,
  BASELINES,
  CONTENDERS,
  curves_of,
  DEFAULT,
  Group,
  Key,
  lead,
  Model,
  models_of,
  name,
  phase_means,
  ratio,
  without_overhead,
)
from experiments.reproduce.results import Results, Row

HTML = 'report.html'
_SAME = 0.995  # a ratio of bytes that is written as 1.00
_ONE_PROGRAM = ('pinned', 'plain', 'cached', 'fae_pinned', 'hotline')
"""Systems whose step is the same program, but for the rows of its block."""
_STANDING = {
  'none': 'all rows are trained',
  'hot': 'hot rows stand still',
  'cold': 'cold rows stand still',
}
_NOTES = [
  'Slipstream keeps the hot rows on the device and drops examples. As '
  'published, it drops examples whose rows are all stale, and a row that the '
  'window did not touch counts as stale. The default policy is that of the '
  'model\'s config, which the table "Setting" names: `surprise` drops examples '
  'at random, mostly those with a small loss, and weights the others for them. '
  '`stale` is the published policy, except that a row that the window did not '
  'touch is not stale.',
  'Ratios compare runs of one seed: the system over Slipstream. Their mean is '
  "geometric. Intervals are Student's at 95 %, for ratios those of their "
  'logarithms. One seed has no interval. A dash means: not known.',
  'Without overhead: T_system / T_pinned x 1 / (1 - share dropped), with the '
  'seconds of the run that pins the same rows and skips nothing. It estimates '
  'the speed-up if choosing took no time. All seconds are measured, so a '
  'measured speed-up above it is noise.',
  'Bytes are exact counts of what tables make cross the link. Seconds are '
  'those of training, without compilation and evaluation.',
  "The papers' figures were taken on GPUs, with links and data of their own. "
  f'Sources: {"; ".join(map(" ".join, paper.SOURCES.items()))}.',
]


def write(results: Results) -> None:
  """Writes the page into the folder of the results."""
  models = models_of(results)
  made_up = [model.short for model in models if model.facts.get('synthetic')]
  warning = (
    f'SYNTHETIC DATA: {", ".join(made_up)}. Their figures say nothing about '
    'real clicks: AUC, drop rates and skew are those of a generator.'
  )
  runs, peak = results.of('run'), results.setting.get('peak_memory_bytes')
  failed = sum(run['status'] != 'ok' for run in runs)
  about = [
    machine.in_words(results.setting),
    f'peak memory {size(peak)}' if peak else '',
    f'{len(runs)} runs, {failed} failed',
  ]
  page.write(
    results.folder / HTML,
    'Slipstream and the systems it is compared with, side by side',
    sections(models),
    warning if made_up else '',
    '; '.join(filter(None, about)),
  )


def sections(models: Sequence[Model]) -> list[Section]:
  """Returns what the page says."""
  return [
    Section('What wins and what loses', _summary(models)),
    *(Section(model.name, _of_model(model)) for model in models),
    Section('Modelled, not measured', [_modelled(model) for model in models]),
    Section('How to read this', [_NOTES]),
  ]


def overview(model: Model) -> list[dict[str, str]]:
  """Returns what a terminal has room for: time, and quality."""
  rows = []
  for group in model.groups.values():
    ours = model.groups.get(DEFAULT)
    rows.append(
      {
        'system': group.name,
        'seconds': middle(group.mean('seconds'), '{:,.2f}'.format),
        'over ours': middle(ratio(group, ours, 'pace'), times),
        'bytes over ours': middle(ratio(group, ours, 'moved'), times),
        'AUC': middle(group.mean('auc'), quality),
      }
    )
  return rows


def _of_model(model: Model) -> list[Any]:
  """Returns the pictures and tables of a model."""
  failures = [
    f'FAILED: {group.name}, seed {seed}: {why}'
    for group in model.groups.values()
    for seed, why in group.failures.items()
  ]
  blocks = [
    failures,
    _setting(model),
    pictures.speed(model),
    pictures.learning(model),
    _time(model),
    _quality(model),
    _traffic(model),
    _skipped(model),
    _memory(model),
    pictures.phases(model),
    _phases(model),
    pictures.skew(model),
    pictures.changes(model),
    _naive(model),
    pictures.thresholds(model),
    _thresholds(model),
  ]
  return [block for block in blocks if block is not None]


def _sure(estimate: Estimate | None, form: Form) -> str:
  """Writes a mean with its interval, if it is known."""
  interval = estimates.interval(estimate, form)
  mean = middle(estimate, form)
  return mean if interval == NONE else f'{mean} ({interval})'


def _summary(models: Sequence[Model]) -> list[Any]:
  """Returns the sentences and tables over all models."""
  blocks: list[Any] = []
  for contender, policy in CONTENDERS.items():
    if sentences := _sentences(models, contender):
      blocks += [f'Slipstream, {policy}:', sentences]
  for model in models:
    pooled, rows = (
      model.groups.get((system, 'off')) for system in ('dlrm_hybrid', 'plain')
    )
    more = ratio(rows, pooled, 'moved')
    if more is not None and more.mean > 1:
      blocks.append(
        f'{model.short}: pooling on the host moves FEWER bytes. Streaming rows '
        f'moves {times(more.mean)} times as many, as a bag crosses as one '
        'embedding when it is pooled, and as a row per lookup when it is not.'
      )
  against = Table(
    "Slipstream against the paper's baselines",
    _against(models),
    'Times as fast: above 1, Slipstream is faster. Without overhead: an '
    'estimate of the same if choosing took no time. Bytes: of tables, and with '
    'the dense parameters that XDL moves as well.',
  )
  return [*blocks, against, _between(models)]


Compared = tuple[Model, Group, Estimate]


def _sentences(models: Sequence[Model], contender: Key) -> list[str]:
  """Says where Slipstream wins and loses against baselines and pinned rows."""

  def compared(
    compare: Callable[[Group, Group], Estimate | None],
  ) -> list[Compared]:
    return [
      (model, model.groups[key], estimate)
      for model in models
      for key in (*BASELINES, ALL)
      if key in model.groups and contender in model.groups
      if (estimate := compare(model.groups[key], model.groups[contender]))
    ]

  sentences = [
    f'FAILED in every run of {model.short}.'
    for model in models
    if contender in model.groups and not model.groups[contender].runs
  ]
  if speeds := compared(lambda a, b: ratio(a, b, 'pace')):
    faster = [x for x in speeds if (x[2].low or x[2].mean) > 1]
    slower = [x for x in speeds if (x[2].high or x[2].mean) < 1]
    sentences.append(
      f'Faster in {len(faster)} of {len(speeds)} comparisons with the '
      f"paper's baselines and with pinned rows, SLOWER in {len(slower)}"
      f'{_listed(slower)}. The others cannot be told apart.'
    )
  if claimed := [x for x in speeds if _claim(x[0], x[1].key)]:
    missed = [x for x in claimed if x[2].mean < _claim(x[0], x[1].key)]
    below = [
      model.key
      for model, group, _ in missed
      if (ideal := without_overhead(model.groups, group, contender))
      if ideal.mean < _claim(model, group.key)
    ]
    sentences.append(
      "The mean reaches the paper's speed-up in "
      f'{len(claimed) - len(missed)} of {len(claimed)} comparisons. In '
      f'{len(below)} of the others, the estimate without overhead does not '
      'reach it either.'
    )
  if moved := compared(lambda a, b: ratio(a, b, 'moved')):
    more = [x for x in moved if x[2].mean < _SAME]
    sentences.append(
      f'The others move {_range(moved, times)} times its bytes of tables. It '
      f'moves MORE in {len(more)} comparisons{_listed(more)}.'
    )
  if leads := compared(lambda a, b: lead(b, a, 'auc')):
    sentences.append(
      f'Its AUC less that of the others: {_range(leads, change)}.'
    )
  return sentences


def _range(compared: Sequence[Compared], form: Form) -> str:
  values = sorted(value.mean for _, _, value in compared)
  return ' to '.join(dict.fromkeys((form(values[0]), form(values[-1]))))


def _listed(compared: Sequence[Compared]) -> str:
  listed = ', '.join(
    f'{model.short} against {group.name}: {times(value.mean)}'
    for model, group, value in compared
  )
  return f' ({listed})' if listed else ''


def _claim(model: Model, key: Key) -> float:
  """Returns the paper's speed-up over a system, or 0."""
  known = model.published and key[1] == 'off'
  return paper.CLAIMS.get(key[0], 0.0) if known else 0.0


def _written_claim(model: Model, key: Key) -> str:
  claim = _claim(model, key)
  return f'{claim:.4g}' if claim else NONE


def _against(models: Sequence[Model]) -> list[dict[str, str]]:
  rows = []
  for model, (contender, policy), key in itertools.product(
    models, CONTENDERS.items(), BASELINES
  ):
    if contender not in model.groups or key not in model.groups:
      continue
    ours, group = model.groups[contender], model.groups[key]
    speed = _sure(ratio(group, ours, 'pace'), times)
    ideal = without_overhead(model.groups, group, contender)
    rows.append(
      {
        'model': model.short,
        'Slipstream': policy,
        'against': group.name,
        'times as fast': speed if ours.runs and group.runs else 'failed',
        "paper's claim": _written_claim(model, key),
        'without overhead': middle(ideal, times),
        'bytes, times as many': middle(ratio(group, ours, 'moved'), times),
        'with dense': middle(ratio(group, ours, 'moved_in_all'), times),
        'AUC, ours less its': _sure(lead(ours, group, 'auc'), change),
      }
    )
  return rows


def _between(models: Sequence[Model]) -> Table:
  """Compares the baselines with one another."""
  rows = []
  for faster, slower, claim, source in paper.BETWEEN:
    slow, fast = (slower, 'off'), (faster, 'off')
    ratios = [
      ratio(model.groups.get(slow), model.groups.get(fast), 'pace')
      for model in models
    ]
    if any(ratios):
      pairs = zip(models, ratios, strict=True)
      rows.append(
        {
          'faster': name(fast),
          'slower': name(slow),
          'claim': f'{claim:g}',
          'claimed by': source,
        }
        | {model.short: middle(value, times) for model, value in pairs}
      )
  return Table(
    'Baselines against one another',
    rows,
    'What their papers claim, on devices and links of their own, and the ratio '
    'of seconds here.',
  )


def _setting(model: Model) -> Table:
  """Compares what was run with what the paper ran."""
  ours, theirs = dict(model.facts), dict(model.published)
  runs = [run for group in model.groups.values() for run in group.runs.values()]
  seen = [run['examples_seen'] for run in runs if 'examples_seen' in run]
  (hot,) = _means(runs, 'examples_hot_share')
  ours['examples_seen'] = max(seen, default=None)
  ours['examples_hot_share'] = hot and hot.mean
  if ours.get('rows') and 'hot_rows' in ours:
    ours['hot_share'] = ours['hot_rows'] / ours['rows']
  if theirs:
    theirs['drop'] = paper.DROP_TARGET
  lines: list[tuple[str, str, str, Callable[[Any], str]]] = [
    ('rows of all tables', 'rows', 'rows', '{:,}'.format),
    ('dim', 'dim', 'dim', str),
    ('tables', 'tables', 'tables', str),
    ('lookups per example', 'features_per_example', '', '{:,}'.format),
    ('bytes of the tables', 'row_bytes', 'table_bytes', size),
    ('batch size', 'batch_size', 'batch_size', '{:,}'.format),
    ('examples of a run', 'examples_seen', 'examples', '{:,}'.format),
    ('hot rows, of all', 'hot_share', 'hot_bytes_share', percent),
    ('hot examples, of all', *('examples_hot_share',) * 2, percent),
    ('drop target, of hot examples', 'drop_target', 'drop', percent),
    ('default policy', 'policy', '', str),
    ('dense parameters', 'dense_parameters', '', '{:,}'.format),
  ]
  rows = [
    {
      '': title,
      'here': form(ours[key]),
      'paper': form(theirs[far]) if far in theirs else NONE,
    }
    for title, key, far, form in lines
    if ours.get(key) is not None
  ]
  about = f'Here: {ours.get("data", "unknown data")}. ' + (
    f'The papers: {theirs["data"]}, on GPUs, the whole data set in a run.'
    if theirs
    else 'No paper has this model.'
  )
  return Table('Setting', [*rows, *_skew(model)], about)


def _skew(model: Model) -> list[dict[str, str]]:
  """Returns the shares of lookups that the most popular rows have."""
  points = sorted(
    (row['rank'], row['cumulative_share']) for row in model.rows['skew']
  )
  if not points:
    return []
  ranks, shares = zip(*points, strict=True)
  rows = model.facts.get('rows') or ranks[-1]
  counts = {f'{100 * x:g} % of the rows': x * rows for x in (0.001, 0.01, 0.1)}
  counts['hot rows'] = model.facts.get('hot_rows') or 0
  return [
    {
      '': f'lookups of the most popular {title}',
      'here': percent(float(np.interp(count, ranks, shares))),
      'paper': NONE,
    }
    for title, count in counts.items()
    if count >= ranks[0]
  ]


Column = Callable[[Group], str]


def _by_system(
  title: str, groups: Sequence[Group], columns: dict[str, Column], about: str
) -> Table:
  """Makes a table with a row per system, without columns that say nothing."""
  rows = [
    {
      column: text(group) if group.runs else 'failed'
      for column, text in columns.items()
    }
    for group in groups
  ]
  known = [
    column
    for column in columns
    if any(row[column] not in (NONE, 'failed', '0') for row in rows)
  ]
  if not known:
    return Table(title, [])
  return Table(
    title,
    [
      {'system': group.name} | {column: row[column] for column in known}
      for group, row in zip(groups, rows, strict=True)
    ],
    about,
    strong=[n for n, group in enumerate(groups) if group.key in CONTENDERS],
  )


def _mean(column: str, form: Form, sure: bool = False) -> Column:
  write = _sure if sure else middle
  return lambda group: write(group.mean(column), form)


def _over(other: Group | None, column: str) -> Column:
  """Returns a column of ratios to another system."""
  return lambda group: (
    NONE if other is group else _sure(ratio(group, other, column), times)
  )


def _time(model: Model) -> Table:
  """Compares the seconds of the systems."""
  columns: dict[str, Column] = {
    'seeds': lambda group: str(len(group.runs)),
    'seconds': _mean('seconds', '{:,.2f}'.format),
    'examples/s': _mean('rate', '{:,.0f}'.format),
  }

  def ideal(group: Group, contender: Key) -> str:
    estimate = without_overhead(model.groups, group, contender)
    return NONE if group.key == contender else middle(estimate, times)

  for key, policy in CONTENDERS.items():
    columns[f'{policy}: times as fast'] = _over(model.groups.get(key), 'pace')
    columns[f'{policy}: without overhead'] = functools.partial(
      ideal, contender=key
    )
  columns["paper's claim"] = lambda group: _written_claim(model, group.key)
  about = 'Training only. Times as fast: Slipstream against the system.'
  if curves := curves_of(model):
    goal = min(max(auc for _, auc in curve) for curve in curves.values())
    columns[f'seconds to AUC {goal:.4f}'] = lambda group: (
      f'{_seconds_to(goal, curves[group.key]):.2f}'
      if group.key in curves
      else NONE
    )
    about += (
      ' The last column is of one seed, and its AUC the lowest of the best of '
      'all systems.'
    )
  return _by_system('Time', [*model.groups.values()], columns, about)


def _seconds_to(goal: float, curve: list[tuple[float, float]]) -> float:
  """Interpolates when a curve first has an AUC that it reaches."""
  seconds, aucs = (np.array(x) for x in zip(*curve, strict=True))
  first = int(np.argmax(aucs >= goal))
  pair = slice(max(first - 1, 0), first + 1)
  return float(np.interp(goal, aucs[pair], seconds[pair]))


def _quality(model: Model) -> Table:
  """Compares AUC, log loss and accuracy on the test set."""
  plain = model.groups.get(('plain', 'off'))

  def of_test_set(group: Group) -> str:
    names = ('auc', 'test_positives', 'test_examples')
    auc, positives, examples = (group.mean(name) for name in names)
    if auc is None or positives is None or examples is None:
      return NONE
    sizes = round(positives.mean), round(examples.mean)
    bounds = estimates.of_test_set(auc.mean, *sizes)
    return estimates.interval(bounds, quality)

  def ahead(group: Group) -> str:
    return NONE if group is plain else _sure(lead(group, plain, 'auc'), change)

  about = (
    'On held-out examples. The interval of one test set is that of a single '
    'run, after Hanley and McNeil. The others are those of the mean over seeds.'
  )
  if published := model.published:
    auc = f'{published["auc"]:.3f}' if published['auc'] else 'not given'
    about += (
      f" The papers' full run on the real {published['data']}: AUC {auc}, log "
      f'loss {published["log_loss"]:.3f}, accuracy {published["accuracy"]:.2%}.'
    )
  columns = {
    'AUC': _mean('auc', quality, sure=True),
    'AUC, one test set': of_test_set,
    "AUC less streamed's": ahead,
    'log loss': _mean('log_loss', quality, sure=True),
    'accuracy': _mean('accuracy', percent, sure=True),
  }
  return _by_system('Quality', [*model.groups.values()], columns, about)


def _traffic(model: Model) -> Table:
  """Compares bytes per example with one another and with the papers'."""
  published = model.published
  ours, fae = (model.groups.get(key) for key in (DEFAULT, ('fae', 'off')))
  about = 'Bytes per example seen, exact counts.'
  if published:
    least = 8 * published['tables'] * published['dim']
    about += (
      f" FAE's paper has GB in {paper.EPOCHS_OF_BYTES} epochs of "
      f'{published["examples"]:,} examples. Per example that is less than the '
      f'{least:,} bytes of its embeddings and gradients: compare only ratios.'
    )

  def amount(value: float) -> str:
    return f'{value:,.0f}' if value >= 99.5 else f'{value:.3g}'

  def far(form: Form) -> Column:
    def text(group: Group) -> str:
      system, skip = group.key
      whole = published.get('gigabytes', {}).get(system)
      return form(whole) if whole and skip == 'off' else NONE

    return text

  passed = published.get('examples', 1) * paper.EPOCHS_OF_BYTES
  columns = {
    'to the device': _mean('loaded', amount),
    'to the host': _mean('stored', amount),
    'dense parameters': _mean('dense', amount),
    'in all': _mean('moved_in_all', amount),
    "tables, times the default policy's": _over(ours, 'moved'),
    'with dense': _over(ours, 'moved_in_all'),
    "tables, times FAE's": _over(fae, 'moved'),
    'paper, GB': far('{:g}'.format),
    'paper, per example': far(lambda x: amount(x * 1e9 / passed)),
    "paper, times FAE's": far(
      lambda x: times(x / published['gigabytes']['fae'])
    ),
  }
  return _by_system('Bytes moved', [*model.groups.values()], columns, about)


def _skipped(model: Model) -> Table:
  """Lists what was dropped, and the time that choosing took."""
  return _by_system(
    'What is skipped, and what that costs',
    [group for key, group in model.groups.items() if key[1] != 'off'],
    {
      'dropped, of all': _mean('dropped', percent),
      'dropped, of hot': _mean('dropped_of_hot', percent),
      'hot examples': _mean('examples_hot_share', percent),
      'choosing, of the time': _mean('choosing', percent),
      'windows, of the time': _mean('watching', percent),
      'both': _mean('overhead', percent),
    },
    'Shares of the examples seen, warm-up and windows included. The paper '
    f'dropped {paper.DROPPED:.0%} of all on Criteo Kaggle. Choosing: scores, '
    'threshold and choice. Windows: snapshots, and comparing rows.',
  )


def _memory(model: Model) -> Table:
  """Lists where each system keeps rows, and its rate of matrix products."""
  return _by_system(
    'Memory and matrix products',
    [*model.groups.values()],
    {
      'device': _mean('device_bytes', size),
      'host': _mean('host_bytes', size),
      'hot lookups': _mean('lookups_hot_share', percent),
      "of a plain product's rate": _mean('matrix_share', percent),
    },
    'Bytes kept where, the share of lookups of hot rows, and the rate of a '
    "run's matrix products over that of a plain one of 1024 x 1024, measured "
    'once beforehand. It may be above 100 %.',
  )


def _phases(model: Model) -> Table:
  """Compares the milliseconds of each phase."""
  keys, names, spent = phase_means(model)
  about = 'Phases overlap: they add up to work, not to the time of a batch.'
  alike = [((system, 'off'), 'step') for system in _ONE_PROGRAM]
  same = [spent[key] for key in alike if key in spent]
  if len(same) > 1:
    about += (
      ' Systems are timed one after another, so phases also differ by what '
      'else the machine did. For example, `step` is the same program for '
      f'{len(same)} of them, which took {min(same):.1f} to {max(same):.1f} ms.'
    )

  def ms(key: Key, phase: str) -> str:
    value = spent.get((key, phase))
    return NONE if value is None else f'{value:.3f}'

  rows = [
    {'system': name(key)} | {x: ms(key, x) for x in names} for key in keys
  ]
  return Table('Time by phase, ms per batch', rows, about)


def _means(rows: Sequence[Row], *columns: str) -> list[Estimate | None]:
  return [
    estimates.mean([row[column] for row in rows if column in row])
    for column in columns
  ]


def _naive(model: Model) -> Table:
  """Lists what it costs if all hot or all cold rows stand still."""
  base = {
    row['seed']: row.get('accuracy')
    for row in model.rows['naive']
    if row['variant'] == 'none'
  }
  lines = []
  for variant, title in _STANDING.items():
    rows = [row for row in model.rows['naive'] if row['variant'] == variant]
    lost = [
      base[row['seed']] - row['accuracy']
      for row in rows
      if 'accuracy' in row and base.get(row['seed']) and variant != 'none'
    ]
    auc, log_loss, accuracy = _means(rows, 'auc', 'log_loss', 'accuracy')
    lines.append(
      {
        'after the warm-up': title,
        'accuracy': middle(accuracy, percent),
        'accuracy lost': _sure(estimates.mean(lost), '{:.2%}'.format),
        'AUC': middle(auc, quality),
        'log loss': middle(log_loss, quality),
      }
    )
  low, high = paper.NAIVE_LOSS
  return Table(
    'Naive skipping',
    lines if model.rows['naive'] else [],
    f'In the paper either costs {low:.0%} to {high:.0%} of accuracy.',
  )


def _thresholds(model: Model) -> Table:
  """Lists threshold, drop rate and quality by drop target."""
  lines = []
  for target in sorted({row['drop_target'] for row in model.rows['threshold']}):
    rows = [x for x in model.rows['threshold'] if x['drop_target'] == target]
    columns = ('threshold', 'drop_rate', 'auc', 'log_loss')
    threshold, rate, auc, log_loss = _means(rows, *columns)
    lines.append(
      {
        'drop target': f'{target:.0%}',
        'threshold': middle(threshold, '{:.3g}'.format),
        'drop rate': middle(rate, percent),
        'AUC': _sure(auc, quality),
        'log loss': middle(log_loss, quality),
      }
    )
  return Table(
    'Threshold, drop rate and quality',
    lines,
    'Drop rate: of the hot examples that came while skipping.',
  )


def _modelled(model: Model) -> Table:
  """Lists the times that the model of the link gives."""
  lines = []
  for key in model.groups:
    runs, phases = (
      [x for x in model.rows[kind] if (x['system'], x['skip']) == key]
      for kind in ('run', 'phase')
    )
    counts = link.counts_of(runs, phases, model.facts)
    if counts is None:
      continue
    for step_ms in link.STEP_MS:
      spent = {
        one.name: link.modelled(counts, one, step_ms)
        for one in link.LINKS.values()
      }
      binds = dict.fromkeys(x.binds.replace('_', ' ') for x in spent.values())
      lines.append(
        {'system': name(key), 'device step, ms': f'{step_ms:g}'}
        | {x: f'{time.ms_per_batch:.3f}' for x, time in spent.items()}
        | {'what binds': ' or '.join(binds)}
      )
  return Table(
    model.short,
    lines,
    'MODELLED, not measured: ms per batch over each link, and what binds, from '
    'exact counts of bytes, stated rates, and phases of the host as measured.',
  )
