r"""Makes a packed data set of raw files, once, for many experiments.

    python -m experiments.prepare --config=configs/criteo.py \
        --config.data.raw=PATH --config.data.path=DIR [--verify]

PATH is the raw data in the format of `config.data.format`, DIR the folder to
write. After a Ctrl-C, or worse, the same command continues the work. Run on a
finished folder, it says what the folder holds. `--verify` compares a finished
folder with its checksums instead, or a new one once it is finished.
"""

from absl import flags
import ml_collections

from experiments.common import cli

_VERIFY = flags.DEFINE_bool(
  'verify', False, 'Compare the finished folder with its checksums.'
)


def main(config: ml_collections.ConfigDict) -> None:
  """Prepares the data set of `config.data`.

  Raises:
    UserError: bad settings, bad data or no room. The folder is then not
      finished. The same command continues it if it is still there.
  """
  from experiments.prepare import job  # imports JAX

  job.prepare_data(config, _VERIFY.value)


if __name__ == '__main__':
  cli.run(main, kept='the same command continues')
