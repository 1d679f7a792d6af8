"""Whatever is missing, failed or zero, there is a page, and it is honest."""

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.pages import html, markdown
from experiments.reproduce import page
from experiments.reproduce.report import pictures, sentences
from experiments.reproduce.report.groups import (
  BASELINES,
  CONTENDERS,
  groups,
  OURS,
  pace,
  Reproduction,
  times,
)
from experiments.reproduce.results import Cell
from tests.reproduce import drawn

_KEPT = 5  # fields that every line has: what it is of


def holed(line, rng, share, kept):
  """A line some of whose figures are not known, or 0."""
  values = list(line)
  for at in range(kept, len(values)):
    if values[at] is not None and rng.random() < share:
      values[at] = rng.choice([None, 0])
  return type(line)(*values)


def odd(seed, share):
  """A reproduction of any two models, with holes."""
  rng = random.Random(seed)
  numbers = np.random.default_rng(seed)
  models = rng.sample(drawn.MODELS, 2)
  failed = [
    (rng.choice(models), *rng.choice(drawn.KEYS), rng.choice([0, 1, None]))
    for _ in range(rng.randrange(8))
  ]
  cells = drawn.cells(numbers, models, rng.randrange(1, 4), failed)
  cells = rng.sample(cells, rng.randrange(len(cells) + 1))
  by_kind = {}
  for line in drawn.others(numbers, models, 2):
    by_kind.setdefault(type(line).__name__, []).append(line)
  some = {
    kind: rng.sample(lines, rng.choice([0, 1, len(lines)]))
    for kind, lines in by_kind.items()
  }
  setting = drawn.setting(models) if rng.random() < 0.7 else {}
  for ours in setting.get('models', {}).values():
    for key in rng.sample(list(ours), rng.randrange(4)):
      del ours[key]
  kept = {'Point': 5, 'Phase': 5, 'Naive': 3, 'Threshold': 3}

  def lines_of(kind):
    lines = some.get(kind, [])
    if kind not in kept:
      return lines
    return [holed(line, rng, share, kept[kind]) for line in lines]

  return Reproduction(
    setting,
    [holed(cell, rng, share, _KEPT) for cell in cells],
    *(
      lines_of(kind)
      for kind in ('Point', 'Phase', 'Skew', 'RowChange', 'Naive')
    ),
    lines_of('Threshold'),
    lines_of('Modelled'),
  )


odd_ones = st.builds(odd, st.integers(0, 10**6), st.sampled_from([0, 0.1, 0.6]))


@settings(max_examples=40, deadline=None)
@given(odd_ones)
def test_any_part_gives_a_page(results):
  undrawn = pytest.MonkeyPatch()
  with undrawn.context() as patch:
    patch.setattr(pictures, 'of_systems', lambda *_: [])
    patch.setattr(pictures, 'of_rows', lambda *_: [])
    head, sections = page.content(results)
  for text in (
    html.document('x', sections, head),
    markdown.document('x', sections, head),
  ):
    assert not re.search(r'\b(nan|inf|None)\b', text)


@pytest.mark.parametrize('seed', range(4))
def test_any_part_can_be_drawn(seed):
  results = odd(seed, 0.3)
  for model in results.models:
    for picture in (
      *pictures.of_systems(results, model),
      *pictures.of_rows(results, model),
    ):
      assert picture.svg.startswith('<svg ')
      assert picture.name.startswith(f'{model}-')


@settings(max_examples=40, deadline=None)
@given(odd_ones, st.sampled_from(list(CONTENDERS)))
def test_a_comparison_is_won_or_lost_or_open(results, contender):
  """Every ratio that is known stands in one sentence on time, and in no two."""
  said = sentences.summary(results, contender)
  sides = [
    x
    for x in said
    if x.startswith(('Faster', 'SLOWER', 'In time not to be told'))
  ]
  known = 0
  for model in results.models:
    all_groups = groups(results, model)
    for system in (*BASELINES, 'pinned'):
      pair = all_groups.get((system, 'off')), all_groups.get(contender)
      known += times(*pair, pace) is not None
  counted = 0
  for side in sides:
    for inner in re.findall(r'\(([^)]*)\)', side):
      if ': ' in inner:
        counted += inner.count(': ')
      elif '; ' in inner:
        counted += 1 + inner.count(' and ')
      else:
        counted += len(results.models)
  assert counted == known


def test_the_order_of_lines_says_nothing():
  rng = np.random.default_rng(3)
  cells = drawn.cells(rng, ('rm1',), 3)
  shuffled = random.Random(0).sample(cells, len(cells))
  one, other = Reproduction({}, cells), Reproduction({}, shuffled)
  assert sentences.summary(one, OURS) == sentences.summary(other, OURS)
  assert all(isinstance(cell, Cell) for cell in cells)
