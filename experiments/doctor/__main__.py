"""Checks machine, config and data before a long run, and leaves nothing behind.

    python -m experiments.doctor --config=configs/criteo.py [--workdir=FOLDER]
    python -m experiments.doctor RUN

It checks versions, device, memory and disk, where sparse files count at their
full size. Then it reads examples, takes two real steps, saves everything on the
disk of FOLDER and restores it. FOLDER need not exist. RUN is the folder of a
run, which has its own config. The exit code is 0 if nothing is bad.
"""

import pathlib

from absl import flags
import ml_collections

from experiments.common import cli
from slipstream_jax.errors import UserError

_WORKDIR = flags.DEFINE_string('workdir', 'runs', 'Folder of the run to be.')
_VERIFY = flags.DEFINE_bool(
  'verify', False, 'Compare packed data with their checksums: reads them all.'
)


def main(
  config: ml_collections.ConfigDict | None, run: pathlib.Path | None = None
) -> None:
  """Prints what was found.

  Raises:
    UserError: something is bad, or there is neither a config nor a run.
  """
  from experiments.doctor import job  # imports JAX

  if (config is None) == (run is None):
    raise UserError(
      'either a config or the folder of a run must be given',
      got='none of them' if run is None else 'both',
      where='command line',
      hint='add --config=configs/criteo.py, or give RUN alone',
    )
  job.examine(config, run or pathlib.Path(_WORKDIR.value), _VERIFY.value)


if __name__ == '__main__':
  cli.run(main, config='optional', words='[RUN]', kept='nothing was written')
