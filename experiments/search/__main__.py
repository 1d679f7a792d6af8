r"""Searches a click model: trains all of a space at once, and samples some.

    python -m experiments.search [--config=configs/criteo.py:sample] \
        [--data=FILE] [--budget=1] [--prices=0,0.001,0.003,0.01] \
        [--supernet=3] [--nets=4] [--widths=16,32,64] [--interactions=cross] \
        [--rate=3] [--seeds=3] [--steps=N] [--workdir=DIR]

Without --config the data are the synthetic stream with planted interactions.
The space has hidden layers of the given widths, one more below and one more
above the interaction than the config's DLRM. The interaction is DLRM's
products, a sum of products, a cross of DCN-v2, or a layer of DHEN. Each table
has the config's dim, half of it or a quarter. A supernet of all these nets is
trained once for each price, with up to --supernet times the FLOPs of one run. A
price is the log loss that a net may cost more if its FLOPs, or the elements of
its tables, are fewer by a factor of e. Some nets are sampled from each supernet
and trained from scratch. Then nets that are drawn at random are trained for as
many seconds as all of this took. The config's own model is trained as well. All
nets have at most --budget times its FLOPs.

One half of the held-out examples chooses a net, and the other half scores it.
Nothing is skipped. Writes search.csv, a line per training as soon as it ends,
search.html, one page that needs nothing beside it, and for each seed
found_SEED.py, a config of the best net that was found. A stopped program
continues with the same --workdir.
"""

import sys

from absl import flags

from experiments.common import cli, usage

flags.DEFINE_string('data', None, 'Raw file or packed folder to train on.')
flags.DEFINE_float(
  'budget', 1.0, "Most FLOPs of a net, as a multiple of the config's model."
)
flags.DEFINE_list(
  'prices',
  ['0', '0.001', '0.003', '0.01'],
  'Log loss per factor of e in FLOPs or elements; a supernet for each.',
)
flags.DEFINE_float(
  'supernet',
  3.0,
  "FLOPs of a supernet's training, as a multiple of those of one run.",
)
flags.DEFINE_integer('nets', 4, 'Nets sampled from each supernet.', 1)
flags.DEFINE_list(
  'widths',
  [],
  "Widths of hidden layers; the config's and half its least by default.",
)
flags.DEFINE_list(
  'interactions',
  ['fm', 'low-rank cross', 'cross', 'dot + linear'],
  "Interactions beside the DLRM's, 'dot'.",
)
flags.DEFINE_float('rate', 1.0, "Factor on the config's learning rates.")
flags.DEFINE_integer('seeds', 1, 'Seeds, from config.seed on.', 1)
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
    'experiments.search.job:search',
    kept='finished runs are kept, and the same --workdir continues',
  )
