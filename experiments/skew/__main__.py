"""Compares the skew of the synthetic proxies with what the papers print.

    python -m experiments.skew [--proxy=NAME] [--seed=0] [--output=FILE]

A part of a proxy's stream shows which rows of all its tables are looked up
most. Those are hot, up to the published share of the tables' bytes. Rows of
equal counts come in random order. Another part of the stream is judged: an
example is hot if all its lookups are.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_multi_string(
  'proxy', [], 'Proxy to measure; may be given again. All by default.'
)
flags.DEFINE_integer('seed', 0, 'Seed of the streams.')

if __name__ == '__main__':
  runner.run('experiments.skew.job:compare', 'none')
