r"""What each of several processes trains, in test_processes. Prints digests.

    python -m tests.distributed.worker \
        NUMBER PROCESSES DEVICES ADDRESS FOLDER RUN,...

Runs end with the bits of one process, whatever the first arguments.
"""

import contextlib
import json
import sys
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


def of_placement(placement, devices, seed=1, exchange='float32'):
  from slipstream_jax.data.numbered import ColumnBatches
  from slipstream_jax.engine.planner import Slices
  from slipstream_jax.placement import cached, PLACEMENTS
  from slipstream_jax.training.loop import train
  from slipstream_jax.training.trainer_parts import make_parts, planned
  from tests.support import small

  placed = {'cached': cached(8, look_ahead=3), **PLACEMENTS}[placement]
  columns = small.columns(small.BATCH * 8, length=2)
  trainer = make_parts(
    small.recipe('adagrad', length=2),
    placed,
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
    over=Slices(devices, PARTS, exchange),
  )
  source = ColumnBatches(columns, small.BATCH, shuffle_seed=seed)
  with planned(trainer, source, 2) as batches:
    losses = [record.loss for record in train(trainer, batches, 12)]
  return digest([*small.everything(trainer), losses])


def of_market(devices, folder, skip, placing, **more):
  """A run that is saved, and resumed under another placement."""
  from slipstream_jax.api.callbacks import CSVLog
  from tests.support import market

  def trainer(placing):
    placement = market.PLACINGS[placing]
    return contextlib.closing(
      market.trainer(placement=placement, devices=devices, parts=PARTS, **more)
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
  """The sentence for processes that read other examples than each other."""
  from slipstream_jax.errors import UserError

  try:
    return of_placement('streamed', devices, number)
  except UserError as error:
    return str(error)


def main(number, processes, devices, address, folder, names):
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
    elif name == 'chain':
      from tests.support.market import CHAIN

      where = f'{folder}/{name}'
      runs[name] = of_market(
        devices, where, 'none', 'streamed', row_optimizer=CHAIN
      )
    elif name == 'bfloat16':
      runs[name] = of_placement('cached', devices, exchange=name)
    else:
      runs[name] = of_placement(name, devices)
  sys.stdout.write(json.dumps(runs) + '\n')


if __name__ == '__main__':
  main(*sys.argv[1:])
