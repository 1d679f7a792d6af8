"""Measures training speed: end to end, by phase, and beside PyTorch.

    python -m experiments.bench --config=configs/criteo.py [--output=FILE]

Times on a shared machine wander. So contenders take turns in one process, on
the same batches, and what is claimed is the ratio of their medians. What each
placement moves is counted by `python -m experiments.profile`.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)

if __name__ == '__main__':
  runner.run('experiments.bench.training:measure')
