"""Writes the report of a reproduction: sentences, tables and pictures.

Every number comes from the folder's files, or from `paper.py`, and then the
page says so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
  sure,
  times,
)
from experiments.common.page import Section, Table
from experiments.common.report import size
from experiments.reproduce import link, paper, pictures
from experiments.reproduce.groups import (
  ALL,
  BASELINES,
  CONTENDERS,
  Key,
  mean,
  Model,
  models_of,
  name,
  phases_of,
  ratio,
)
from experiments.reproduce.results import PHASES, Results

HTML = 'report.html'
Column = tuple[str, str, Form]
"""Title, name of a figure, and how it is written."""
_SURE = (times, change, quality)
"""Forms of figures that are written with their interval."""
_COMPARED = (('times as fast', 'speed'), ('without overhead', 'ideal'))
_SAME = 0.995  # a ratio of bytes that is written as 1.00
_EQUAL = 0.0005  # AUC: a difference that does not matter
_LINK, _STEP_MS = 'PCIe 4 x16', 0.5  # modelled beside what is measured


def _amount(value: float) -> str:
  return f'{value:,.0f}' if value >= 99.5 else f'{value:.3g}'


_BY_SYSTEM: dict[str, tuple[list[Column], str]] = {
  'Time': (
    [
      ('seeds', 'seeds', '{:.0f}'.format),
      ('seconds', 'seconds', '{:,.2f}'.format),
      ('examples/s', 'examples/s', '{:,.0f}'.format),
      *(
        (f'{policy}: {title}', f'{figure}, {policy}', times)
        for policy in CONTENDERS.values()
        for title, figure in _COMPARED
      ),
      ("paper's claim", 'claim', '{:.4g}'.format),
      ('seconds to AUC {goal:.4f}', 'seconds to goal', '{:.2f}'.format),
    ],
    'Training only. Times as fast: Slipstream against the system.',
  ),
  'Quality': (
    [
      ('AUC', 'auc', quality),
      ('AUC, one test set', 'AUC, one test set', quality),
      ("AUC less streamed's", 'AUC, streamed', change),
      ('log loss', 'log_loss', quality),
      ('accuracy', 'accuracy', quality),
    ],
    'On held-out examples. The interval of one test set is that of a single '
    'run, after Hanley and McNeil. The others are those of the mean over '
    'seeds.',
  ),
  'Bytes moved': (
    [
      ('to the device', 'loaded', _amount),
      ('to the host', 'stored', _amount),
      ('dense parameters', 'dense', _amount),
      ('in all', 'moved in all', _amount),
      ("tables, times the default policy's", 'bytes, default policy', times),
      ('with dense', 'all bytes, default policy', times),
      ("tables, times FAE's", 'bytes, FAE', times),
      ('paper, GB', 'paper, GB', '{:g}'.format),
      ('paper, per example', 'paper, per example', _amount),
      ("paper, times FAE's", "paper, times FAE's", times),
    ],
    'Bytes per example seen, exact counts.',
  ),
  'What is skipped, and what that costs': (
    [
      ('dropped, of all', 'dropped', percent),
      ('dropped, of hot', 'dropped of hot', percent),
      ('hot examples', 'examples_hot_share', percent),
      ('choosing, of the time', 'choosing', percent),
      ('windows, of the time', 'windows', percent),
      ('both', 'overhead', percent),
    ],
    'Shares of the examples seen, warm-up and windows included. The paper '
    f'dropped {paper.DROPPED:.0%} of all on Criteo Kaggle. Choosing: scores, '
    'threshold and choice. Windows: snapshots, and comparing rows.',
  ),
  'Memory and matrix products': (
    [
      ('device', 'device_bytes', size),
      ('host', 'host_bytes', size),
      ('hot lookups', 'lookups_hot_share', percent),
      ("of a plain product's rate", 'matrix_share', percent),
    ],
    'Bytes kept where, the share of lookups of hot rows, and the rate of a '
    "run's matrix products over that of a plain one of 1024 x 1024, measured "
    'once beforehand. It may be above 100 %.',
  ),
}
"""Columns of the tables with a row per system, and what is said of them."""
_OVERVIEW: list[Column] = [
  ('seconds', 'seconds', '{:,.2f}'.format),
  ('over ours', 'speed, default policy', times),
  ('bytes over ours', 'bytes, default policy', times),
  ('dropped', 'dropped', percent),
  ('AUC', 'auc', quality),
]
_NAIVE: list[Column] = [
  ('accuracy', 'accuracy', percent),
  ('accuracy lost', 'accuracy lost', '{:.2%}'.format),
  ('AUC', 'auc', quality),
  ('log loss', 'log_loss', quality),
]
_THRESHOLDS: list[Column] = [
  ('threshold', 'threshold', '{:.3g}'.format),
  ('drop rate', 'drop_rate', percent),
  ('AUC', 'auc', quality),
  ('log loss', 'log_loss', quality),
]
_ONE_PROGRAM = ('pinned', 'plain', 'cached', 'fae_pinned', 'hotline')
"""Systems whose step is the same program, but for the rows of its block."""
_FROZEN = {
  'none': 'all rows are trained',
  'hot': 'hot rows are frozen',
  'cold': 'cold rows are frozen',
}
_NOTES = [
  'Slipstream keeps the hot rows on the device and drops examples. As '
  'published, it drops examples whose rows are all stale, and a row that the '
  'window did not touch counts as stale. The default policy, `surprise`, drops '
  'examples at random, mostly those with a small loss, and weights the others '
  'for them.',
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
    *(
      Section(model.facts.get('title', model.short), _of_model(model))
      for model in models
    ),
    Section('Modelled, not measured', [_modelled(model) for model in models]),
    Section('How to read this', [_NOTES]),
  ]


def overview(model: Model) -> list[dict[str, str]]:
  """Returns the rows of a table for the terminal."""
  return [
    {'system': group.name} | _cells(group.figures, _OVERVIEW, ())
    for group in model.groups.values()
    if group.runs
  ]


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
    *_by_system(model),
    pictures.phases(model),
    _phases(model),
    pictures.skew(model),
    pictures.changes(model),
    _naive(model),
    pictures.thresholds(model),
    _thresholds(model),
  ]
  return [block for block in blocks if block is not None]


def _cells(
  figures: Mapping[str, Estimate | None],
  columns: Iterable[Column],
  with_interval: Sequence[Any] = _SURE,
) -> dict[str, str]:
  """Writes figures, with intervals where the form or the figure wants them."""
  cells = {}
  for title, figure, form in columns:
    wanted = form in with_interval or figure in with_interval
    cells[title] = (sure if wanted else middle)(figures.get(figure), form)
  return cells


def _by_system(model: Model) -> Iterator[Table]:
  """Yields the tables with a row per system."""
  more = _of_papers(model)
  if model.goal is not None:
    more['Time'] = (
      ' The last column is of one seed, and its AUC the lowest of the best of '
      'all systems.'
    )
  for title, (columns, about) in _BY_SYSTEM.items():
    groups = [
      group
      for key, group in model.groups.items()
      if key[1] != 'off' or 'skipped' not in title
    ]
    rows = [_cells(group.figures, columns) for group in groups]
    dull = (NONE, '0', '0 B')
    known = [x for x, *_ in columns if any(row[x] not in dull for row in rows)]
    lines = [
      {'system': group.name}
      | {
        x.format(goal=model.goal): row[x] if group.runs else 'failed'
        for x in known
      }
      for group, row in zip(groups, rows, strict=True)
      if known
    ]
    ours = [n for n, group in enumerate(groups) if group.key in CONTENDERS]
    yield Table(title, lines, about + more.get(title, ''), strong=ours)


def _of_papers(model: Model) -> dict[str, str]:
  """Returns what the papers say of a model, by the title of a table."""
  published = model.published
  if not published:
    return {}
  auc = f'{published["auc"]:.3f}' if published['auc'] else 'not given'
  least = 8 * published['tables'] * published['dim']
  return {
    'Quality': (
      f" The papers' full run on the real {published['data']}: AUC {auc}, log "
      f'loss {published["log_loss"]:.3f}, accuracy {published["accuracy"]:.4f}.'
    ),
    'Bytes moved': (
      f" FAE's paper has GB in {paper.EPOCHS_OF_BYTES} epochs of "
      f'{published["examples"]:,} examples. An example has {least:,} bytes of '
      'embeddings and gradients, so compare only ratios.'
    ),
  }


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
  misses = [*_misses(models)]
  return [
    *blocks,
    _against(models),
    *([misses] if misses else []),
    _between(models),
  ]


def _sentences(models: Sequence[Model], contender: Key) -> list[str]:
  """Says where Slipstream wins and loses against baselines and pinned rows."""
  policy = CONTENDERS[contender]
  others = {
    f'{model.short} against {model.groups[key].name}': model.groups[key].figures
    for model in models
    for key in (*BASELINES, ALL)
    if key in model.groups
  }

  def known(figure: str) -> dict[str, Estimate]:
    pairs = ((title, figures.get(figure)) for title, figures in others.items())
    return {title: x for title, x in pairs if x is not None}

  def listed(some: Mapping[str, Estimate]) -> str:
    words = ', '.join(f'{title}: {times(x.mean)}' for title, x in some.items())
    return f' ({words})' if words else ''

  def span(some: Mapping[str, Estimate], form: Form) -> str:
    values = sorted(x.mean for x in some.values())
    return ' to '.join(dict.fromkeys((form(values[0]), form(values[-1]))))

  sentences = [
    f'FAILED in every run of {model.short}.'
    for model in models
    if contender in model.groups and not model.groups[contender].runs
  ]
  if speeds := known(f'speed, {policy}'):
    faster = [x for x in speeds.values() if (x.low or x.mean) > 1]
    slower = {y: x for y, x in speeds.items() if (x.high or x.mean) < 1}
    sentences.append(
      f'Faster in {len(faster)} of {len(speeds)} comparisons with the '
      f"paper's baselines and with pinned rows, SLOWER in {len(slower)}"
      f'{listed(slower)}. The others cannot be told apart.'
      + ' Ratios of one seed have no interval.'
      * any(x.low is None for x in speeds.values())
    )
  claims, ideals = known('claim'), known(f'ideal, {policy}')
  if claimed := claims.keys() & speeds.keys():
    missed = [x for x in claimed if speeds[x].mean < claims[x].mean]
    below = [
      x for x in missed if x in ideals and ideals[x].mean < claims[x].mean
    ]
    sentences.append(
      "The mean reaches the paper's speed-up in "
      f'{len(claimed) - len(missed)} of {len(claimed)} comparisons. In '
      f'{len(below)} of the others, the estimate without overhead does not '
      'reach it either.'
    )
  if moved := known(f'bytes, {policy}'):
    more = {y: x for y, x in moved.items() if x.mean < _SAME}
    sentences.append(
      f'The others move {span(moved, times)} times its bytes of tables. It '
      f'moves MORE in {len(more)} comparisons{listed(more)}.'
    )
  if leads := known(f'AUC, {policy}'):
    sentences.append(f'Its AUC less that of the others: {span(leads, change)}.')
  return sentences


def _against(models: Sequence[Model]) -> Table:
  """Compares Slipstream with the paper's baselines on all models."""
  rows = []
  for model, (contender, policy), key in itertools.product(
    models, CONTENDERS.items(), BASELINES
  ):
    ours, group = model.groups.get(contender), model.groups.get(key)
    if ours is None or group is None:
      continue
    columns: list[Column] = [
      ('times as fast', f'speed, {policy}', times),
      ("paper's claim", 'claim', '{:.4g}'.format),
      ('without overhead', f'ideal, {policy}', times),
      ('bytes, times as many', f'bytes, {policy}', times),
      ('with dense', f'all bytes, {policy}', times),
      ('AUC, ours less its', f'AUC, {policy}', change),
    ]
    row = {'model': model.short, 'Slipstream': policy, 'against': group.name}
    row |= _cells(group.figures, columns)
    row[f'equal within {_EQUAL}'] = _equal(group.figures.get(f'AUC, {policy}'))
    both = [_modelled_ms(model, one) for one in (key, contender)]
    row['modelled'] = times(both[0] / both[1]) if all(both) else NONE
    if not ours.runs or not group.runs:
      row['times as fast'] = 'failed'
    rows.append(row)
  return Table(
    "Slipstream against the paper's baselines",
    rows,
    'Times as fast: above 1, Slipstream is faster. Without overhead: an '
    'estimate of the same if choosing took no time. Bytes: of tables, and with '
    'the dense parameters that XDL moves as well. Equal: whether the interval '
    f'of the AUC is within {_EQUAL} (yes), beyond it (no), or neither. '
    f'Modelled: the ratio over {_LINK} if a step takes {_STEP_MS:g} ms.',
  )


def _equal(lead: Estimate | None) -> str:
  """Says whether a difference of AUC is small enough not to matter."""
  if lead is None or lead.low is None or lead.high is None:
    return NONE
  if lead.low > -_EQUAL and lead.high < _EQUAL:
    return 'yes'
  return 'no' if lead.low > _EQUAL or lead.high < -_EQUAL else 'unknown'


def _modelled_ms(model: Model, key: Key) -> float:
  """Returns the modelled ms per batch of a system, 0 if it is not known."""
  runs = [*model.groups[key].runs.values()]
  spent = phases_of(model).get(key, {})
  counts = link.counts_of(runs, spent, model.facts)
  if counts is None:
    return 0.0
  return link.modelled(counts, link.LINKS[_LINK], _STEP_MS).ms_per_batch


def _misses(models: Sequence[Model]) -> Iterator[str]:
  """Says why a speed-up of the paper is not reached, cell by cell."""
  for model, (contender, policy), key in itertools.product(
    models, CONTENDERS.items(), BASELINES
  ):
    ours, group = model.groups.get(contender), model.groups.get(key)
    if ours is None or group is None:
      continue
    figures = group.figures
    speed, claim = figures.get(f'speed, {policy}'), figures.get('claim')
    pinned, dropped = (
      ratio(group, model.groups.get(ALL), 'pace'),
      ours.figures.get('dropped'),
    )
    if not (speed and claim and pinned and dropped) or speed.mean >= claim.mean:
      continue
    most, spent = 1 / (1 - dropped.mean), ours.figures.get('overhead')
    cap = pinned.mean * most
    enough = 'would be enough' if cap >= claim.mean else 'is below the claim'
    yield (
      f'{model.short}, {policy}, against {group.name}: {times(speed.mean)} of '
      f'{claim.mean:g}. Pinned rows alone give {times(pinned.mean)}, and '
      f'leaving out {percent(dropped.mean)} gives at most {times(most)}: '
      f'{times(cap)} in all, which {enough}.'
      + (f' Choosing and windows take {percent(spent.mean)}.' if spent else '')
    )


def _between(models: Sequence[Model]) -> Table:
  """Compares the baselines with one another."""
  rows = []
  for faster, slower, claim, source in paper.BETWEEN:
    slow, fast = (slower, 'off'), (faster, 'off')
    ratios = {
      model.short: ratio(model.groups.get(slow), model.groups.get(fast), 'pace')
      for model in models
    }
    if any(ratios.values()):
      pair = {'faster': name(fast), 'slower': name(slow), 'claim': f'{claim:g}'}
      ours = {model: middle(value, times) for model, value in ratios.items()}
      rows.append({**pair, 'claimed by': source, **ours})
  return Table(
    'Baselines against one another',
    rows,
    'What their papers claim, on devices and links of their own, and the ratio '
    'of seconds here.',
  )


def _setting(model: Model) -> Table:
  """Compares what was run with what the paper ran."""
  theirs = dict(model.published)
  runs = [run for group in model.groups.values() for run in group.runs.values()]
  seen, hot = (mean(runs, f'examples_{x}') for x in ('seen', 'hot_share'))
  ours = {
    **model.facts,
    'examples_seen': round(seen.mean) if seen else None,
    'examples_hot_share': hot.mean if hot else None,
  }
  if ours.get('rows') and 'hot_rows' in ours:
    ours['hot_share'] = ours['hot_rows'] / ours['rows']
  if theirs:
    theirs['drop'] = paper.DROP_TARGET
  count = '{:,}'.format
  lines: list[tuple[str, str, str, Callable[[Any], str]]] = [
    ('rows of all tables', 'rows', 'rows', count),
    ('dim', 'dim', 'dim', count),
    ('tables', 'tables', 'tables', count),
    ('lookups per example', 'features_per_example', '', count),
    ('bytes of the tables', 'row_bytes', 'table_bytes', size),
    ('batch size', 'batch_size', 'batch_size', count),
    ('examples of a run', 'examples_seen', 'examples', count),
    ('hot rows, of all', 'hot_share', 'hot_bytes_share', percent),
    ('hot examples, of all', *('examples_hot_share',) * 2, percent),
    ('drop target, of hot examples', 'drop_target', 'drop', percent),
    ('default policy', 'policy', '', str),
    ('dense parameters', 'dense_parameters', '', count),
  ]
  rows = [
    (title, form(ours[key]), form(theirs[far]) if far in theirs else NONE)
    for title, key, far, form in lines
    if ours.get(key) is not None
  ]
  about = f'Here: {ours.get("data", "unknown data")}. ' + (
    f'The papers: {theirs["data"]}, on GPUs, the whole data set in a run.'
    if theirs
    else 'No paper has this model.'
  )
  return Table(
    'Setting',
    [
      {'': title, 'here': here, 'paper': far}
      for title, here, far in [*rows, *_skew(model)]
    ],
    about,
  )


def _skew(model: Model) -> list[tuple[str, str, str]]:
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
    (
      f'lookups of the most popular {title}',
      percent(float(np.interp(count, ranks, shares))),
      NONE,
    )
    for title, count in counts.items()
    if count >= ranks[0]
  ]


def _phases(model: Model) -> Table:
  """Compares the milliseconds of each phase."""
  spent = phases_of(model)
  about = 'Phases overlap: they add up to work, not to the time of a batch.'
  alike = [spent.get((system, 'off'), {}) for system in _ONE_PROGRAM]
  same = [ms['step'] for ms in alike if 'step' in ms]
  if len(same) > 1:
    about += (
      ' Systems take turns, a batch each. `step` is the same program for '
      f'{len(same)} of them, on blocks of their own rows, and took '
      f'{min(same):.2f} to {max(same):.2f} ms.'
    )
  known = [x for x in PHASES if any(x in ms for ms in spent.values())]
  return Table(
    'Time by phase, ms per batch',
    [
      {'system': name(key)}
      | {x: f'{ms[x]:.3f}' if x in ms else NONE for x in known}
      for key, ms in spent.items()
    ],
    about,
  )


def _naive(model: Model) -> Table:
  """Lists what it costs if all hot or all cold rows are frozen."""
  rows = model.rows['naive']
  base = {x['seed']: x.get('accuracy') for x in rows if x['variant'] == 'none'}
  lines = []
  for variant, title in _FROZEN.items():
    mine = [row for row in rows if row['variant'] == variant]
    lost = [
      base[row['seed']] - row['accuracy']
      for row in mine
      if 'accuracy' in row and base.get(row['seed']) and variant != 'none'
    ]
    figures = {column: mean(mine, column) for _, column, _ in _NAIVE}
    figures['accuracy lost'] = estimates.mean(lost)
    cells = _cells(figures, _NAIVE, ['accuracy lost'])
    lines.append({'after the warm-up': title} | cells)
  low, high = paper.NAIVE_LOSS
  about = f'In the paper either costs {low:.0%} to {high:.0%} of accuracy.'
  return Table('Naive skipping', lines if rows else [], about)


def _thresholds(model: Model) -> Table:
  """Lists threshold, drop rate and quality by drop target."""
  rows = model.rows['threshold']
  lines = []
  for target in sorted({row['drop_target'] for row in rows}):
    mine = [row for row in rows if row['drop_target'] == target]
    figures = {column: mean(mine, column) for _, column, _ in _THRESHOLDS}
    cells = _cells(figures, _THRESHOLDS, ['auc'])
    lines.append({'drop target': f'{target:.0%}'} | cells)
  return Table(
    'Threshold, drop rate and quality',
    lines,
    'Drop rate: of the hot examples that came while skipping.',
  )


def _modelled(model: Model) -> Table:
  """Lists the times that the model of the link gives."""
  lines = []
  spent = phases_of(model)
  for key, group in model.groups.items():
    runs = [*group.runs.values()]
    counts = link.counts_of(runs, spent.get(key, {}), model.facts)
    if counts is None:
      continue
    for step_ms in link.STEP_MS:
      modelled = {
        title: link.modelled(counts, one, step_ms)
        for title, one in link.LINKS.items()
      }
      binds = dict.fromkeys(x.binds for x in modelled.values())
      lines.append(
        {'system': group.name, 'device step, ms': f'{step_ms:g}'}
        | {x: f'{time.ms_per_batch:.3f}' for x, time in modelled.items()}
        | {'what binds': ' or '.join(binds).replace('_', ' ')}
      )
  return Table(
    model.short,
    lines,
    'MODELLED, not measured: ms per batch of the source over each link, and '
    'what binds, from exact counts of bytes, stated rates, and phases of the '
    'host as measured.',
  )
