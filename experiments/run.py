"""Trains, evaluates and reports one experiment.

python -m experiments.run --config=configs/criteo.py \
    [--config.key=value] [--workdir=DIR]
"""

import datetime
import pathlib
import resource
from typing import Any, NamedTuple

from absl import flags
import ml_collections
from rich.console import Console

from experiments import build, cli, datasets, record, report
from experiments.meter import Meter
from experiments.record import Recorder
from slipstream_jax.data.batches import Dataset
from slipstream_jax.stream.compilations import compiled
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.train.checkpoint import Checkpoints
from slipstream_jax.train.evaluate import evaluate
from slipstream_jax.train.loop import train
from slipstream_jax.train.metrics import Metrics
from slipstream_jax.train.trainer import Trainer

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; a new one under runs/ by default.'
)


class Run(NamedTuple):
  """The parts of a run under way."""

  config: ml_collections.ConfigDict
  data: Dataset
  trainer: Trainer
  batches: PlannedBatches
  checkpoints: Checkpoints
  recorder: Recorder
  shown: Console


def main(config: ml_collections.ConfigDict) -> None:
  """Runs the experiment of `config`.

  Raises:
    UserError: bad settings or bad data; the workdir then has no summary.
  """
  compiled()  # starts counting
  shown, workdir = report.console(), _workdir()
  build.check(config)
  record.check_workdir(workdir, config)
  data = datasets.dataset(config)
  steps = build.total_steps(config, data)
  recipe = build.recipe(config, data, steps)
  hot = build.hot(config, data, recipe)
  trainer = build.trainer(config, data, recipe, hot)
  batches = build.batches(config, trainer, data, steps)
  record.open_workdir(workdir, config)
  report.introduce(shown, data, workdir)
  checkpoints = Checkpoints(workdir / 'checkpoints')
  first = 0
  if config.resume:
    first, state, _ = checkpoints.restore(trainer)
    batches.set_state(state)
    shown.print(f'resumed after step {first}')
  recorder = Recorder(workdir, first)
  run = Run(config, data, trainer, batches, checkpoints, recorder, shown)
  try:
    summary = _train_and_evaluate(run, first, steps)
  finally:
    batches.close()
    checkpoints.close()
    recorder.close()
  lines = recorder.lines
  report.plot_learning_curve(workdir / 'learning_curve.png', lines, summary)
  report.plot_transfers(workdir / 'transfers.png', lines, summary)
  record.write_json(workdir / record.SUMMARY, summary)
  shown.print(report.summary_table(summary))


def _workdir() -> pathlib.Path:
  if _WORKDIR.value:
    return pathlib.Path(_WORKDIR.value)
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  return pathlib.Path('runs') / f'{cli.config_name()}-{now}'


def _train_and_evaluate(run: Run, first: int, steps: int) -> dict[str, Any]:
  meter = _train(run, first, steps)
  metrics = evaluate(run.trainer, run.data.test(run.config.eval.batch_size))
  last = meter.step or first
  _record_eval(run, last, metrics)
  run.checkpoints.save(run.trainer, run.batches.get_state())
  return _summary(run, metrics, last, meter)


def _train(run: Run, first: int, steps: int) -> Meter:
  """Trains until `steps` batches of the source were read.

  Fewer steps are taken where inputs are left out.
  """
  config = run.config
  meter = Meter(run.trainer.engine.counters)
  stops = (config.eval.curve_steps, config.train.checkpoint_steps)
  with report.progress_bar(run.shown) as bar:
    task = bar.add_task('compiling', total=steps)
    step, more = first, True

    def tell() -> None:
      line = meter.line()
      run.recorder.write(line)
      seen = run.trainer.engine.counters.inputs_seen
      read = seen / config.data.batch_size
      bar.update(task, completed=read, description=report.rates(line))
      if bar.disable and meter.quiet():
        run.shown.print(f'batch {read:.0f}/{steps}  {report.rates(line)}')

    while more:
      end = min([steps] + [step - step % n + n for n in stops if n])
      meter.start()
      for at in train(run.trainer, run.batches, end - step):
        meter.add(at)
        if at.event is not None:
          run.recorder.write({'step': at.step, **at.event})
        if at.step % config.log_steps == 0:
          tell()
      if meter.untold:  # the last steps before a stop or the data's end
        tell()
      meter.stop()
      more = meter.step == end < steps
      step = end
      if more:
        _pause(run, step)
  return meter


def _pause(run: Run, step: int) -> None:
  """Evaluates and saves where the config asks for it between steps."""
  curve, save = run.config.eval.curve_steps, run.config.train.checkpoint_steps
  if curve and step % curve == 0:
    size = run.config.eval.batch_size
    batches = -(-run.config.eval.curve_inputs // size)
    metrics = evaluate(run.trainer, run.data.test(size), batches)
    _record_eval(run, step, metrics)
  if save and step % save == 0:
    run.checkpoints.save(run.trainer, run.batches.get_state())


def _record_eval(run: Run, step: int, metrics: Metrics) -> None:
  trained = run.trainer.engine.counters.inputs_trained
  run.recorder.write(
    {
      'step': step,
      'kind': 'eval',
      'inputs_trained': trained,
      **metrics._asdict(),
    }
  )


def _summary(
  run: Run, metrics: Metrics, steps: int, meter: Meter
) -> dict[str, Any]:
  """The run in numbers; speed is that of the steps of this process."""
  counters = run.trainer.engine.counters
  return {
    'data': run.data.name,
    'seed': run.config.seed,
    'placement': run.config.placement,
    'steps': steps,
    'seconds': meter.seconds,
    'samples_per_s': meter.inputs / meter.seconds if meter.seconds else None,
    **{k: v for k, v in metrics._asdict().items() if k != 'inputs'},
    'inputs_evaluated': metrics.inputs,
    'bayes_auc': run.data.bayes_auc,
    **counters._asdict(),
    **_skipped(run, meter),
    'compilations': compiled().programs,
    'seconds_compiling': compiled().seconds,
    'peak_rss_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }


def _skipped(run: Run, meter: Meter) -> dict[str, Any]:
  """What skipping did, and what it saved and cost; null in a plain run."""
  skip, trainer = run.config.skip, run.trainer
  skips = build.skips(run.config)
  decisions = [x for x in run.recorder.lines if x['kind'] == 'decision']
  last = decisions[-1] if decisions else {}
  counters = trainer.engine.counters
  choosing, watching = run.batches.seconds_choosing, trainer.seconds_watching
  per_input = meter.seconds / max(meter.inputs, 1)
  return {
    'skip_mode': skip.mode,
    'skip_policy': skip.policy if skips else None,
    'drop_target': skip.drop_target if skips else None,
    'inputs_hot_share': last.get('inputs_hot'),
    'rows_stale': last.get('rows_stale'),
    'seconds_choosing': choosing if skips else None,
    'seconds_watching': watching if skips else None,
    'saved_rows': counters.rows_used - counters.rows_loaded,
    'saved_bytes': (
      (counters.rows_used - counters.rows_loaded) * trainer.engine.row_bytes
      + (counters.rows_used - counters.rows_stored) * trainer.engine.row_bytes
    ),
    'saved_seconds': counters.inputs_dropped * per_input if skips else None,
  }


if __name__ == '__main__':
  cli.run(main)
