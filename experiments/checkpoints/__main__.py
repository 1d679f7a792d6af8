"""Lists a run's checkpoints, or copies one.

    python -m experiments.checkpoints RUN
    python -m experiments.checkpoints RUN --copy=s3://bucket/old --codec=int4

RUN is the folder of a run, which may be under way, or a folder or URL of
checkpoints. The list says which of them are whole, every byte compared with its
checksum, and why the others are not. A copy is a base of the newest one, or of
that of --step; a damaged one is refused. In fewer bits it is for scores,
evaluation and serving.
"""

from absl import flags

from experiments.checkpoints import moving
from experiments.checkpoints.listing import entries, row_of
from experiments.common import cli, report
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.quantize import CODECS, RAW
from slipstream_jax.errors import UserError

_COPY = flags.DEFINE_string(
  'copy', None, 'Folder or URL for a copy of the newest, or that of --step.'
)
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)
_CODEC = flags.DEFINE_string(
  'codec', None, f"Of the copy's rows: {', '.join(CODECS)}; {RAW} by default."
)
_VERIFY = flags.DEFINE_bool(
  'verify', True, 'Of the list: read every byte; else sizes are compared.'
)


def main(name: str) -> None:
  """Lists or copies.

  Raises:
    UserError: no checkpoint that is whole, or flags that cannot be.
  """
  moving.check_asked(_COPY.value, _CODEC.value, _STEP.value)
  if _COPY.value is not None:
    _copy(name, _COPY.value, _CODEC.value or RAW, _STEP.value)
  else:
    _list(name)


def _list(name: str) -> None:
  screen, place = report.console(), moving.place_of(name)
  listed = entries(place, _VERIFY.value)
  screen.print(place.url, highlight=False, markup=False, soft_wrap=True)
  screen.print(report.table('', [row_of(entry) for entry in listed]))
  for entry in listed:
    if entry.flaw is not None:
      text = f'step {entry.step}: {entry.flaw}'
      screen.print(text, style='red', markup=False, soft_wrap=True)
  if all(entry.reads is None for entry in listed):
    raise UserError(
      'to go on, a checkpoint must be whole',
      got='none that is',
      where=place.url,
      hint='use a copy, or start anew',
    )


def _copy(name: str, into: str, codec: str, step: int | None) -> None:
  tell, place = report.teller(report.console()), moving.place_of(name)
  copy = moving.copied(place, open_place(into), codec, step, tell)
  size = report.size(copy.bytes)
  tell(f'step {copy.step} is copied to {into}, its rows as {codec}: {size}')


if __name__ == '__main__':
  cli.run(
    main,
    config='none',
    words='RUN_OR_PLACE',
    kept='what was there is as it was',
    on_cpu=True,
  )
