r"""Predicts what each placement would move, and recommends one.

    python -m experiments.profile --config=configs/criteo.py \
        [--steps=300] [--device_bytes=N] [--host_bytes=N] [--check_steps=100] \
        [--workdir=DIR]

One part of a sample shows which rows are popular. Placements are judged on
another part: their plans are made as in training, so their counts are those of
a run on these batches. Then it trains a while with the recommended placement
and shows the outcome beside the prediction. If the config leaves examples out,
it trains so, too, and shows from which step length on that saves time. If the
tables do not fit in host memory, it also shows which lookups a disk would
answer. Writes profile.json and hit_rate.png.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_integer(
  'steps', 300, 'Batches to judge placements on.', lower_bound=1
)
flags.DEFINE_integer(
  'check_steps',
  100,
  'Steps to train with the recommended placement; 0: none.',
  lower_bound=0,
)
flags.DEFINE_integer(
  'device_bytes',
  None,
  'Device memory to use; None: 4/5 of the device, or 1 GiB on a CPU.',
)
flags.DEFINE_integer(
  'host_bytes', None, 'Host memory to use; None: 4/5 of what is available.'
)
flags.DEFINE_string('workdir', 'runs/profile', 'Folder to write to.')

if __name__ == '__main__':
  cli.run('experiments.profile.job:profile')
