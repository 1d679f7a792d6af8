"""Runs a reproduction: one job after the other, each saved at once."""

from collections.abc import Sequence
import pathlib
import resource
import time
from typing import Any

from rich.console import Console

from experiments.common import cli, interrupts, machine, report
from experiments.common.errors import in_config
from experiments.common.meter import compiled
from experiments.common.progress import Bar
from experiments.common.results import check_same, settings_in
from experiments.common.workdir import folder, writable
from experiments.reproduce.cases import Asked, Cases, facts_of
from experiments.reproduce.groups import models_of
from experiments.reproduce.models import MODELS, path_of, SCALES, steps_of
from experiments.reproduce.phases import BATCHES
from experiments.reproduce.report import overview, write
from experiments.reproduce.results import Job, Results, Row, SETTING
from experiments.reproduce.runs import rows_of
from slipstream_jax.errors import choose, UserError

_SAME = ('scale', 'data', 'drop')
"""Settings that must not change. Models and seeds may be added."""
ALONE = (
  *('xdl', 'dlrm_hybrid', 'fae', 'fae_pinned', 'hotline', 'hotline_micro'),
  *('cached', 'plain', 'pinned'),
)
"""Systems that skip nothing."""
SKIPPING = (
  *(('pinned', 'published'), ('pinned', 'ours')),
  *(('fae', 'ours'), ('hotline', 'ours'), ('xdl', 'ours')),
)
"""Systems with skipping."""
VARIANTS = ('none', 'hot', 'cold')
"""Rows that are frozen after the warm-up."""
TARGETS = (0.15, 0.3, 0.6)
"""Drop targets for which a threshold is sought."""
WITH = {'rm2': ('rm2_l20',)}
"""Models that come with another one."""


def reproduce(workdir: str | None, models: Sequence[str], **more: Any) -> None:
  """Runs the jobs that are not finished, and writes the report.

  The arguments are those of the program.

  Raises:
    UserError: invalid settings, or a folder with something else.
    KeyboardInterrupt: a signal came. Finished jobs are kept.
  """
  asked = Asked(tuple(dict.fromkeys(models)), **more)
  _check(asked)
  compiled()  # starts counting
  screen = report.console()
  place = writable(str(folder(workdir, 'reproduce-')), '--workdir')
  again = cli.again(*([] if workdir else [f'--workdir={place}']))
  results = _opened(place, asked, again)
  jobs = jobs_of(asked.models, range(asked.seeds))
  todo = [job for job in jobs if not results.has(job)]
  screen.print(
    f'{len(todo)} of {len(jobs)} runs to do, in {place}', highlight=False
  )
  results.save()
  # A signal waits for the end of a step, and then for the page.
  with interrupts.gently():
    try:
      _run_all(screen, asked, results, todo)
    except KeyboardInterrupt:
      results.save()
      write(results)
      finished = sum(map(results.has, jobs))
      raise KeyboardInterrupt(
        f'{finished} of {len(jobs)} runs are finished, and this continues: '
        f'{again}'
      ) from None
    for model in models_of(results):
      if rows := overview(model):
        title = f'{model.short}: time and bytes over those of Slipstream'
        screen.print(report.table(title, rows))
    write(results)
    minutes = results.setting['minutes']
    screen.print(
      f'written to {place}, in {minutes:.1f} minutes', highlight=False
    )


def jobs_of(models: Sequence[str], seeds: Sequence[int]) -> list[Job]:
  """Returns all jobs, each once, in the order in which they are run.

  All systems of a seed take turns before the next seed begins, so that other
  load on the machine affects all of them alike. The phases of all systems come
  first, in one job, which also compiles the programs of the runs.

  Args:
    models: names of models. Those that come with them are added.
    seeds: at least one. Jobs for which one seed is enough take the first.
  """
  with_others = [[name, *WITH.get(name, ())] for name in models]
  names = dict.fromkeys(name for some in with_others for name in some)
  pairs = [*((system, 'off') for system in ALONE), *SKIPPING]
  first, jobs = seeds[0], []
  for model in names:
    jobs += [Job('skew', model, first)]
    jobs += [Job('phase', model, first)]
    jobs += [Job('run', model, x, *pair) for x in seeds for pair in pairs]
    jobs += [Job('row', model, first)]
    jobs += [Job('naive', model, first, variant=rows) for rows in VARIANTS]
    jobs += [
      Job('threshold', model, first, skip='published', drop_target=target)
      for target in TARGETS
    ]
  return jobs


def _check(asked: Asked) -> None:
  for name in asked.models:
    choose(MODELS, name, '--models')
  choose(dict.fromkeys(SCALES), asked.scale, '--scale')
  if not asked.models:
    raise UserError(
      'a reproduction needs a model',
      got='none',
      where='--models',
      hint=f'name some of {", ".join(MODELS)}',
    )
  if not 0 <= asked.drop <= 1:
    raise UserError(
      'a drop target must be a share in [0, 1]',
      got=asked.drop,
      where='--drop',
      hint='the published one is 0.3',
    )
  path_of(asked.models[0], asked.data)


def _opened(place: pathlib.Path, asked: Asked, again: str) -> Results:
  """Opens a new folder, or one to continue with."""
  new = asked._asdict()
  if old := settings_in(place, SETTING):
    check_same(old, new, {name: f'--{name}' for name in _SAME})
  results = Results(place)
  results.setting = {
    **machine.here(again),
    **{name: new[name] for name in (*_SAME, 'seeds')},
    'models': dict(old.get('models', {})),
    'minutes': old.get('minutes', 0.0),
    'peak_memory_bytes': old.get('peak_memory_bytes', 0),
  }
  return results


def _run_all(
  screen: Console, asked: Asked, results: Results, todo: list[Job]
) -> None:
  setting, cases = results.setting, Cases(asked)
  minutes, started = setting['minutes'], time.monotonic()
  batches = [_batches(job, asked.scale) for job in todo]
  with Bar(screen, sum(batches), 'batch') as bar:
    for number, job in enumerate(todo):
      try:
        rows = _rows(screen, results, cases, job, bar, sum(batches[:number]))
      finally:  # An interrupted job took its time, too.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        setting['peak_memory_bytes'] = max(setting['peak_memory_bytes'], peak)
        setting['minutes'] = minutes + (time.monotonic() - started) / 60
      results.add(rows)


def _batches(job: Job, scale: str) -> int:
  """Returns about as many batches as a job trains."""
  steps = steps_of(job.model, scale)
  few = {'phase': min(steps, BATCHES) * len(ALONE), 'skew': 1}
  return few.get(job.kind, 1 if job.variant == 'none' else steps)


def _rows(
  screen: Console,
  results: Results,
  cases: Cases,
  job: Job,
  bar: Bar,
  before: int,
) -> list[Row]:
  """Runs a job. One that fails says so, and the others continue."""
  words = [job.model, job.kind, f'seed {job.seed}']
  if job.kind == 'run':
    words[1] = job.system + ('' if job.skip == 'off' else f' {job.skip}')
  bar.show(before, phase=' '.join(words))

  def tell(batches: int) -> None:
    interrupts.check()
    bar.show(before + batches)

  try:
    interrupts.check()
    case = cases.of(job.model, job.seed)
    results.setting['models'].setdefault(job.model, facts_of(case))
    rows = rows_of(job, case, results.rows, ALONE, tell)
  except Exception as error:
    status = _sentence(error)
    screen.print(f'{" ".join(words)} failed: {status}')
    return [{**job._asdict(), 'status': status}] if job.kind == 'run' else []
  if job.kind == 'run':
    run = rows[-1]
    assert run['status'] == 'ok'
    screen.print(
      f'{" ".join(words)}: {run["examples_trained"]:,} examples in '
      f'{run["seconds"]:.1f} s, AUC {report.auc(run["auc"])}',
      highlight=False,
    )
  return rows


def _sentence(error: Exception) -> str:
  """Returns what failed, in one line."""
  if isinstance(error, UserError):
    return ' '.join(str(in_config(error)).split())
  words = ' '.join(str(error).split()) or 'without a message'
  return f'{type(error).__name__}: {words[:300]}'
