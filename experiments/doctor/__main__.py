"""Checks machine, config and data before a long run: nothing is kept of it.

    python -m experiments.doctor --config=configs/criteo.py --workdir=runs/long

It looks at versions, device, memory and disk (files with holes count at their
full size), reads examples, takes two real steps, saves everything on the disk
of --workdir and restores it. The exit code is 0 if nothing is bad. The folder
of a run knows its config; another folder need not be there.
"""

import pathlib

from absl import flags
import ml_collections

from experiments.common import cli, record, report
from experiments.doctor.checks import findings
from experiments.doctor.machine import Finding
from slipstream_jax.errors import UserError

_WORKDIR = flags.DEFINE_string('workdir', 'runs', 'Folder of the run to be.')
_VERIFY = flags.DEFINE_bool(
  'verify', False, 'Compare packed data with their checksums: reads them all.'
)


def main(config: ml_collections.ConfigDict | None) -> None:
  """Looks, and says what there is.

  Raises:
    UserError: something is bad, or there is no config.
  """
  where = pathlib.Path(_WORKDIR.value)
  if config is None:
    config = record.config_of(where)
  screen, bad = report.console(), []
  for finding in findings(config, where, _VERIFY.value):
    screen.print(_line(finding), highlight=False, soft_wrap=True)
    if finding.verdict == 'bad':
      bad.append(finding.name)
  if bad:
    raise UserError(
      'a long run needs machine, config and data without a fault',
      got=', '.join(bad),
      where='above',
      hint='mend what is bad, and look again',
    )


def _line(finding: Finding) -> str:
  colours = {'good': 'green', 'doubtful': 'yellow', 'bad': 'bold red'}
  colour = colours[finding.verdict]
  words = finding.words.replace('[', r'\[')
  return f'[{colour}]{finding.verdict:<8}[/] {finding.name}: {words}'


if __name__ == '__main__':
  cli.run(main, kept='nothing was written', config='optional')
