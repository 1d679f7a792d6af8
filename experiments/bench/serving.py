"""Times an export: queries/s from memory, and from an SSD with a cache.

    python -m experiments.bench.serving RUN [--export=FOLDER]

Queries are batches of the data that the run trained on, and each is new. Memory
and SSD take turns on the same queries, in another order each time. Both score
them one by one (`logits`), and while they read the rows of the next queries
(`stream`). --cache is the share of the rows that is kept in memory. The caches
are warmed by --warm queries that are not timed. Ratios are medians over turns.
With --pinned or --bags, as `python -m slip_serve` has them, scorers from an SSD
with and without these take turns, too.
`python -m experiments.bench.disk` tells what the disk alone can do.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_string(
  'export', None, 'Folder of its export; export in its own by default.'
)
flags.DEFINE_integer('batch', 1024, 'Examples of a query.')
flags.DEFINE_float('cache', 0.1, 'Share of the rows in memory.')
flags.DEFINE_list('pinned', [], 'Tables whose rows all stay in memory.')
flags.DEFINE_float('bags', 0.0, 'Share of the cache for sums of bags.')
flags.DEFINE_integer('warm', 1000, 'Queries before any is timed.')
flags.DEFINE_integer('turn', 50, 'Queries of a turn.')
flags.DEFINE_integer('turns', 10, 'Turns of each way.')

if __name__ == '__main__':
  runner.run('experiments.bench.exports:measure', 'none', 'RUN')
