"""Compares the skew of the synthetic proxies with what the papers print.

    python -m experiments.skew [--proxy=NAME] [--seed=0] [--workdir=DIR]
        [--samples=DIR]

A part of a proxy's stream shows which rows of all its tables are looked up
most. Those are hot, up to the published share of the tables' bytes. Rows of
equal counts come in random order. Another part of the stream is judged: an
example is hot if all its lookups are. --workdir keeps skew.json and
access_curves.png: the lookups of each row against its rank. Real samples under
--samples are drawn beside them (criteo/dac_80k.tsv.gz, avazu/train.csv and
taobao/UserBehavior.csv.gz).
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_multi_string(
  'proxy', [], 'Proxy to measure; may be given again. All by default.'
)
flags.DEFINE_integer('seed', 0, 'Seed of the streams.')
flags.DEFINE_string(
  'workdir', None, 'Folder for skew.json and access_curves.png.'
)
flags.DEFINE_string('samples', None, 'Folder with real samples.')

if __name__ == '__main__':
  cli.run('experiments.skew.job:compare', 'none', kept='nothing was written')
