r"""Trains, evaluates and reports one experiment.

python -m experiments.run --config=configs/criteo.py \
    [--config.key=value] [--workdir=DIR]
"""

import contextlib
import pathlib
from typing import Any

from absl import flags
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
from experiments.common.record import Recorder
from experiments.common.summary import (
  Run,
  summarize,
  tell_event,
  TOTALS,
  totals,
  totals_before,
)
from experiments.guarding.guard import Guard
from experiments.running import saving, tiers
from experiments.running.curve import draw_curve, evaluated
from experiments.screen.bar import Bar
from experiments.systems.order import most_steps
from experiments.tracing import steps as tracing
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import BadLoss, train
from slipstream_jax.training.trainer_parts import TrainerParts

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; a new one under runs/ by default.'
)


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the experiment of `config`.

  Raises:
    UserError: bad settings or bad data; the workdir then has no summary.
    KeyboardInterrupt: a signal came; what was trained is saved.
  """
  compiled()  # starts counting
  screen, where = report.console(), workdir.folder(_WORKDIR.value)
  errors.check(config)
  with workdir.claimed(where, config):
    if workdir.is_finished(where, config):
      _say_finished(screen, where)
    else:
      _run(config, screen, where)


def _run(
  config: ml_collections.ConfigDict, screen: Console, where: pathlib.Path
) -> None:
  """Runs it in a folder that is this run's alone."""
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  recipe = build.recipe(config, data, steps)
  build.check_skip(config, recipe)
  hot = build.hot(config, data, recipe)
  trainer = build.trainer(config, data, recipe, hot)
  batches = build.batches(config, trainer, data, steps)
  checkpoints = saving.opened(config, where, screen)
  steps = most_steps(config, data, steps)
  try:
    report.introduce(screen, data, where)
    saving.announce(config, trainer, where, screen)
    tiers.announce(config, screen)
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
        )
        summary = _train_and_evaluate(run, first, steps)
      batches.close()
      _finish(run, where, summary)
  finally:
    batches.close()
    saving.close(checkpoints, screen)


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
  position = saving.restored(trainer, checkpoints, screen)
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
  saving.tell_totals(run.checkpoints, run.screen)


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
    more = [] if run.config.resume else ['--config.resume=True']
    if not _WORKDIR.value:
      more.append(f'--workdir={run.where}')
    goes_on = f'this continues: {cli.again(*more)}'
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
  if saving.is_saved(run.checkpoints, step):
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
  before, begin = _batches_read(run), tracing.begin_of(first, steps)
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
        records = tracing.traced(records, run.where, begin, meter.paused)
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


if __name__ == '__main__':
  cli.run(main)
