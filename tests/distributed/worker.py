r"""What each of several processes trains, in test_processes. Prints digests.

    python -m tests.distributed.worker \
        NUMBER PROCESSES DEVICES ADDRESS FOLDER RUN,... REPLICAS HOSTS

Runs end with the bits of one process, whatever the first arguments.
"""

import contextlib
import json
import pathlib
import sys
import tempfile
import zlib

import jax
import numpy as np

PARTS = 8


def digest(tree):
  crc = 0
  for leaf in jax.tree.leaves(tree):
    leaf = np.ascontiguousarray(leaf)
    crc = zlib.crc32(leaf.reshape(-1).view(np.uint8), crc)
  return crc


OVER = {'parts': PARTS, 'replicas': 1, 'hosts': 1}


def of_towers(devices, hosts):
  """A run whose hosts have a tower each, which one process has, or two."""
  from tests.distributed import test_tower_parts as own

  model = own.dmt(2, 'identity')
  with own.made(model, hosts, devices, placement='pinned') as trainer:
    history = trainer.train(own.source(), progress=False)
    return digest([own.all_of(trainer), history.losses])


def slices(devices, exchange='float32'):
  from slipstream_jax.engine.planner import Slices

  return Slices(devices, exchange=exchange, **OVER)


def of_placement(
  placement, devices, seed=1, exchange='float32', storage='memory'
):
  """A run under a placement, which is swapped in the order of FAE."""
  from slipstream_jax.data.numbered import ColumnBatches
  from slipstream_jax.placement import cached, PLACEMENTS
  from slipstream_jax.schedules.base import plain
  from slipstream_jax.schedules.fae import fae, Rate
  from slipstream_jax.store.tiered import STORES
  from slipstream_jax.training.loop import train
  from slipstream_jax.training.trainer_parts import make_parts, scheduled
  from tests.support import small

  placed = {'cached': cached(8, look_ahead=3), **PLACEMENTS}[placement]
  columns = small.columns(small.BATCH * 8, length=2)
  trainer = make_parts(
    small.recipe('adagrad', length=2),
    placed,
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
    over=slices(devices, exchange),
    storage=STORES[storage](1 << 12, tempfile.gettempdir()),
  )
  source = ColumnBatches(columns, small.BATCH, shuffle_seed=seed)
  spec = plain()
  if placement == 'swapped':
    held_out = next(ColumnBatches(small.columns(64, length=2), 64))
    spec = fae(8, held_out, Rate(40), settle=2)
  with scheduled(trainer, source, spec, 2) as batches:
    losses = [record.loss for record in train(trainer, batches, 12)]
  return digest([*small.everything(trainer), losses])


def of_market(devices, folder, skip, placing, **more):
  """A run that is saved, and resumed under another placement."""
  from slipstream_jax.api.callbacks import CSVLog
  from tests.support import market

  def trainer(placing):
    placement = market.PLACINGS[placing]
    return contextlib.closing(
      market.trainer(placement=placement, devices=devices, **OVER, **more)
    )

  with trainer(placing) as first:
    log = CSVLog(f'{folder}{jax.process_index()}.csv')
    skipping = market.SKIPS[skip]
    first.train(market.source(), 11, skip=skipping, callbacks=[log])
    first.save(folder)
  with trainer('pinned') as last:
    last.restore(folder)
    held_out = market.source(market.vocabularies(), epochs=1)
    logits = [last.predict(held_out)]
    last.train(market.source(), market.STEPS - 11, skip=market.SKIPS[skip])
    logits.append(last.predict(held_out))
    return digest([market.state_of(last), logits, last.rows('item')])


def unlike(devices, number):
  """Sentences for examples that processes do not share, or may not."""
  import slipstream_jax as slip
  from slipstream_jax.errors import UserError
  from tests.support import market

  columns = dict.fromkeys((*market.TABLES, 'history'), np.zeros(8, int))
  columns |= {'label': np.zeros(8), 'dense': np.zeros((8, 2))}
  lent = slip.batches(iter([columns]), dense='dense')
  said = []
  for run in (
    lambda: of_placement('streamed', devices, number),
    lambda: market.trainer(devices=devices, **OVER).train(lent, 1),
  ):
    try:
      run()
    except UserError as error:
      said.append(str(error))
  return said


def exported(devices, folder):
  """Digest of an export, after two that fail in the first process."""
  from slipstream_jax.errors import UserError
  from slipstream_jax.export import folder as exporting
  from tests.support import market

  first, encoded = jax.process_index() == 0, exporting.encoded
  with contextlib.closing(
    market.trainer(devices=devices, **OVER, placement='pinned')
  ) as trainer:
    trainer.train(market.source(), 11)
    for name in 'user', 'ad':  # before the first rows, and after some of them

      def fails(dtype, rows, table, bad=name):
        if table == bad:
          raise UserError('no', got=bad, where='here', hint='go')
        return encoded(dtype, rows, table)

      exporting.encoded = fails
      with contextlib.suppress(UserError):
        trainer.export(f'{folder}/bad')
        assert not first
      assert not pathlib.Path(folder, 'bad').exists()
    exporting.encoded = encoded
    trainer.export(f'{folder}/good')
  parts = sorted(pathlib.Path(folder, 'good').glob('rows_*.bin'))
  return digest([np.frombuffer(part.read_bytes(), np.uint8) for part in parts])


def full(devices, folder):
  """Saves while the disk is full to one process or another, and goes on.

  Returns the errors, the owners of the rows in each checkpoint, and a digest of
  the run that the last checkpoint gives.
  """
  from slipstream_jax.checkpoint import checkpoint, manifest, places
  from slipstream_jax.data.numbered import ColumnBatches
  from slipstream_jax.errors import UserError
  from slipstream_jax.placement import cached
  from slipstream_jax.training.loop import train
  from slipstream_jax.training.trainer_parts import make_parts, planned
  from tests.support import small

  def trainer():
    over = slices(devices)
    recipe = small.recipe('adagrad', length=2)
    return make_parts(recipe, cached(8), small.DENSE, seed=3, over=over)

  errors, write = [], places._Folder.write
  columns = small.columns(small.BATCH * 8, length=2)
  source = ColumnBatches(columns, small.BATCH, shuffle_seed=1)
  one, saving = trainer(), checkpoint.Saving(keep=9, consolidate=0)
  checkpoints = checkpoint.Checkpoints(folder, saving)
  with planned(one, source, 2) as batches:
    for process in (None, 0, None, 1, 0, 1, None):

      def fails(place, name, pieces, process=process):
        if process == jax.process_index() and name.endswith('.rows'):
          raise OSError(28, 'No space left on device')
        return write(place, name, pieces)

      list(train(one, batches, 2))
      places._Folder.write = fails
      try:
        checkpoints.save(one, batches.get_state(), wait=False)
        list(train(one, batches, 1))
        checkpoints.wait()
      except UserError as error:
        errors.append(error.got)
  checkpoints.close()
  place, other = places.open_place(folder), trainer()
  owners = {
    step: sorted(
      facts.owner for facts in manifest.read_manifest(place, step).rows.values()
    )
    for step in manifest.steps_in(place)
  }
  position = checkpoint.Checkpoints(folder).restore(other)
  with planned(other, source, 2) as batches:
    batches.set_state(position.schedule_state)
    list(train(other, batches, 1))
  small.assert_same_bits(small.everything(one), small.everything(other))
  return errors, owners, digest(small.everything(one))


def main(number, processes, devices, address, folder, names, replicas, hosts):
  OVER.update(replicas=int(replicas), hosts=int(hosts))
  number, processes, devices = int(number), int(processes), int(devices)
  jax.config.update('jax_num_cpu_devices', devices // processes)
  if processes > 1:
    jax.distributed.initialize(
      address,
      processes,
      number,
      heartbeat_timeout_seconds=10,
      shutdown_timeout_seconds=30,
    )
  placings = {'none': 'resident', 'stale': 'look_ahead', 'rows': 'streamed'}
  runs = {}
  for name in names.split(','):
    if name in placings:
      where = f'{folder}/{name}'
      runs[name] = of_market(devices, where, name, placings[name])
    elif name == 'unlike':
      runs[name] = unlike(devices, number)
    elif name == 'export':
      runs[name] = exported(devices, f'{folder}/{name}')
    elif name == 'full':
      runs[name] = full(devices, f'{folder}/{name}')
    elif name == 'tiered':
      runs[name] = of_placement('streamed', devices, storage=name)
    elif name == 'chain':
      from tests.support.market import CHAIN

      where = f'{folder}/{name}'
      runs[name] = of_market(
        devices, where, 'none', 'streamed', row_optimizer=CHAIN
      )
    elif name == 'towers':
      hosts = 2 if devices > 1 else 1
      runs[name] = of_towers(devices, hosts)
    elif name == 'bfloat16':
      runs[name] = of_placement('cached', devices, exchange=name)
    else:
      runs[name] = of_placement(name, devices)
  sys.stdout.write(json.dumps(runs) + '\n')


if __name__ == '__main__':
  main(*sys.argv[1:])
