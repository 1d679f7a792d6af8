"""Exports a run's checkpoint, for `slip_serve` to score with.

    python -m experiments.export RUN [--output=FOLDER] [--step=120]
    python -m experiments.export RUN --ensemble=logits
    python -m slip_serve FOLDER --memory=ssd --cache=0.1

RUN is the folder of a run, finished or not. The run's config is used; if one
is given, its sections `data` and `eval` replace those of the run. The
checkpoint is the newest, or that of --step. A damaged one is refused.
FOLDER gets the forward pass of each batch size as a program that needs only
JAX, the rows of all tables in files that can be mapped or read row by row, and
the vocabulary. With rows in float32, scores have the trainer's bits.
With --ensemble, one export scores all members (docs/how-to/ensembles.md).
"""

import pathlib

from absl import flags
import ml_collections

from experiments.common import cli

_OUTPUT = flags.DEFINE_string(
  'output', None, 'Folder to make; export in that of the run by default.'
)
_DTYPE = flags.DEFINE_string(
  'dtype', 'float32', "Of rows: 'float32', 'float16' or 'int8'."
)
_BATCH_SIZES = flags.DEFINE_list(
  'batch_sizes', '1,64,1024', 'Examples that are scored at once.'
)
_PLATFORMS = flags.DEFINE_list(
  'platforms', 'cpu', 'What the programs run on: cpu, cuda, rocm, tpu.'
)
_DATA = flags.DEFINE_string(
  'data', None, "Where the run's data are now; by default where they were."
)
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)
_ENSEMBLE = flags.DEFINE_string(
  'ensemble', None, "Mean that members predict: of 'logits' or 'probabilities'."
)
_MEMBERS = flags.DEFINE_multi_integer(
  'member', None, 'Step of a member, once for each; all kept ones by default.'
)


def main(config: ml_collections.ConfigDict | None, run: pathlib.Path) -> None:
  """Exports the run and prints what was written.

  Raises:
    UserError: a flag is invalid, the run has no checkpoint, or there is no
      room. Nothing of the output is then left.
  """
  from experiments.common import loading, report
  from slipstream_jax.errors import choose, UserError
  from slipstream_jax.export.folder import (
    check_arguments,
    ENSEMBLES,
    write_export,
  )
  from slipstream_jax.export.source import facts_of_dataset

  sizes = [int(x) if x.isdecimal() else x for x in _BATCH_SIZES.value]
  how = _DTYPE.value, sizes, _PLATFORMS.value
  output = pathlib.Path(_OUTPUT.value or run / 'export')
  check_arguments(output, *how)
  screen = report.console()
  tell = report.teller(screen)
  single, members = _STEP.value is not None, bool(_MEMBERS.value)
  if single if _ENSEMBLE.value else members:
    raise UserError(
      'an ensemble has members, and a single model has a step',
      got='--step' if single else '--member without --ensemble',
      where='command line',
      hint='give --ensemble with --member, or --step alone',
    )
  if _ENSEMBLE.value is None:
    loaded = [loading.load(run, _DATA.value, config, _STEP.value, tell)]
  else:
    choose(ENSEMBLES, _ENSEMBLE.value, 'command line, --ensemble')
    steps = _MEMBERS.value and sorted({*_MEMBERS.value})
    loaded = [*loading.members(run, _DATA.value, config, steps)]
  *others, newest = (one.trainer for one in loaded)
  ensemble = others, _ENSEMBLE.value or 'logits'
  facts = facts_of_dataset(loaded[-1].data)
  layout = write_export(newest, output, facts, *how, *ensemble)
  written = {
    'steps trained': layout.step,
    'members': len(loaded) if others else None,
    'tables': len(layout.tables),
    'rows': sum(group.rows for group in layout.groups),
    'dtype of rows': layout.codec,
    'bytes': sum(file.bytes for file in layout.files),
  }
  screen.print(report.facts(written))
  tell(f'written to {output}')


if __name__ == '__main__':
  cli.run(main, 'optional', 'RUN', kept='nothing was written', on_cpu=True)
