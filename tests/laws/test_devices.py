"""The number of devices changes no number.

On eight devices of a CPU. The runs are compared with those of one device that
computes as many parts.
"""

import collections
import contextlib
import functools
import re

from flax import nnx
import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.engine.planner import Slices
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.store.base import Storage
from slipstream_jax.store.tiered import TieredStore
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import market, small
from tests.support.small import assert_same_bits, BATCH

PARTS = 8
PLACED = PLACEMENTS | {'cached': cached(8, look_ahead=3)}


MAKE = {
  'float32': small.recipe,
  **{
    dtype: functools.partial(small.recipe, table_dtype=dtype)
    for dtype in ('bfloat16', 'float16')
  },
}


@functools.cache
def run(
  devices,
  placement='streamed',
  optimizer='adagrad',
  steps=12,
  make=small.recipe,
  exchange='float32',
  replicas=1,
  hosts=1,
):
  """All rows, their state and the rest after some steps, and the losses."""
  length = small.STEPS if make is small.sequence_recipe else 2
  columns = small.columns(BATCH * 8, length=length)
  more = {} if make is small.sequence_recipe else {'length': length}
  trainer = make_parts(
    make(optimizer, **more),
    PLACED[placement],
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
    over=Slices(devices, PARTS, exchange, replicas, hosts),
  )
  source = ColumnBatches(columns, BATCH, shuffle_seed=1)
  with planned(trainer, source, 2) as batches:
    losses = [record.loss for record in train(trainer, batches, steps)]
  assert len(losses) == steps
  return *small.everything(trainer), losses


@pytest.mark.parametrize(
  ('devices', 'placement'),
  [
    *(pytest.param(n, 'streamed', marks=pytest.mark.slow) for n in (2, 4)),
    *((8, name) for name in PLACED),
  ],
)
def test_devices_change_no_number(devices, placement):
  assert_same_bits(run(devices, placement), run(1))


@pytest.mark.parametrize(
  ('devices', 'replicas', 'placement', 'exchange'),
  [
    (8, 2, 'cached', 'float32'),
    *(
      pytest.param(*sizes, placement, exchange, marks=pytest.mark.slow)
      for sizes in ((8, 2), (8, 4), (8, 8), (4, 2))
      for placement in PLACED
      for exchange in ('float32', 'bfloat16')
    ),
  ],
)
def test_replicas_change_no_number(devices, replicas, placement, exchange):
  found = run(devices, placement, exchange=exchange, replicas=replicas)
  assert_same_bits(found, run(1, exchange=exchange))


@pytest.mark.parametrize(
  ('devices', 'replicas', 'hosts', 'placement', 'exchange'),
  [
    (8, 2, 2, 'cached', 'bfloat16'),
    (8, 1, 2, 'pinned', 'float32'),
    *(
      pytest.param(*sizes, placement, exchange, marks=pytest.mark.slow)
      for sizes in ((8, 1, 4), (8, 1, 8), (8, 4, 2), (4, 1, 2), (2, 1, 2))
      for placement in ('streamed', 'cached')
      for exchange in ('float32', 'bfloat16')
    ),
  ],
)
def test_hosts_change_no_number(devices, replicas, hosts, placement, exchange):
  found = run(
    devices, placement, exchange=exchange, replicas=replicas, hosts=hosts
  )
  assert_same_bits(found, run(1, exchange=exchange))


def test_replicas_have_equal_rows():
  trainer, source = start(8, 'pinned', over=Slices(8, PARTS, 'bfloat16', 4))
  with planned(trainer, source, 2) as batches:
    assert len(list(train(trainer, batches, 12))) == 12
  for group in trainer.engine.groups:
    for leaf in jax.tree.leaves(group.kept.block):
      copies = collections.defaultdict(list)
      for shard in leaf.addressable_shards:
        copies[shard.index[0].start].append(np.asarray(shard.data))
      assert [len(own) for own in copies.values()] == [4, 4]
      for first, *others in copies.values():
        for other in others:
          np.testing.assert_array_equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['sgd', 'rowwise_adagrad', 'lazy_adam'])
@pytest.mark.parametrize('placement', PLACED)
def test_devices_change_no_number_of_any_optimizer(optimizer, placement):
  one = run(1, 'streamed', optimizer, 40)
  for devices in (2, 4, 8):
    assert_same_bits(run(devices, placement, optimizer, 40), one)


@pytest.mark.slow
def test_devices_change_no_number_of_sequences():
  one = run(1, 'streamed', 'rowwise_adagrad', 40, small.sequence_recipe)
  for devices in (2, 4, 8):
    other = run(devices, 'cached', 'rowwise_adagrad', 40, small.sequence_recipe)
    assert_same_bits(other, one)


@pytest.mark.slow
def test_devices_change_no_number_of_half_precision():
  make = MAKE['bfloat16']
  one = run(1, 'streamed', 'adagrad', 40, make)
  for devices in (2, 8):
    assert_same_bits(run(devices, 'cached', 'adagrad', 40, make), one)


@pytest.mark.slow
def test_devices_change_no_number_of_shampoo():
  """Devices share its blocks: several of each leaf, of several shapes."""
  optimizer = slip.shampoo(1e-2, every=5, block_size=3, weight_decay=1e-3)

  def make(*arguments, **more):
    of = small.recipe(*arguments, **more)
    return of._replace(dense_optimizer=optimizer)

  one = run(1, make=make)
  for devices in (2, 4, 8):
    assert_same_bits(run(devices, make=make), one)


@pytest.mark.parametrize(
  ('devices', 'placement', 'dtype'),
  [
    (8, 'cached', 'float32'),
    *(
      pytest.param(devices, placement, dtype, marks=pytest.mark.slow)
      for devices in (2, 4, 8)
      for placement, dtype in (
        ('streamed', 'float32'),
        ('pinned', 'float16'),
        ('cached', 'bfloat16'),
      )
    ),
  ],
)
def test_devices_change_no_number_of_an_exchange_in_bfloat16(
  devices, placement, dtype
):
  run_of = functools.partial(
    run,
    optimizer='adagrad',
    make=MAKE[dtype],
    exchange='bfloat16',
  )
  one = run_of(1, 'streamed')
  assert_same_bits(run_of(devices, placement), one)
  # It has an effect, though a small one.
  other = run(1, 'streamed', 'adagrad', 12, MAKE[dtype])
  assert not np.array_equal(one[-1], other[-1])
  np.testing.assert_allclose(one[-1], other[-1], rtol=0.05)


def start(devices, placement='streamed', of=None, **more):
  columns = small.columns(BATCH * 8, length=2)
  trainer = make_parts(
    small.recipe('adagrad', length=2) if of is None else of,
    PLACED.get(placement, placement),
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
    **{'over': Slices(devices, PARTS), **more},
  )
  return trainer, ColumnBatches(columns, BATCH, shuffle_seed=1)


def arguments_of_passes(devices, monkeypatch):
  """Shapes that the program of passes has on one device, each time it runs."""
  seen = []
  trainer, source = start(devices)
  step = trainer.programs.over(trainer.engine.devices, trainer.over)
  compute = step._pass

  def spy(*arguments):
    seen.append(
      [x.addressable_data(0).shape for x in jax.tree.leaves(arguments)]
    )
    return compute(*arguments)

  monkeypatch.setattr(step, '_pass', spy)
  with planned(trainer, source, 0) as batches:
    [*train(trainer, batches, 1)]
  return seen


def test_the_program_of_passes_is_the_same_for_any_devices(monkeypatch):
  """It would differ, and so would bits, if it had only the device's parts."""
  one = arguments_of_passes(1, monkeypatch)
  assert len(one) == 1
  for devices in (2, 4, 8):
    assert arguments_of_passes(devices, monkeypatch) == one


def operations(devices):
  """Returns the program of passes as XLA compiled it."""
  trainer = market.trainer(devices=devices, parts=PARTS)
  trainer.train(market.source(), 1)
  parts = trainer.parts
  step = parts.programs.over(parts.engine.devices, parts.over)
  trainer.close()
  (compiled,) = step._pass.compiled.values()
  return collections.Counter(
    re.findall(r'= (\w+\[\S* [\w-]+)\(', compiled.as_text())
  )


def test_the_program_of_passes_is_compiled_equally_for_any_devices():
  """Parts of one example, which XLA by itself compiles otherwise for one."""
  one = operations(1)
  assert sum(one.values()) > 100
  assert operations(8) == one


def test_devices_change_no_number_of_rows_on_a_disk(tmp_path):
  kept = Storage(
    'tiered',
    lambda groups: tuple(TieredStore(one, tmp_path, 60) for one in groups),
  )
  trainer, source = start(4, 'cached', storage=kept)
  with planned(trainer, source, 2) as batches:
    losses = [record.loss for record in train(trainer, batches, 12)]
  assert_same_bits((*small.everything(trainer), losses), run(1))
  trainer.engine.close()


# Growing vocabularies, lists, features that share a table, two groups.


def in_market(
  devices, skip='none', placing='streamed', steps=market.STEPS, hosts=1
):
  trainer = market.trainer(
    placement=market.PLACINGS[placing],
    devices=devices,
    parts=PARTS,
    hosts=hosts,
  )
  trainer.train(market.source(), steps, skip=market.SKIPS[skip])
  return trainer


@functools.cache
def one_in_market(skip='none', steps=market.STEPS):
  return in_market(1, skip, steps=steps)


@pytest.mark.parametrize(
  ('devices', 'hosts', 'skip', 'placing'),
  [
    (8, 1, 'none', 'look_ahead'),
    (8, 4, 'rows', 'streamed'),
    pytest.param(4, 2, 'stale', 'pinned', marks=pytest.mark.slow),
    *(
      pytest.param(devices, hosts, skip, placing, marks=pytest.mark.slow)
      for devices, hosts in ((2, 1), (8, 1), (8, 2))
      for skip in market.SKIPS
      for placing in market.PLACINGS
    ),
  ],
)
def test_devices_change_no_number_of_a_market(devices, hosts, skip, placing):
  with in_market(devices, skip, placing, hosts=hosts) as trainer:
    one = one_in_market(skip)
    market.assert_same(trainer, one)
    # Validation and prediction have the same bits, too.
    held_out = market.source(market.vocabularies(), epochs=1)
    np.testing.assert_array_equal(
      trainer.predict(held_out), one.predict(held_out)
    )


def chained(devices, placing, watched, steps=market.STEPS):
  trainer = market.trainer(
    placement=market.PLACINGS[placing],
    devices=devices,
    parts=PARTS,
    watched=watched,
    row_optimizer=market.CHAIN,
  )
  trainer.train(market.source(), steps)
  return trainer


one_chained = functools.cache(functools.partial(chained, 1, 'resident'))


@pytest.mark.parametrize(
  ('devices', 'placing', 'watched'),
  [
    (8, 'streamed', 'hot'),
    *(
      pytest.param(devices, placing, watched, marks=pytest.mark.slow)
      for devices in (2, 8)
      for placing, watched in (
        ('streamed', 'hot'),
        ('pinned', 'hot'),
        ('look_ahead', 'hot'),
        ('resident', 'all'),
      )
    ),
  ],
)
def test_devices_change_no_number_of_a_chain_that_skips(
  devices, placing, watched
):
  with chained(devices, placing, watched) as trainer:
    market.assert_same(trainer, one_chained(watched))


@pytest.mark.parametrize(
  ('before', 'after'),
  [(8, 2), pytest.param(1, 4, marks=pytest.mark.slow)],
)
def test_a_chain_that_skips_is_resumed_on_other_devices(
  before, after, tmp_path
):
  """In the midst of its second window."""
  with chained(before, 'streamed', 'hot', 26) as first:
    entries = first.parts.whole_state.entries
    assert any(one.own.stale.any() for one in entries)
    first.save(tmp_path)
  with chained(after, 'pinned', 'hot', 3) as trainer:
    trainer.restore(tmp_path)
    trainer.train(market.source(), market.STEPS - 26)
    market.assert_same(trainer, one_chained('hot'))


class Towers(nnx.Module):
  """Two towers of nnx, one of which drops units."""

  def __init__(self, rngs):
    self.user = nnx.Linear(4, 3, rngs=rngs)
    self.item = nnx.Linear(3, 3, rngs=rngs)
    self.drop = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, dense, e):
    user = self.drop(nnx.relu(self.user(e['user'])))
    return (user * self.item(e['item'] + e['history'])).sum(-1)


@pytest.mark.slow
def test_devices_change_no_number_of_an_nnx_model():
  with jax.transfer_guard('allow'):  # nnx makes parameters outside jit
    model = Towers(nnx.Rngs(0))
  with contextlib.ExitStack() as opened:
    one, other = (
      opened.enter_context(
        market.trainer(model=model, devices=devices, parts=PARTS)
      )
      for devices in (1, 8)
    )
    for trainer in (one, other):
      trainer.train(market.source(), market.STEPS)
    market.assert_same(other, one)


@pytest.mark.parametrize(
  ('before', 'after'),
  [
    (8, 2),
    *(
      pytest.param(*pair, marks=pytest.mark.slow)
      for pair in ((8, 1), (8, 4), (1, 8), (2, 4))
    ),
  ],
)
@pytest.mark.parametrize(
  ('skip', 'steps'),
  # Rows are frozen from step 13 to 21.
  [('none', 11), ('stale', 11), ('rows', 15)],
)
def test_a_run_is_resumed_on_other_devices(
  before, after, skip, steps, tmp_path
):
  hosts = max(1, before // 4)
  first = in_market(before, skip, 'streamed', steps, hosts)
  first.save(tmp_path)
  first.close()
  with market.trainer(
    placement='pinned', devices=after, parts=PARTS
  ) as trainer:
    trainer.restore(tmp_path)
    left = market.STEPS - steps
    trainer.train(market.source(), left, skip=market.SKIPS[skip])
    market.assert_same(trainer, one_in_market(skip))


# Refusals, before anything is trained.

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))


@pytest.mark.parametrize(
  ('devices', 'parts', 'words'),
  [
    (3, None, 'devices must be a power of two'),
    (2, 12, 'parts must be a power of two'),
    (8, 4, 'the devices must divide the 4 parts'),
    (16, None, 'devices must be at most the 8'),
    (0, None, 'devices must be a whole number'),
    (2, 0, 'parts must be a whole number'),
  ],
)
def test_numbers_of_devices_and_parts_are_checked(devices, parts, words):
  with pytest.raises(UserError, match=words):
    market.trainer(devices=devices, parts=parts)


@pytest.mark.parametrize(
  ('more', 'words'),
  [
    ({'exchange': 'float16'}, 'exchange must be one of float32, bfloat16'),
    ({'exchange': 'bfloat16', 'parts': 1}, 'there must be several'),
  ],
)
def test_what_is_exchanged_is_checked(more, words):
  with pytest.raises(UserError, match=words):
    market.trainer(devices=1, **more)


def test_parts_must_divide_each_batch():
  trainer, _ = start(2)
  columns = small.columns(20, length=2)
  refused = pytest.raises(UserError, match='the parts must divide each batch')
  with planned(trainer, ColumnBatches(columns, 20), 0) as batches, refused:
    next(train(trainer, batches, 1))
  assert trainer.inconsistent is None


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'microbatches': 2}, '2 microbatches'),
    (
      {'row_optimizer': CLIPPED},
      'several rows at once',
    ),
    ({'model': small.recipe(normalization='batch').model}, 'statistics'),
  ],
)
def test_what_depends_on_how_a_step_is_divided_is_refused(change, words):
  of = small.recipe('adagrad', length=2)._replace(**change)
  with pytest.raises(UserError, match=words):
    start(2, of=of)


def test_systems_whose_rows_cross_otherwise_are_refused():
  with pytest.raises(UserError, match='cross as pooled'):
    start(2, rows='pooled')
