"""A reproduction under way: the grid's runs, one after the other.

What a run leaves is kept at once. One that fails says so, and the others go on.
"""

import pathlib
import resource
import time
from typing import Any

from rich.console import Console

from experiments.common import interrupts, report
from experiments.common.compiling import compiled
from experiments.common.errors import in_config
from experiments.common.progress import Bar, clock
from experiments.common.workdir import writable
from experiments.pages import machine
from experiments.reproduce import link, models, overview, page, results
from experiments.reproduce.grid import Job, jobs_of, OFF
from experiments.reproduce.kept import Kept
from experiments.reproduce.measured.cases import Asked, Cases
from experiments.reproduce.measured.jobs import facts_of, lines_of
from experiments.reproduce.measured.phases import BATCHES
from experiments.reproduce.results import Cell, OK
from slipstream_jax.errors import choose, UserError


def check(asked: Asked) -> None:
  """Looks at what is asked for.

  Raises:
    UserError: there is no such model or scale, or no data.
  """
  for name in asked.models:
    choose(models.MODELS, name, '--models')
  choose(dict.fromkeys(models.SCALES), asked.scale, '--scale')
  if not asked.models:
    raise UserError(
      'a reproduction needs a model',
      got='none',
      where='--models',
      hint=f'name some of {", ".join(models.MODELS)}',
    )
  if not 0 <= asked.drop <= 1:
    raise UserError(
      'a drop target must be a share in [0, 1]',
      got=asked.drop,
      where='--drop',
      hint='the published one is 0.3',
    )
  models.path_of(asked.models[0], asked.data)


def _setting(asked: Asked, command: str) -> dict[str, Any]:
  return {
    **machine.here(command),
    'scale': asked.scale,
    'data': asked.data,
    'drop': asked.drop,
    'seeds': asked.seeds,
  }


class Reproduction:
  """A grid under way, its screen and its folder.

  Attributes:
    jobs: all that it runs, in order.
  """

  def __init__(
    self, screen: Console, asked: Asked, workdir: pathlib.Path, again: str
  ) -> None:
    """Opens the folder; nothing runs before `run`.

    Args:
      screen: where to say how far it is.
      asked: what to run.
      workdir: folder of the results.
      again: the command that goes on with them.

    Raises:
      UserError: it is asked for what there is not, or the folder holds
        something else.
    """
    check(asked)
    compiled()  # starts counting
    self._screen, self._again, self._asked = screen, again, asked
    self._cases = Cases(asked)
    setting = _setting(asked, again)
    self._kept = Kept(writable(str(workdir), '--workdir'), setting)
    old = self._kept.before
    self._setting = {**setting, 'models': dict(old.get('models', {}))}
    self._minutes = old.get('minutes', 0.0)
    self._peak = old.get('peak_memory_bytes', 0)
    self._started = time.monotonic()
    self.jobs = jobs_of(asked.models, range(asked.seeds))

  def run(self) -> None:
    """Runs what is not finished, and writes the report.

    Raises:
      KeyboardInterrupt: a signal came.
    """
    jobs = self.jobs
    todo = [job for job in jobs if not self._kept.has(job)]
    self._screen.print(
      f'{len(todo)} of {len(jobs)} runs to do, in {self._kept.folder}',
      highlight=False,
    )
    self._write_setting()
    # A signal waits for the end of a step, and then for the page.
    with interrupts.gently():
      self._run_all(todo)

  def _run_all(self, todo: list[Job]) -> None:
    left = [self._batches(job) for job in todo]
    try:
      with Bar(self._screen, sum(left), 'batch') as bar:
        for number, job in enumerate(todo):
          self._one(job, bar, sum(left[:number]))
      self._finish()
    except KeyboardInterrupt:
      jobs = self.jobs
      self._write_page()
      finished = sum(map(self._kept.has, jobs))
      raise KeyboardInterrupt(
        f'{finished} of {len(jobs)} runs are finished, and this continues: '
        f'{self._again}'
      ) from None

  def _batches(self, job: Job) -> int:
    """About as many as the job trains."""
    steps = models.steps_of(job.model, self._asked.scale)
    few = {'phases': min(steps, BATCHES), 'skew': 1}
    return few.get(job.kind, 1 if job.variant == 'none' else steps)

  def _one(self, job: Job, bar: Bar, before: int) -> None:
    """Runs a job and keeps what it leaves; one that fails says so.

    Args:
      job: what to run.
      bar: is told of its batches.
      before: those that it knows of.
    """
    words = [job.model, job.kind, f'seed {job.seed}']
    if job.kind in ('cell', 'phases'):
      words[1] = job.system + ('' if job.skip == OFF else f' {job.skip}')
    bar.show(before, phase=' '.join(words))

    def tell(batches: int) -> None:
      interrupts.check()
      bar.show(before + batches)

    try:
      interrupts.check()
      case = self._cases.of(job.model, job.seed)
      self._setting['models'].setdefault(job.model, facts_of(case))
      lines = lines_of(job, case, self._kept, tell)
    except Exception as error:
      status = _sentence(error)
      self._screen.print(f'{" ".join(words)} failed: {status}')
      if job.kind != 'cell':
        return
      key = job.model, job.system, job.skip, job.seed
      lines = [Cell(*key, status=status)]
    self._kept.add(job, lines)
    self._write_setting()
    last = lines[-1]
    if isinstance(last, Cell) and last.status == OK:
      self._screen.print(
        f'{" ".join(words)}: {last.examples_trained:,} examples in '
        f'{last.seconds:.1f} s, AUC {report.auc(last.auc)}',
        highlight=False,
      )

  def _finish(self) -> None:
    cells = self._kept.cells
    for model in dict.fromkeys(job.model for job in self.jobs):
      table = overview.table_of(model, cells)
      if table is not None:
        self._screen.print(table)
    self._write_page()
    self._screen.print(
      f'written to {self._kept.folder}, in {clock(60 * self._spent())}',
      highlight=False,
    )

  def _write_page(self) -> None:
    self._write_setting()
    link.write(self._kept.folder)
    page.write(self._kept.folder)

  def _spent(self) -> float:
    """Minutes, of earlier programs too."""
    return self._minutes + (time.monotonic() - self._started) / 60

  def _write_setting(self) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    totals = {
      'minutes': self._spent(),
      'peak_memory_bytes': max(self._peak, peak),
    }
    results.write_setting(self._kept.folder, {**self._setting, **totals})


def _sentence(error: Exception) -> str:
  """What failed, in a line."""
  if isinstance(error, UserError):
    return str(in_config(error))
  words = ' '.join(str(error).split()) or 'without a word'
  return f'{type(error).__name__}: {words[:300]}'
