"""Carries a case out, beside the oracle."""

import functools
import itertools
import math

import numpy as np

import slipstream_jax as slip
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.fuzz import sources
from tests.fuzz.cases import columns
from tests.fuzz.oracle import Oracle
from tests.fuzz.spoils import SPOILS
from tests.fuzz.worlds import on_host, recipe, tables

EPSILON = {'float32': 0.0, 'float16': 2**-10, 'bfloat16': 2**-7}


class Run:
  """A case under way.

  What a user gives goes through `value`, under a name; there the one thing is
  changed that the case spoils.
  """

  def __init__(self, case):
    self.case, self.world = case, case.world
    self.spoil = SPOILS[case.spoil] if case.spoil else None
    self.tables = tables(self.world)
    self.rng = np.random.default_rng(case.seed + 1)
    self.source = self.trainer = None

  def value(self, at, value):
    """What is given where a good program gives `value`."""
    if self.spoil is not None and self.spoil.at == at:
      return self.spoil.change(value, self)
    return value

  def without_hot(self, name):
    """A placement for a trainer that gets no hot rows."""
    self.hot = None
    return slip.PLACEMENTS[name]

  def run(self):
    """All of it; raises AssertionError where the numbers are others."""
    self.build()
    for each in self.case.rounds:
      self.train(each)
    self.evaluate()
    self.compare_rows()

  def abandon(self):
    """Lets go of a case that hangs: what still reads fails."""
    if self.source is not None:
      self.source.dead = True

  def build(self):
    """Tables, columns, recipe and trainer."""
    world = self.world
    given = self.value('tables', self.tables)
    self._choose_hot()
    made = recipe(world)
    if given is not self.tables:
      made = made._replace(tables=given)
    self._make_columns()
    placement = self.value('placement', self._placement())
    self.trainer = make_parts(
      self.value('recipe', made),
      placement,
      self.value('dense_features', world.dense),
      self.value('seed', 0),
      self.hot,
    )
    self.first = {
      name: (rows.copy(), [leaf.copy() for leaf in state])
      for name, (rows, state) in self.by_table().items()
    }
    rows = {name: rows for name, (rows, _) in self.first.items()}
    params = on_host(self.trainer.state.params)
    self.oracle = Oracle(world, rows, params)

  def by_table(self):
    """Rows and the leaves of their state now, by table name."""
    found = {}
    blocks = self.trainer.engine.read_back()
    for group, block in zip(self.tables.groups, blocks, strict=True):
      start = 0
      for name in group.tables:
        end = start + self.tables.tables[name].rows
        state = [on_host(leaf)[start:end] for leaf in block.state]
        found[name] = on_host(block.rows)[start:end], state
        start = end
    return found

  def _choose_hot(self):
    case, num_rows = self.case, self.tables.num_rows
    self.hot = None
    needed = bool({'pinned', 'static', 'swapped'} & {*case.placements})
    needed |= any(each.skips is not None for each in case.rounds)
    if case.hot or needed or (self.spoil and self.spoil.at == 'hot'):
      rows = self.rng.permutation(num_rows)[: self.world.hot]
      self.hot = hot_rows(self.value('hot', rows), num_rows)

  def _placement(self):
    case = self.case
    made = [
      slip.PLACEMENTS.get(name)
      or slip.cached(case.capacity, name, case.look_ahead)
      for name in case.placements
    ]
    return made[0] if len(made) == 1 else made

  def _make_columns(self):
    made = columns(self.case)
    ids = self.value('ids', made['ids'])
    meant = np.asarray(ids)
    starts = self.tables.column_rows[0].reshape(self.tables.example_shape)
    if len({*self.world.lengths}) == 1:
      lookups = self.tables.lookups(ids)
      meant = meant.astype(np.int64)
      np.testing.assert_array_equal(
        lookups, np.where(meant < 0, -1, meant + starts)
      )
    else:
      lookups = np.where(meant < 0, -1, meant.astype(np.int64) + starts)
    self.columns = {
      name: self.value(name, made[name])
      for name in ('dense', 'labels', 'weights')
    }
    self.columns['lookups'] = self.value('lookups', lookups)
    self.columns['lookup_weights'] = made.get('lookup_weights')

  # Training.

  def train(self, each):
    """A Round, and the same steps by the oracle."""
    batches = self._batches(each)
    seen = sources.Seen(batches)
    before, records = self._steps(), []
    try:
      for record in train(self.trainer, seen, self.value('steps', each.steps)):
        records.append(record)
    finally:
      batches.close()
      taken = self._steps() - before
      losses = self._follow(seen.emitted[:taken], each)
    if each.skips is None:
      assert taken == self._wanted(each), 'steps'
    assert [r.step for r in records] == list(
      range(before + 1, before + taken + 1)
    )
    tolerance = self._tolerance()
    np.testing.assert_allclose([r.loss for r in records], losses, **tolerance)
    if each.skips is not None:
      self._check_skipping(seen.emitted, each)

  def _steps(self):
    return int(on_host(self.trainer.state.step))

  def _batches(self, each):
    case = self.case
    size = self.value('batch_size', case.batch)
    epochs, reuses = each.epochs, each.reuses and each.own
    own = sources.cut(self.columns, case.batch, case.pads)
    own = [self.value('batch', batch) for batch in own]
    inner = None if each.own else self._column_batches(size, each)
    self.source = sources.Source(own, epochs, reuses, inner)
    depth = self.value('depth', each.depth)
    if each.skips is None:
      return planned(self.trainer, self.source, depth)
    return slipstream(
      self.trainer,
      self.source,
      self.value('settings', each.skips.settings),
      each.skips.batches,
      depth,
    )

  def _column_batches(self, size, each):
    return ColumnBatches(
      Columns(*(self.columns[name] for name in Columns._fields)),
      size,
      shuffle_seed=each.shuffle,
      epochs=each.epochs,
      pad_remainder=self.case.pads,
    )

  def _follow(self, emitted, each):
    """The oracle's losses of what was trained."""
    if each.skips is None:  # it knows by itself what that must be
      batches = self._expected(each, len(emitted))
      for item, batch in zip(emitted, batches, strict=True):
        for one, other in zip(item.batch, batch, strict=True):
          if one is None or other is None:
            assert one is other
            continue
          np.testing.assert_array_equal(one, other)
    losses = []
    none = np.empty(0, np.int64)
    self.oracle.hold(none)
    for item in emitted:
      if item.edge.refreezes:
        hot = self.trainer.engine.hot.rows
        self.oracle.hold(none if item.edge.opens else hot[item.edge.stale])
      with np.errstate(all='ignore'):  # of NaN that is to be refused
        losses.append(self.oracle.step(item.batch))
    return losses

  def _expected(self, each, count):
    if each.shuffle is not None and not each.own:
      return self.source.given[:count]
    columns = self.columns
    if not each.own:
      columns = columns | {'weights': np.ones(self.case.examples)}
    batches = sources.cut(columns, self.case.batch, self.case.pads)
    return list(itertools.islice(itertools.cycle(batches), count))

  def _wanted(self, each):
    case = self.case
    steps = max(0, self.value('steps', each.steps))
    per_epoch = case.whole + (case.rest > 0 and case.pads)
    return min(steps, per_epoch * (each.epochs or math.inf))

  def _check_skipping(self, emitted, each):
    """Examples come from the source, in its order, none twice or made up."""
    given = _examples(self.source.given)
    settings, found = each.skips.settings, _examples(e.batch for e in emitted)
    left = iter(given)
    for key, weight in found:
      # Of examples with equal values only the weight tells which was left out.
      of_source = (
        w
        for other, w in left
        if other == key and w * (1 - 1e-6) <= weight <= w / 0.05 * (1 + 1e-6)
      )
      known = next(of_source, None)
      assert known is not None, 'an example that the source did not give'
    if settings.mode == 'rows' or settings.drop == 0:
      assert found == given[: len(found)]

  # Afterwards.

  def evaluate(self):
    """Scores the examples, where the case asks for it."""
    spoilt = self.spoil is not None and self.spoil.at == 'held_out'
    if not (self.case.evaluates or spoilt):
      return
    kind = self.value('held_out', 'all')
    own = [] if kind == 'nothing' else None
    inner = None
    if own is None:
      whole = self.case.rounds[0]._replace(
        shuffle=None, epochs=None if kind == 'endless' else 1
      )
      inner = self._column_batches(self.case.batch, whole)
    self.source = sources.Source(own, 1, inner=inner)
    metrics = evaluate(self.trainer, self.source)
    if kind != 'all':
      return
    count = self.case.examples
    if not self.case.pads:
      count -= self.case.rest
    names = 'dense', 'lookups', 'labels', 'lookup_weights'
    scored = [
      None if self.columns[name] is None else np.asarray(self.columns[name])
      for name in names
    ]
    scored = [x if x is None else x[:count] for x in scored]
    scored[2] = np.ravel(scored[2])  # of [n, 1]
    assert metrics.examples == count
    expected = self.oracle.log_loss(*scored).mean()
    np.testing.assert_allclose(metrics.log_loss, expected, **self._tolerance())

  def _tolerance(self):
    """Of anything that training changes."""
    tables = self.oracle.tables.values()
    size = max(1.0, *(float(np.abs(table.rows).max()) for table in tables))
    error = max(EPSILON[table.dtype] for table in self.world.tables.values())
    error *= size * (self.oracle.steps + 1)
    return {'rtol': 1e-3 + error, 'atol': 1e-4 + error}

  def compare_rows(self):
    """All rows, their state and the parameters, with the oracle's."""
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    close = functools.partial(np.testing.assert_allclose, **self._tolerance())
    for name, (rows, state) in self.by_table().items():
      oracle, (first, first_state) = self.oracle.tables[name], self.first[name]
      rest = ~oracle.touched
      same(rows[rest].view(np.uint8), first[rest].view(np.uint8))
      for leaf, before in zip(state, first_state, strict=True):
        same(leaf[rest], before[rest])
      close(rows.astype(float), oracle.rows)
      for leaf, expected in zip(state, oracle.state, strict=True):
        close(leaf, expected)
    params = on_host(self.trainer.state.params)
    for name, expected in self.oracle.params.items():
      close(params[name], expected, err_msg=name)


def _examples(batches):
  """What tells each real example from others, and its weight."""
  found = []
  for batch in batches:
    dense, lookups, labels, weights, *_ = batch
    for i in np.flatnonzero(weights > 0):
      values = np.concatenate(
        [dense[i], lookups[i].ravel(), labels[i : i + 1].ravel()]
      )
      found.append((values.astype(np.float64).tobytes(), float(weights[i])))
  return found
