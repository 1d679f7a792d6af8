"""A short run that saves all the time, in this process or one to be killed.

python -m tests.checkpoint.runs FOLDER PLACEMENT SCHEDULE POLICY
"""

import contextlib
import pathlib
import sys

from slipstream_jax.checkpoint.checkpoint import Checkpoints, Saving
from slipstream_jax.training.loop import train
from tests.support.short_runs import start

DONE, READY = 'done', 'ready'


def run(folder, placement, schedule, policy):
  """Goes on where the folder is, and saves after every step, to the end.

  Returns:
    The trainer.
  """
  trainer, batches = start(placement, schedule, 2)
  saving = Saving(policy, consolidate=0.5, memory_bytes=1 << 12)
  with (
    contextlib.closing(Checkpoints(folder / 'saved', saving)) as checkpoints,
    batches,
  ):
    if checkpoints.newest() is not None:
      batches.set_state(checkpoints.restore(trainer).schedule_state)
    while True:
      (folder / READY).touch()
      if not list(train(trainer, batches, 1)):
        break
      checkpoints.save(trainer, batches.get_state(), wait=False)
  (folder / DONE).touch()
  return trainer


if __name__ == '__main__':
  run(pathlib.Path(sys.argv[1]), *sys.argv[2:])
