r"""Trains all models of a family on one data set, and ranks them.

    python -m experiments.zoo [--config=configs/criteo.py:sample] \
        [--data=FILE] [--family=dhen] [--seeds=5] [--rates=0.3,1,3] \
        [--steps=N] [--workdir=DIR]

Without --config the data are the synthetic stream with planted interactions.
All models have the same widths, data and number of steps. Each is trained with
each rate, a factor on the config's learning rates. One half of the held-out
examples chooses the best, and the other half scores it. Nothing is skipped.

The family `clicks` has DLRM, DCN-v2, DeepFM, Wide & Deep and DHEN. `dhen` has
DLRM, and DHEN with layers of one interaction each, and of several, all with
layers above so wide that the FLOPs are equal. `optimizers` trains the dense
parameters of a DLRM with Adam, Adagrad, Muon and Shampoo, with rates that are
factors on 1e-3. `sequences` has TBSM, SASRec and HSTU on the config of a TBSM.
`retrieval` has two towers, SASRec and HSTU, which rank all items, on the config
of two towers. `hash10` and `hash100` give
a DLRM 10 and 100 times fewer rows, which ids share by a hash or as a pilot
model says that was trained on the first third of the steps. All train on the
rest, those called longer on all.

Writes zoo.csv, a line per run as soon as it ends, and zoo.html, one page that
needs nothing beside it. A stopped program continues with the same --workdir:
finished runs are kept, and more seeds or rates may be added.
"""

import sys

from absl import flags

from experiments.common import cli, usage

flags.DEFINE_string('data', None, 'Raw file or packed folder to train on.')
flags.DEFINE_string(
  'family',
  'clicks',
  'Models to train: clicks, dhen, hash10, hash100, optimizers, sequences or'
  ' retrieval.',
)
flags.DEFINE_integer('seeds', 3, 'Seeds, from config.seed on.', 1)
flags.DEFINE_list(
  'rates', ['0.3', '1', '3'], "Factors on the config's learning rates."
)
flags.DEFINE_integer(
  'steps', 0, 'Steps of each run; by default one pass, or as the config says.'
)
flags.DEFINE_string(
  'workdir', None, 'Folder of the results; a new one under runs/ by default.'
)

if __name__ == '__main__':
  if usage.config_flag(sys.argv[1:]) is None:
    file = usage.CONFIGS / 'criteo.py'
    sys.argv[1:1] = [f'--config={file}:planted']
  cli.run(
    'experiments.zoo.job:zoo',
    kept='finished runs are kept, and the same --workdir continues',
  )
