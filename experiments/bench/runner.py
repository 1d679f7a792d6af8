"""Runs a bench: shows its figures as tables, and keeps them in a file.

A bench is a generator of titles with figures: facts by name, the rows of a
table, or a line of text.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

from absl import flags

from experiments.common import cli

Item = tuple[str, Mapping[str, Any] | list[dict[str, Any]] | str]
"""A title and its figures."""

flags.disclaim_key_flags()  # --help shows --output as the program's own


def run(
  bench: Callable[..., Iterator[Item]] | str,
  config: Literal['required', 'none'] = 'required',
  words: str = '',
) -> NoReturn:
  """Runs a bench as a program.

  Args:
    bench: called with the config, if any, the words, a progress bar and the
      program's flags. A function, or 'module:function'.
    config: as in `cli.run`.
    words: as in `cli.run`.
  """
  flags.DEFINE_string('output', None, 'JSON file for the figures.')

  def main(*arguments: Any) -> None:
    from experiments.common import errors, report
    from experiments.common.progress import Bar
    from experiments.common.workdir import json_output

    asked = cli.own_flags()
    measure = cli.imported(bench) if isinstance(bench, str) else bench
    if config == 'required':
      errors.check(arguments[0])
      arguments[0].skip.mode = 'off'  # every batch costs the same
    screen = report.console()
    with json_output(asked.pop('output')) as write:  # before minutes are spent
      with Bar(screen, None, '') as bar:
        figures = dict(measure(*arguments, bar, **asked))
      for title, values in figures.items():
        screen.print(title, style='bold', highlight=False)
        if isinstance(values, Mapping):
          screen.print(report.facts(values))
        elif isinstance(values, str):
          screen.print(values, soft_wrap=True, highlight=False, markup=False)
        else:
          screen.print(report.table('', values))
      write(figures)

  cli.run(main, config, words, 'nothing was written')
