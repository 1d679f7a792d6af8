"""What scorers are worth, and what they cost, on a config's data.

    python -m experiments.bench.scorers --config=configs/criteo.py:sample \
        --config.data.path=FILE [--examples=N] [--json=FILE]

Every example is scored before it is learned from, one after the other in file
order. `linear` and `pairs` are those of the library; the others were tried:
`no pairs` is `pairs` with the bins of dense features and lists alone, `all
pairs` keeps every pair of features, `factors` is a factorization machine with 8
of them (its rate the linear one). Seconds are those that the thread was given,
per example: in the median over batches, those of the trial of pairs left out.
"""

import pathlib

from absl import flags
import ml_collections

from experiments.bench.tried.scorers import figures
from experiments.common import cli, datasets, errors, record, report

_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_EXAMPLES = flags.DEFINE_integer(
  'examples', 1 << 19, 'Most examples that are scored.', lower_bound=1
)


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints; writes the figures with --json."""
  errors.check(config)
  config.data.shuffle = False
  config.skip.mode = 'examples'  # so that hot rows are looked for
  data = datasets.dataset(config)
  frame = figures(config, data, _EXAMPLES.value)
  screen = report.console()
  screen.print(report.table(data.name, frame))
  if _JSON.value:
    record.write_json(pathlib.Path(_JSON.value), frame)


if __name__ == '__main__':
  cli.run(main)
