"""Trains, evaluates and saves one run, and writes what came of it."""

from collections.abc import Callable, Iterator
import contextlib
import math
import pathlib
import shutil
import sys
import tempfile
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
  processes,
  record,
  report,
)
from experiments.common import workdir as workdirs
from experiments.common.meter import compiled, Meter
from experiments.common.progress import Bar
from experiments.common.record import Recorder
from experiments.run.guard import Guard
from experiments.run.summary import (
  auto_in_words,
  Cycles,
  draw_curve,
  figures,
  paid_in_words,
  record_event,
  Run,
  summarize,
  TOTALS,
  totals,
  totals_before,
)
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Saving
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import BadLoss, StepRecord, train
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.trainer_parts import TrainerParts

TRACE = 'trace'
"""Folder of a profiler's trace, in the folder of the run."""
TRACE_AFTER, TRACE_STEPS = 30, 20
"""Steps before a trace, in which programs are compiled, and steps in it."""


def run(config: ml_collections.ConfigDict, workdir: str | None = None) -> None:
  """Runs the experiment of `config`, by default in a new folder under runs/.

  Raises:
    UserError: bad settings or bad data. The folder then has no summary.
    KeyboardInterrupt: a signal came. What was trained is saved.
  """
  compiled()  # starts counting
  screen, where = report.console(), workdirs.folder(workdir)
  errors.check(config)
  more = [] if config.resume else ['--config.resume=True']
  more += [] if workdir else [f'--workdir={where}']
  processes.join(config)
  command = cli.again(*more)
  if not processes.is_first():
    _follow(config, where, command)
  else:
    with workdirs.claimed(where, config):
      if processes.from_first(workdirs.is_finished(where, config)):
        _print_finished(screen, where)
      else:
        _run(config, screen, where, where, command)
  processes.from_first(True)  # others end when the first has written all


def _follow(
  config: ml_collections.ConfigDict, where: pathlib.Path, command: str
) -> None:
  """Trains as another process than the first, and leaves nothing behind.

  It does all that the first does, because both must take the same steps and
  exchange rows at the same moments. It writes into a folder of its own.
  """
  with tempfile.TemporaryDirectory(prefix='slipstream-run-') as name:
    own = pathlib.Path(name)
    if (where / record.METRICS).exists():  # they say what was evaluated
      shutil.copy(where / record.METRICS, own)
    if not processes.from_first(False):
      _run(config, Console(quiet=True), own, where, command)


def _run(
  config: ml_collections.ConfigDict,
  screen: Console,
  where: pathlib.Path,
  shared: pathlib.Path,
  command: str,
) -> None:
  """Runs the experiment in a folder that no other run may use.

  Checkpoints are in the folder that all processes share.
  """
  data = datasets.dataset(config)
  steps = reads = build.total_steps(config, data)
  recipe = build.recipe(config, data, steps)
  hot = build.hot(config, data, recipe)
  trainer = build.trainer(config, data, recipe, hot)
  batches = build.batches(config, trainer, data, steps)
  checkpoints = _open_checkpoints(config, shared, screen)
  steps = build.most_steps(config, data, steps)
  try:
    report.introduce(screen, data, where)
    _warn_of_little_room(config, trainer, where, screen)
    first = 0
    if config.resume:
      first = _resume(trainer, batches, checkpoints, screen, steps)
      done = (where / record.SUMMARY).exists()
      if first == steps and processes.from_first(done):
        return _print_finished(screen, where)
      screen.print(f'resumed after step {first}')
    # From here on there is something to lose: a signal waits for the step.
    devices = trainer.engine.devices if processes.are_several() else None
    with (
      interrupts.gently(config.checkpoint.grace_seconds),
      interrupts.shared(devices and devices.agreed),
    ):
      workdirs.begin(where, config)
      with contextlib.closing(Recorder(where, first)) as recorder:
        parts = config, data, trainer, batches, checkpoints, recorder, screen
        before, cycles = totals_before(recorder), Cycles(config, trainer, reads)
        run = Run(*parts, where, before, command, cycles)
        summary = _train_and_evaluate(run, first, steps)
      batches.close()
      _finish(run, summary)
  finally:
    batches.close()
    _close(checkpoints, screen)


def _print_finished(screen: Console, where: pathlib.Path) -> None:
  screen.print(f'{where} is finished already: nothing to do', highlight=False)


def _resume(
  trainer: TrainerParts,
  batches: PlannedBatches,
  checkpoints: Checkpoints,
  screen: Console,
  steps: int,
) -> int:
  """Restores the newest whole checkpoint, and returns its step.

  Raises:
    UserError: none fits, or it is beyond the run's last step.
  """
  position = checkpoints.restore(trainer, or_older=True)
  for reason in position.skipped:
    report.warn(screen, f'a checkpoint cannot be restored: {reason}')
  # The schedule's own error, if any, explains best which steps are possible.
  batches.set_state(position.schedule_state)
  if position.step > steps:
    raise UserError(
      f'a resumed run must have at least the {position.step} steps it has'
      ' taken',
      got=steps,
      where='config.train.steps',
      hint='set it to more, or start anew in another --workdir',
    )
  return position.step


def _finish(run: Run, summary: dict[str, Any]) -> None:
  """Draws a picture, writes the summary last, and prints ten figures."""
  draw_curve(run.where / 'learning_curve.png', run.recorder.lines, summary)
  record.write_json(run.where / record.SUMMARY, summary)
  if not run.config.train.keep_checkpoint and processes.is_first():
    run.checkpoints.remove()  # nothing is left to resume
  _print_figures(run, summary)
  if (error := run.checkpoints.maintenance.error) is not None:
    text = f'increments could not be merged into a base: {error}'
    report.warn(run.screen, text)


def _print_figures(run: Run, summary: dict[str, Any]) -> None:
  """Prints the figures that people look at, and how to train on."""
  run.screen.print(report.facts(figures(summary)))
  longer = f'{run.command} --config.train.steps=MORE'
  if build.skips(run.config) or build.regroups(run.config):
    longer = 'start anew, because skipping is planned for all steps of a run'
  elif not run.config.train.keep_checkpoint:
    longer = 'start anew, because config.train.keep_checkpoint is False'
  tell = report.teller(run.screen)
  if (words := paid_in_words(summary)) is not None:
    tell(words)
  if (words := auto_in_words(run.recorder.lines, summary)) is not None:
    tell(words)
  tell(f'saved in {run.where}; all figures: {run.where / record.SUMMARY}')
  tell(f'to train longer: {longer}')


def _train_and_evaluate(run: Run, first: int, steps: int) -> dict[str, Any]:
  """Trains, evaluates on all held-out examples, and returns the summary."""
  meter = Meter(
    run.trainer.engine.counters,
    run.before.get('seconds', 0.0),
    run.before.get('examples_timed', 0),
  )
  try:
    _train(run, meter, first, steps)
    last = meter.step or first
    metrics = _evaluate(run, last)
  except KeyboardInterrupt:  # raised by `interrupts.check` alone
    saved = _save(
      run, meter, meter.step or first, run.cycles.ended(), soon=True
    )
    continued = f'this continues: {run.command}'
    if run.config.checkpoint.codec != RAW:
      continued = 'no run can resume from its rows (config.checkpoint.codec)'
    raise KeyboardInterrupt(f'step {saved} is saved, and {continued}') from None
  if run.config.train.keep_checkpoint:
    _save(run, meter, last, kept=run.config.optimizer.cycles > 0)
  return summarize(run, metrics, _record_totals(run, meter, last))


def _train(run: Run, meter: Meter, first: int, steps: int) -> None:
  """Trains until `steps` batches of the source were read.

  It takes fewer steps if skipping leaves examples out.

  Raises:
    KeyboardInterrupt: a signal came, and all steps taken were recorded.
  """
  config = run.config
  stops = (config.eval.curve_steps, config.train.checkpoint_steps)
  trace_after = first + min(TRACE_AFTER, (steps - first) // 2)
  with Bar(run.screen, steps, 'batch', done=_batches_read(run)) as bar:
    step, more = first, True

    def write_line() -> None:
      line = meter.line()
      run.recorder.write(line)
      bar.show(_batches_read(run), *report.rates(line))

    guard = Guard(run, meter)
    # To write a trace may take long.
    watch = processes.Watch(0 if config.profile else config.hang_seconds)
    _draw_curve(run, first)  # a signal may have interrupted it
    while more:
      guard.leave_out(step)
      ends = [step - step % n + n for n in stops if n]
      end = min([steps, *guard.ends(step), *ends])
      meter.start()
      records = train(
        run.trainer,
        run.batches,
        end - step,
        stop=lambda: interrupts.asked() or run.cycles.ended(),
      )
      if config.profile:
        records = _traced(records, run.where, trace_after, meter.paused)
      try:
        with watch.on():
          for at in guard.records(records):
            watch.step()
            meter.add(at)
            record_event(run, at.step, at.event)
            if at.step % config.log_steps == 0:
              write_line()
      except BadLoss as error:
        step = guard.go_back(error, lambda: _go_back(run))
        continue
      if meter.steps:  # the last steps before a stop or the end of the data
        write_line()
      meter.stop()
      interrupts.check()
      more = meter.step < steps and (meter.step == end or run.cycles.ended())
      step = meter.step
      if more:
        _pause(run, meter, guard, step)


def _batches_read(run: Run) -> int:
  """Returns the batches read so far. Skipping makes fewer steps of them."""
  return run.trainer.engine.counters.examples_seen // run.config.data.batch_size


def _go_back(run: Run) -> int:
  """Restores the newest checkpoint, and returns its step."""
  parts = run.trainer, run.batches, run.checkpoints, run.screen
  step = _resume(*parts, sys.maxsize)
  run.cycles.begin()
  return step


def _pause(run: Run, meter: Meter, guard: Guard, step: int) -> None:
  """Evaluates and saves after a step, if the config asks for it."""
  if _draw_curve(run, step):
    guard.look(step)
  save = run.config.train.checkpoint_steps
  if (save and step % save == 0) or run.cycles.ended():
    _save(run, meter, step, kept=run.cycles.ended(), wait=False)


def _draw_curve(run: Run, step: int) -> bool:
  """Whether the learning curve has a point at a step. Evaluates if needed."""
  curve = run.config.eval.curve_steps
  if not (step and curve and step % curve == 0):
    return False
  if not run.recorder.has(step, 'eval'):
    _evaluate(run, step, run.config.eval.curve_examples)
  return True


def _evaluate(run: Run, step: int, examples: int | None = None) -> Metrics:
  """Evaluates on about `examples` held-out examples, or on all; records it.

  Raises:
    UserError: a metric is not finite.
    KeyboardInterrupt: a signal came.
  """
  size = run.config.eval.batch_size
  batches = None if examples is None else -(-examples // size)
  metrics = build.evaluated(run.config, run.trainer, run.data, batches)
  numbers = metrics._asdict()
  del numbers['heads']  # the models that a config names have one head
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


def _open_checkpoints(
  config: ml_collections.ConfigDict, where: pathlib.Path, screen: Console
) -> Checkpoints:
  """Returns the checkpoints of a run, with the settings of its config.

  Raises:
    UserError: an invalid combination of settings.
  """
  section = config.checkpoint

  def warn(error: UserError) -> None:
    report.warn(screen, f'no checkpoint: {error}')

  saving = Saving(
    section.policy,
    section.keep,
    section.memory_bytes,
    section.consolidate,
    section.codec,
    warn if section.on_error == 'warn' else None,
  )
  return Checkpoints(workdirs.checkpoints_at(where, config), saving)


def _warn_of_little_room(
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  where: pathlib.Path,
  screen: Console,
) -> None:
  """Warns if a checkpoint may not fit on its disk, or rows are in tmpfs."""
  if (words := build.no_disk(config)) is not None:
    report.warn(screen, words)
  at = workdirs.checkpoints_at(where, config)
  if '://' in at:
    return
  nbytes = build.checkpoint_bytes(trainer.recipe, trainer.state)
  free = workdirs.free_bytes(pathlib.Path(at))
  # The previous checkpoint is kept until the next one is whole.
  most = 2 if config.train.checkpoint_steps else 1
  if free < nbytes * max(most, config.optimizer.cycles):
    report.warn(
      screen,
      f'a checkpoint takes up to {report.size(nbytes)}, and its disk has'
      f' {report.size(free)} left',
    )


def _record_totals(run: Run, meter: Meter, step: int) -> dict[str, Any]:
  """Returns the totals up to a step. They are recorded once."""
  if not run.recorder.has(step, TOTALS):
    run.recorder.write(totals(run, meter, step))
  return totals_before(run.recorder)


def _save(run: Run, meter: Meter, step: int, kept: bool, **how: bool) -> int:
  """Saves a checkpoint unless the last one is of this step; returns the step.

  It is `kept` at the end of a cycle of the learning rates. Batches that were
  left out after that step are left out again after resuming.
  """
  _record_totals(run, meter, step)  # first: resuming drops later lines
  run.checkpoints.wait()
  run.cycles.begin()
  if run.checkpoints.step == step and not kept:
    return step
  position = run.batches.get_state()
  return run.checkpoints.save(run.trainer, position, kept=kept, **how)


def _close(checkpoints: Checkpoints, screen: Console) -> None:
  """Waits for the checkpoint that is being written.

  Raises:
    UserError: it could not be written. If another error is on its way, this is
      a warning.
  """
  before = sys.exception()
  try:
    checkpoints.close()
  except UserError as error:
    if before is None:
      raise
    report.warn(screen, f'no checkpoint: {error}')


def _traced(
  records: Iterator[StepRecord],
  folder: pathlib.Path,
  after: int,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[StepRecord]:
  """Yields the same records, and traces the steps that follow one of them.

  Args:
    records: of steps, as they are taken.
    folder: of the run.
    after: the last step before the trace.
    untimed: a context that stops the clock of training.
  """
  with contextlib.ExitStack() as opened:
    for at in records:
      yield at
      if at.step == after:
        opened.enter_context(_trace(folder / TRACE, untimed))
      elif at.step == after + TRACE_STEPS:
        opened.close()


@contextlib.contextmanager
def _trace(
  folder: pathlib.Path,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
  """Traces a block, with the library's names and not every Python call."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with untimed():
    jax.profiler.start_trace(folder, profiler_options=options)
  try:
    yield
  finally:
    with untimed():
      jax.profiler.stop_trace()
