r"""Trains one config in several processes of this machine.

    python -m experiments.launch --processes=2 --config=configs/criteo.py \
        [--config.devices=2] [--config.key=value] [--workdir=FOLDER]

The processes are those of `experiments.run`. If one of them dies or hangs, all
are ended and start again from the newest checkpoint (config.train
.checkpoint_steps), at most --restarts times. If that start saves nothing, half
of them start next. Ctrl-C and SIGTERM save once and end all. Another machine's
processes are started by Slurm or Kubernetes: see docs/how-to/devices.md.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_integer('processes', 2, 'Processes to start.', lower_bound=2)
flags.DEFINE_integer('restarts', 3, 'The most restarts.', lower_bound=0)
flags.DEFINE_string(
  'workdir', None, 'Folder of the run; a new one under runs/ by default.'
)

if __name__ == '__main__':
  cli.run('experiments.launch.job:launch')
