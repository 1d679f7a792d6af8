r"""Makes a packed data set of raw files, once, for many experiments.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=PATH --config.data.path=DIR [--verify] \
        [--pilot=RUN] [--fewer=10]

PATH is the raw data in the format of `config.data.format`, DIR the folder to
write. After a Ctrl-C, or worse, the same command continues the work. Run on a
finished folder, it says what the folder holds. `--verify` compares a finished
folder with its checksums instead, or a new one once it is finished.

With `--pilot`, rare ids share rows with ids that behave alike (a learned hash,
arXiv 2203.15837). RUN is the --workdir of a run on earlier data of the same
format, with a model of few dimensions. Each table gets the number of rows that
it has in the run divided by `--fewer`, or 16 if that is more.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_bool(
  'verify', False, 'Compare the finished folder with its checksums.'
)

flags.DEFINE_string(
  'pilot', None, 'Run on earlier data, whose model says which ids share rows.'
)
flags.DEFINE_float(
  'fewer', 10, 'By how much --pilot divides the rows of each table.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.prepare.job:prepare_data', kept='the same command continues'
  )
