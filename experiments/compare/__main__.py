r"""Trains plainly and with several policies, and compares the results.

    python -m experiments.compare --config=configs/criteo.py \
        [--policies=random,stale] [--targets=0.2,0.4,0.6] [--seeds=5] \
        [--epochs=2] [--workdir=DIR]
    python -m experiments.compare --own=my_module:function

Each seed trains plainly, and then with every policy at every target, a share of
all examples. Random dropping is always included. Without --policies, these are
the published policies and ours. `random_small` is `random` with a smaller step
for each batch read; so for any policy. `auto` drops as many as
config.skip.drop=auto finds, whatever the targets.

--own names a function of yours. It takes the config and returns a data set, or
a data set and a model (docs/how-to/own-compare.md). Without --config, the
settings are then those of configs/own.py.

Writes compare.csv, a line per run as soon as it ends, curve.csv, compare.html,
one page that needs nothing beside it, and compare.png. Runs of one seed share
data, model, hot rows and compiled programs. A stopped comparison continues with
the same --workdir. Finished runs are kept, and more seeds, policies or targets
may be added.
"""

import pathlib
import re
import sys

from absl import flags

import configs
from experiments.common import cli, usage

flags.DEFINE_string(
  'own', None, 'Function of your own that makes data, and maybe a model.'
)
flags.DEFINE_list(
  'policies', [], 'Policies to run. By default the published ones and ours.'
)
flags.DEFINE_list(
  'targets', ['0.2', '0.4', '0.6'], 'Shares of all examples to drop.'
)
flags.DEFINE_integer(
  'seeds',
  None,
  'Seeds, from config.seed on. By default two to six: as many as it takes to '
  "know each policy's AUC less random's within 0.001.",
  1,
)
flags.DEFINE_integer(
  'epochs', None, 'Passes over the data; by default as the config says.', 1
)
flags.DEFINE_float(
  'longer',
  1.0,
  'Batches that runs which drop read, over those of a plain run: to see when '
  'they have learned as much.',
  0.01,
)
flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)


def _own_config(arguments: list[str]) -> list[str]:
  """Returns the config for a user's data, unless the arguments name one."""
  own = any(re.match(r'--?own\b', word) for word in arguments)
  if not own or usage.config_flag(arguments) is not None:
    return []
  file = pathlib.Path(configs.__file__).with_name('own.py')
  return [f'--config={file}']


if __name__ == '__main__':
  sys.argv[1:1] = _own_config(sys.argv[1:])
  cli.run('experiments.compare.job:compare')
