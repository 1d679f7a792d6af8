"""Trains, evaluates and reports one experiment."""

from collections.abc import Callable, Iterator
import contextlib
import math
import pathlib
import sys
from typing import Any

import jax
import ml_collections
from rich.console import Console

from experiments.common import (
  build,
  cli,
  datasets,
  errors,
  interrupts,
  plots,
  record,
  report,
  workdir,
)
from experiments.common.compiling import compiled
from experiments.common.meter import Meter
from experiments.common.progress import Bar
from experiments.common.record import Recorder
from experiments.run.guard import Guard
from experiments.run.summary import (
  Run,
  summarize,
  tell_event,
  TOTALS,
  totals,
  totals_before,
)
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position, Saving
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import BadLoss, StepRecord, train
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.trainer_parts import TrainerParts


def run(config: ml_collections.ConfigDict, folder: str | None = None) -> None:
  """Runs the experiment of `config` in a folder, or in a new one under runs/.

  Raises:
    UserError: bad settings or bad data. The folder then has no summary.
    KeyboardInterrupt: a signal came. What was trained is saved.
  """
  compiled()  # starts counting
  screen, where = report.console(), workdir.folder(folder)
  errors.check(config)
  more = [] if config.resume else ['--config.resume=True']
  more += [] if folder else [f'--workdir={where}']
  command = cli.again(*more)
  with workdir.claimed(where, config):
    if workdir.is_finished(where, config):
      _say_finished(screen, where)
    else:
      _run(config, screen, where, command)


def _run(
  config: ml_collections.ConfigDict,
  screen: Console,
  where: pathlib.Path,
  command: str,
) -> None:
  """Runs it in a folder that is this run's alone."""
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  recipe = build.recipe(config, data, steps)
  build.check_skip(config, recipe)
  hot = build.hot(config, data, recipe)
  trainer = build.trainer(config, data, recipe, hot)
  batches = build.batches(config, trainer, data, steps)
  checkpoints = opened_checkpoints(config, where, screen)
  steps = build.most_steps(config, data, steps)
  try:
    report.introduce(screen, data, where)
    announce_checkpoints(config, trainer, where, screen)
    if (words := build.no_disk(config)) is not None:
      _warn(screen, words)
    first = 0
    if config.resume:
      first = _resume(trainer, batches, checkpoints, screen, steps)
      if first == steps and (where / record.SUMMARY).exists():
        return _say_finished(screen, where)
      screen.print(f'resumed after step {first}')
    # From here on there is something to lose: a signal waits for the step.
    with interrupts.gently(config.checkpoint.grace_seconds):
      workdir.begin(where, config)
      with contextlib.closing(Recorder(where, first)) as recorder:
        run = Run(
          *(config, data, trainer, batches, checkpoints, recorder, screen),
          where,
          totals_before(recorder),
          command,
        )
        summary = _train_and_evaluate(run, first, steps)
      batches.close()
      _finish(run, where, summary)
  finally:
    batches.close()
    close_checkpoints(checkpoints, screen)


def _say_finished(screen: Console, where: pathlib.Path) -> None:
  screen.print(f'{where} is finished already: nothing to do', highlight=False)


def _resume(
  trainer: TrainerParts,
  batches: PlannedBatches,
  checkpoints: Checkpoints,
  screen: Console,
  steps: int,
) -> int:
  """Continues where the newest checkpoint is, and returns its step.

  Raises:
    UserError: there is none that fits, or it is beyond the run's last step.
  """
  position = restored(trainer, checkpoints, screen)
  first = position.step
  # It says best which number of steps was meant.
  batches.set_state(position.schedule_state)
  if first > steps:
    raise UserError(
      f'a resumed run must have at least the {first} steps it has taken',
      got=steps,
      where='config.train.steps',
      hint='set it to more, or start anew in another --workdir',
    )
  return first


def _restore(run: Run) -> int:
  """Goes back to the newest checkpoint, and returns its step."""
  parts = run.trainer, run.batches, run.checkpoints, run.screen
  return _resume(*parts, 1 << 62)


def _finish(run: Run, where: pathlib.Path, summary: dict[str, Any]) -> None:
  """Draws what was recorded, and writes the summary last."""
  lines = run.recorder.lines
  plots.learning_curve(where / 'learning_curve.png', lines, summary)
  plots.transfers(where / 'transfers.png', lines, summary)
  record.write_json(where / record.SUMMARY, summary)
  if not run.config.train.keep_checkpoint:  # no more to resume
    run.checkpoints.remove()
  run.screen.print(report.facts({**summary, 'data': None}))
  tell_totals(run.checkpoints, run.screen)


def _train_and_evaluate(run: Run, first: int, steps: int) -> dict[str, Any]:
  before = run.before
  meter = Meter(
    run.trainer.engine.counters,
    before.get('seconds', 0.0),
    before.get('examples_timed', 0),
  )
  try:
    _train(run, meter, first, steps)
    last = meter.step or first
    metrics = evaluated(run, last)
  except KeyboardInterrupt:  # raised by `interrupts.check` alone
    saved = _save(run, meter, meter.step or first, soon=True)
    goes_on = f'this continues: {run.command}'
    if run.config.checkpoint.codec != RAW:
      goes_on = 'no run goes on from its rows (config.checkpoint.codec)'
    raise KeyboardInterrupt(f'step {saved} is saved, and {goes_on}') from None
  if run.config.train.keep_checkpoint:
    _save(run, meter, last)
  return summarize(run, metrics, _spent(run, meter, last))


def _spent(run: Run, meter: Meter, step: int) -> dict[str, Any]:
  """The totals up to a step; once they are recorded, they stay."""
  if not run.recorder.has(step, TOTALS):
    run.recorder.write(totals(run, meter, step))
  return totals_before(run.recorder)


def _save(run: Run, meter: Meter, step: int, **how: bool) -> int:
  _spent(run, meter, step)  # first: resuming drops what is of later steps
  if is_saved(run.checkpoints, step):
    return step
  position = run.batches.get_state()
  return run.checkpoints.save(run.trainer, position, **how)


def _train(run: Run, meter: Meter, first: int, steps: int) -> None:
  """Trains until `steps` batches of the source were read.

  Fewer steps are taken where examples are left out.

  Raises:
    KeyboardInterrupt: a signal came, and all steps taken were recorded.
  """
  config = run.config
  stops = (config.eval.curve_steps, config.train.checkpoint_steps)
  before, begin = _batches_read(run), begin_of(first, steps)
  with Bar(run.screen, steps, 'batch', done=before) as bar:
    step, more = first, True

    def tell() -> None:
      line = meter.line()
      run.recorder.write(line)
      bar.show(_batches_read(run), *report.rates(line))

    guard = Guard(run, meter)
    draw_curve(run, first)  # a signal may have cut it off
    while more:
      guard.leave_out(step)
      ends = [step - step % n + n for n in stops if n]
      end = min([steps, *guard.ends(step), *ends])
      meter.start()
      records = train(
        run.trainer, run.batches, end - step, stop=interrupts.asked
      )
      if config.profile:
        records = traced(records, run.where, begin, meter.paused)
      try:
        for at in guard.records(records):
          meter.add(at)
          tell_event(run, at.step, at.event)
          if at.step % config.log_steps == 0:
            tell()
      except BadLoss as error:
        step = guard.go_back(error, lambda: _restore(run))
        continue
      if meter.untold:  # the last steps before a stop or the data's end
        tell()
      meter.stop()
      interrupts.check()
      more = meter.step == end < steps
      step = end
      if more:
        _pause(run, meter, guard, step)


def _batches_read(run: Run) -> int:
  """Batches of the source so far, of which skipping makes fewer steps."""
  return run.trainer.engine.counters.examples_seen // run.config.data.batch_size


def _pause(run: Run, meter: Meter, guard: Guard, step: int) -> None:
  """Evaluates and saves where the config asks for it between steps."""
  if draw_curve(run, step):
    guard.look(step)
  save = run.config.train.checkpoint_steps
  if save and step % save == 0:
    _save(run, meter, step, wait=False)


def opened_checkpoints(
  config: ml_collections.ConfigDict, where: pathlib.Path, screen: Console
) -> Checkpoints:
  """The checkpoints of a run, by its section `checkpoint`.

  Raises:
    UserError: settings that cannot be.
  """
  section = config.checkpoint
  tell: Callable[[UserError], None] | None = None
  if section.on_error == 'warn':
    tell = lambda error: _warn(screen, f'no checkpoint: {error}')  # noqa: E731
  saving = Saving(
    section.policy,
    section.keep,
    section.memory_bytes,
    section.consolidate,
    section.codec,
    tell,
  )
  return Checkpoints(workdir.checkpoints_at(where, config), saving)


def announce_checkpoints(
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  where: pathlib.Path,
  screen: Console,
) -> None:
  """Says what checkpoints may take, before there is one."""
  nbytes = build.checkpoint_bytes(trainer)
  kept = 'kept' if config.train.keep_checkpoint else 'removed at the end'
  screen.print(
    f'a checkpoint takes up to {report.size(nbytes)}, {kept} '
    '(config.train.keep_checkpoint)',
    highlight=False,
  )
  at = workdir.checkpoints_at(where, config)
  if '://' in at:
    return
  free = workdir.free_bytes(pathlib.Path(at))
  # The one before is there until the next one is whole.
  if free < nbytes * (2 if config.train.checkpoint_steps else 1):
    _warn(screen, f'its disk has {report.size(free)} left')


def restored(
  trainer: TrainerParts, checkpoints: Checkpoints, screen: Console
) -> Position:
  """Puts the newest whole checkpoint into the trainer; says what is not whole.

  Raises:
    UserError: as `Checkpoints.restore`.
  """
  position = checkpoints.restore(trainer, or_older=True)
  for why in position.skipped:
    _warn(screen, f'a checkpoint cannot be restored: {why}')
  return position


def is_saved(checkpoints: Checkpoints, step: int) -> bool:
  """Whether the run's last checkpoint is of this step.

  Since then nothing happened but that batches were left out, if anything: who
  goes on from there leaves them out again.

  Raises:
    UserError: it could not be written.
  """
  checkpoints.wait()
  return checkpoints.step == step


def close_checkpoints(checkpoints: Checkpoints, screen: Console) -> None:
  """Ends what is being written.

  Raises:
    UserError: it could not be written, and nothing else went wrong before.
  """
  before = sys.exception()
  try:
    checkpoints.close()
  except UserError as error:
    if before is None:
      raise
    _warn(screen, f'no checkpoint: {error}')


def tell_totals(checkpoints: Checkpoints, screen: Console) -> None:
  """Says what saving has cost, if there was any."""
  totals, maintenance = checkpoints.totals, checkpoints.maintenance
  if totals.saved:
    made_one = ''
    if maintenance.bases:
      nbytes = report.size(maintenance.nbytes)
      made_one = f'; {maintenance.bases} times a chain became a base, {nbytes}'
    screen.print(
      f'checkpoints written: {totals.saved}, bases: {totals.bases}; '
      f'{report.size(totals.row_bytes)} of rows, '
      f'{report.size(totals.other_bytes)} of all else{made_one}; '
      f'training waited {totals.seconds_waiting:.1f} s',
      highlight=False,
    )
  if (error := maintenance.error) is not None:
    _warn(screen, f'increments could not be made a base: {error}')


def _warn(screen: Console, text: str) -> None:
  screen.print(text, style='bold red', highlight=False, markup=False)


def draw_curve(run: Run, step: int) -> bool:
  """Evaluates where the config asks for it, unless it was done before.

  Returns:
    Whether a point of the curve is there.
  """
  curve = run.config.eval.curve_steps
  if not (step and curve and step % curve == 0):
    return False
  if not run.recorder.has(step, 'eval'):
    evaluated(run, step, run.config.eval.curve_examples)
  return True


def evaluated(run: Run, step: int, examples: int | None = None) -> Metrics:
  """Evaluates on about so many examples, or on all, and records it.

  Raises:
    UserError: a metric is not finite.
    KeyboardInterrupt: a signal came.
  """
  size = run.config.eval.batch_size
  batches = None if examples is None else -(-examples // size)
  source = interrupts.Checked(run.data.test(size))
  metrics = evaluate(run.trainer, source, batches)
  numbers = metrics._asdict()
  del numbers['heads']  # the shipped models have one
  for name, value in numbers.items():
    if value is not None and not math.isfinite(value):
      raise UserError(
        'the metrics must stay finite',
        got=f'{name} {value}',
        where=f'evaluation after step {step}',
        hint='lower the learning rates or look for bad values in the data',
      )
  trained = run.trainer.engine.counters.examples_trained
  line = {'step': step, 'kind': 'eval', 'examples_trained': trained}
  run.recorder.write(line | numbers)
  return metrics


FOLDER = 'trace'
"""In that of the run."""
BEFORE = 30
"""Steps that come first: programs are compiled, and queues filled."""
STEPS = 20
"""Steps that a trace is of: of more, nobody would look at one."""


def traced(
  records: Iterator[StepRecord],
  folder: pathlib.Path,
  begin: int,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[StepRecord]:
  """The same records, with a trace of up to `STEPS` steps behind one of them.

  Args:
    records: of steps, as they are taken.
    folder: of the run; the trace is in `FOLDER` there.
    begin: the step after which it begins.
    untimed: what surrounds what is done for the trace alone.
  """
  with contextlib.ExitStack() as opened:
    for at in records:
      yield at
      if at.step == begin:
        opened.enter_context(_trace(folder / FOLDER, untimed))
      elif at.step == begin + STEPS:
        opened.close()


def begin_of(first: int, last: int) -> int:
  """The step after which to begin, of a run from one step to another."""
  return first + min(BEFORE, (last - first) // 2)


@contextlib.contextmanager
def _trace(
  folder: pathlib.Path,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # names, not every call of a function
  with untimed():
    jax.profiler.start_trace(folder, profiler_options=options)
  try:
    yield
  finally:
    with untimed():
      jax.profiler.stop_trace()
