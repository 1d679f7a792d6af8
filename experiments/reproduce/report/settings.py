"""Tables of what was run, of what papers claim, and of modelled times."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.pages import words
from experiments.pages.blocks import Table
from experiments.pages.words import middle, number
from experiments.reproduce.report import paper
from experiments.reproduce.report.groups import (
  groups,
  in_order,
  Key,
  name,
  pace,
  Reproduction,
  short,
  times,
)
from experiments.reproduce.results import Modelled


def setting(results: Reproduction, model: str) -> Table:
  """What was run, beside what the paper ran."""
  ours = results.setting_of(model)
  if not ours:
    return Table('', [])
  published = paper.MODELS.get(model)
  rows, dim = ours.get('rows'), ours.get('dim')
  hot = ours.get('hot_rows')
  seen = _most([x.examples_seen for x in results.cells if x.model == model])
  shares = [
    x.examples_hot_share
    for x in results.cells
    if x.model == model and x.examples_hot_share is not None
  ]
  there: dict[str, Any] = published._asdict() if published else {}
  lines = [
    ('rows of all tables', rows, there.get('rows'), '{:,}'),
    ('dim', dim, there.get('dim'), '{}'),
    ('tables', ours.get('tables'), there.get('tables'), '{}'),
    ('lookups per example', ours.get('features_per_example'), None, '{:,}'),
    (
      'bytes of the tables',
      ours.get('row_bytes'),
      there.get('table_bytes'),
      '',
    ),
    ('batch size', ours.get('batch_size'), there.get('batch_size'), '{:,}'),
    ('examples of a run', seen, there.get('examples'), '{:,}'),
    (
      'hot rows, of all',
      hot / rows if hot is not None and rows else None,
      there.get('hot_bytes_share'),
      '{:.1%}',
    ),
    (
      'hot examples, of all',
      float(np.mean(shares)) if shares else None,
      there.get('examples_hot_share'),
      '{:.1%}',
    ),
    (
      'drop target, of hot examples',
      ours.get('drop_target'),
      paper.DROP_TARGET if published else None,
      '{:.0%}',
    ),
    ('default policy', ours.get('policy'), None, '{}'),
    ('dense parameters', ours.get('dense_parameters'), None, '{:,}'),
  ]
  frame = [
    {'': title, 'here': _text(here, form), 'paper': _text(far, form)}
    for title, here, far, form in lines
    if here is not None
  ]
  about = f'Here: {ours.get("data", "data that nothing is said of")}. '
  about += (
    f'The papers: {published.data}, on GPUs, the whole data set in a run.'
    if published
    else 'No paper has this case.'
  )
  return Table('Setting', frame, about)


def _text(value: Any, form: str) -> str:
  return number(value, form) if form else words.bytes_of(value)


def _most(values: Sequence[int | None]) -> int | None:
  return max((x for x in values if x is not None), default=None)


def between(results: Reproduction) -> Table:
  """What papers claim of one baseline over another, and what we see."""
  frame = []
  for claim in paper.BETWEEN:
    row = {
      'faster': name((claim.faster, 'off')),
      'than': name((claim.slower, 'off')),
      'claim': f'{claim.times:g}',
      'of': f'{claim.paper} ({claim.setting})',
    }
    known = False
    for model in results.models:
      by_key = groups(results, model)
      slower, faster = (
        by_key.get((claim.slower, 'off')),
        by_key.get((claim.faster, 'off')),
      )
      ratio = times(slower, faster, pace)
      known |= ratio is not None
      row[short(model)] = middle(ratio, words.times)
    if known:
      frame.append(row)
  return Table(
    'Baselines against one another',
    frame,
    'What their papers claim, on devices and links of their own, and the '
    'ratio of seconds here.',
  )


def modelled(results: Reproduction) -> list[Table]:
  """Times that a model of the link gives: one table by device step."""
  tables: dict[tuple[str, float], dict[Key, list[Modelled]]] = {}
  for line in results.modelled:
    rows = tables.setdefault((line.model, line.device_step_ms), {})
    rows.setdefault((line.system, line.skip), []).append(line)
  links = dict.fromkeys(line.link for line in results.modelled)
  return [
    Table(
      f'{short(model)}, a device step of {step_ms:g} ms, modelled',
      [
        _modelled(key, rows[key], list(links))
        for key in in_order(rows, results, model)
      ],
      'MODELLED, not measured: ms per batch over each link, and what binds. '
      'Exact counts of bytes, stated rates, phases of the host as measured.',
    )
    for (model, step_ms), rows in tables.items()
  ]


def _modelled(
  key: Key, lines: Sequence[Modelled], links: Sequence[str]
) -> dict[str, str]:
  ms = {line.link: f'{line.ms_per_batch:.3f}' for line in lines}
  binds = dict.fromkeys(line.binds.replace('_', ' ') for line in lines)
  return {
    'system': name(key),
    **{link: ms.get(link, words.NONE) for link in links},
    'what binds': '; or '.join(binds),
  }
