r"""Makes a packed data set of raw files, once, for many experiments.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=PATH --config.data.path=DIR [--verify]

PATH is the raw data in the format of `config.data.format`, DIR the folder to
write. After a Ctrl-C, or worse, the same command continues the work. Run on a
finished folder, it says what the folder holds. `--verify` compares a finished
folder with its checksums instead, or a new one once it is finished.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_bool(
  'verify', False, 'Compare the finished folder with its checksums.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.prepare.job:prepare_data', kept='the same command continues'
  )
