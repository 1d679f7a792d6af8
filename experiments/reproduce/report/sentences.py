"""Sentences on what the runs show: where Slipstream wins and where it loses."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.pages import machine, words
from experiments.pages.estimates import Estimate
from experiments.reproduce.report import paper
from experiments.reproduce.report.groups import (
  auc,
  BASELINES,
  Group,
  groups,
  Key,
  less,
  moved,
  pace,
  PINNED,
  Reproduction,
  short,
  times,
  without_overhead,
)

AUC_CLOSE = 0.0005
"""A difference of AUC that is none."""
_SAME = 0.005  # of a ratio of bytes: the others read 1.00
_LONG_BAGS = 1.5  # lookups per feature, from which on bags are multi-hot


def of_run(results: Reproduction) -> list[str]:
  """What was run, where, and for how long."""
  setting = results.setting
  parts = machine.in_words(setting)
  peak = setting.get('peak_memory_bytes')
  if peak is not None:
    parts.append(f'peak memory {words.bytes_of(peak)}')
  failed = sum(bool(x.status != 'ok') for x in results.cells)
  count = f'{len(results.cells)} runs'
  if failed:
    count += f', {failed} of which failed'
  return [*parts, count] if results.cells else parts


def synthetic(results: Reproduction) -> str:
  """That data are made up, if they are."""
  loud = [
    short(model)
    for model in results.models
    if results.setting_of(model).get('synthetic')
  ]
  if not loud:
    return ''
  return (
    f'SYNTHETIC DATA: {words.joined(loud)}. Figures of these say nothing about '
    'real clicks; AUC, drop rates and skew are those of a made-up law.'
  )


class _Seen(NamedTuple):
  """A comparison of Slipstream with one system, on one model."""

  model: str
  title: str
  group: Group
  value: Estimate


def summary(results: Reproduction, contender: Key) -> list[str]:
  """What one contender wins and loses in time, bytes and AUC."""
  sentences = [
    *_failed(results, contender),
    *_time(results, contender),
    *_bytes(results, contender),
    *_quality(results, contender),
  ]
  return [f'{sentence}.' for sentence in sentences]


def pooling(results: Reproduction) -> list[str]:
  """Where pooling on the host moves less than rows do."""
  sentences = []
  for model in results.models:
    all_groups = groups(results, model)
    pooled = all_groups.get(('dlrm_hybrid', 'off'))
    rows = times(all_groups.get(('plain', 'off')), pooled, moved)
    if rows is not None and rows.mean > 1:
      sentences.append(
        f'{short(model)}: pooling on the host moves LESS than '
        f'streaming rows does, which takes {words.times(rows.mean)} times as '
        f'many bytes{_why(results, model)}.'
      )
  return sentences


def _why(results: Reproduction, model: str) -> str:
  ours = results.setting_of(model)
  lookups, tables = ours.get('features_per_example'), ours.get('tables')
  if not lookups or not tables or lookups / tables < _LONG_BAGS:
    return ''
  return (
    f': a bag of {lookups / tables:g} lookups crosses as one embedding, or as '
    'up to that many rows'
  )


def _seen(
  results: Reproduction,
  contender: Key,
  compare: Callable[[Group, Group], Estimate | None],
  every: bool = False,
) -> list[_Seen]:
  """The comparisons with the paper's baselines and pinned rows, or with all.

  Args:
    results: of the reproduction.
    contender: whom of ours to compare.
    compare: another system, then the contender.
    every: whether with every system that skips nothing.
  """
  seen = []
  for model in results.models:
    all_groups = groups(results, model)
    ours = all_groups.get(contender)
    for key, group in all_groups.items():
      named = key[0] in BASELINES or key == PINNED
      if ours is None or key[1] != 'off' or not (named or every):
        continue
      value = compare(group, ours)
      if value is not None:
        seen.append(_Seen(model, short(model), group, value))
  return seen


def _ranges(seen: Sequence[_Seen], form: words.Form, models: int) -> str:
  """Systems, and the range of each over its models; these, if not all."""
  parts = []
  for lines in _by_name(seen):
    values = sorted(line.value.mean for line in lines)
    ends = dict.fromkeys(form(value) for value in (values[0], values[-1]))
    text = ' to '.join(ends)
    if len(lines) < models:
      text += f'; {words.joined([line.title for line in lines])}'
    parts.append(f'{lines[0].group.name} ({text})')
  return words.joined(parts)


def _figures(seen: Sequence[_Seen], form: words.Form) -> str:
  """Systems, and the figure of each on each model."""
  return words.joined(
    [
      f'{lines[0].group.name} ('
      + '; '.join(f'{x.title}: {form(x.value.mean)}' for x in lines)
      + ')'
      for lines in _by_name(seen)
    ]
  )


def _by_name(seen: Sequence[_Seen]) -> list[list[_Seen]]:
  names = dict.fromkeys(line.group.name for line in seen)
  return [[line for line in seen if line.group.name == x] for x in names]


def _failed(results: Reproduction, contender: Key) -> list[str]:
  failed = [
    short(model)
    for model in results.models
    if (ours := groups(results, model).get(contender)) is not None
    and not ours.cells
  ]
  return [f'FAILED in every run of {words.joined(failed)}'] if failed else []


def _time(results: Reproduction, contender: Key) -> list[str]:
  seen = _seen(results, contender, lambda a, b: times(a, b, pace))
  faster = [x for x in seen if _bounds(x.value)[0] > 1]
  slower = [x for x in seen if _bounds(x.value)[1] < 1]
  neither = [x for x in seen if x not in faster and x not in slower]
  many = len(results.models)
  sentences = []
  if faster:
    text = _ranges(faster, words.times, many)
    sentences.append(f'Faster than {text}: its seconds over ours')
  if slower:
    sentences.append(
      f'SLOWER than {_figures(slower, words.times)}: its seconds over ours'
    )
  if neither:
    text = _figures(neither, words.times)
    sentences.append(f'In time not to be told apart from {text}')
  if any(line.value.low is None for line in seen):
    sentences.append('Some of these ratios are of one seed, without interval')
  return sentences + _claims(results, contender, seen)


def _bounds(estimate: Estimate) -> tuple[float, float]:
  """Of its interval; one seed is taken at its word."""
  if estimate.low is None or estimate.high is None:
    return estimate.mean, estimate.mean
  return estimate.low, estimate.high


def _claims(
  results: Reproduction, contender: Key, seen: Sequence[_Seen]
) -> list[str]:
  claims = [
    (line, paper.CLAIMS[line.group.key[0]])
    for line in seen
    if line.group.key[0] in paper.CLAIMS and line.model in paper.MODELS
  ]
  if not claims:
    return []
  missed = [(line, claim) for line, claim in claims if line.value.mean < claim]
  limited = [
    f'{line.title} against {line.group.name} ({words.times(ideal.mean)} < '
    f'{claim:.4g})'
    for line, claim in missed
    if (ideal := _ideal(results, contender, line)) is not None
    and ideal.mean < claim
  ]
  sentences = [
    f"The mean reaches the paper's speed in {len(claims) - len(missed)} of "
    f'{len(claims)} comparisons'
  ]
  if limited:
    sentences.append(
      'Without any overhead it would, by estimate, still be below the claim in '
      f'{len(limited)} of the {len(missed)} others: {words.joined(limited)}'
    )
  return sentences


def _ideal(
  results: Reproduction, contender: Key, line: _Seen
) -> Estimate | None:
  all_groups = groups(results, line.model)
  return without_overhead(all_groups, line.group, contender)


def _bytes(results: Reproduction, contender: Key) -> list[str]:
  seen = _seen(results, contender, lambda a, b: times(a, b, moved), every=True)
  many = len(results.models)
  fewer = [line for line in seen if line.value.mean > 1 + _SAME]
  more = [line for line in seen if line.value.mean < 1 - _SAME]
  same = [line for line in seen if line not in fewer and line not in more]
  sentences = []
  if fewer:
    text = _ranges(fewer, words.times, many)
    sentences.append(f'Fewer bytes of tables than {text}: its bytes over ours')
  if more:
    text = _figures(more, words.times)
    sentences.append(f'MORE bytes of tables than {text}: its bytes over ours')
  if same:
    text = _ranges(same, words.times, many)
    sentences.append(f'As many bytes of tables as {text}')
  return sentences


def _quality(results: Reproduction, contender: Key) -> list[str]:
  seen = _seen(results, contender, lambda a, b: less(b, a, auc))
  many = len(results.models)
  lower = [line for line in seen if line.value.mean < -AUC_CLOSE]
  higher = [line for line in seen if line.value.mean > AUC_CLOSE]
  close = [line for line in seen if abs(line.value.mean) <= AUC_CLOSE]
  sentences = []
  if lower:
    text = _ranges(lower, words.change, many)
    sentences.append(f'AUC LOWER than that of {text}')
  if higher:
    text = _ranges(higher, words.change, many)
    sentences.append(f'AUC higher than that of {text}')
  if close:
    text = _ranges(close, words.change, many)
    sentences.append(f'AUC within {AUC_CLOSE:g} of {text}')
  return sentences
