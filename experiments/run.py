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

from experiments import build, cli, record, report
from experiments.meter import Meter
from experiments.record import Recorder
from slipstream_jax.data.batches import Dataset
from slipstream_jax.stream.compilations import compilations
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.train.checkpoint import Checkpoints
from slipstream_jax.train.evaluate import evaluate
from slipstream_jax.train.loop import create_trainer, planned, train, Trainer
from slipstream_jax.train.metrics import Metrics

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
  compilations()
  shown, workdir = report.console(), _workdir()
  build.check(config)
  record.check_workdir(workdir, config)
  data = build.dataset(config)
  steps = build.total_steps(config, data)
  trainer = create_trainer(
    build.recipe(config, data, steps),
    build.placement(config),
    data.dense_features,
    config.seed,
  )
  record.open_workdir(workdir, config)
  report.introduce(shown, data, workdir)
  source = data.train(config.data.batch_size)
  checkpoints = Checkpoints(workdir / 'checkpoints')
  first = 0
  if config.resume:
    first, source_state, _ = checkpoints.restore(trainer)
    source.set_state(source_state)
    shown.print(f'resumed after step {first}')
  batches = planned(trainer, source, config.prefetch)
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
  seconds = _train(run, first, steps)
  metrics = evaluate(run.trainer, run.data.test(run.config.eval.batch_size))
  _record_eval(run, steps, metrics)
  run.checkpoints.save(run.trainer, run.batches.get_state())
  return _summary(run, metrics, steps, steps - first, seconds)


def _train(run: Run, first: int, steps: int) -> float:
  """Trains up to step `steps`; returns the seconds spent in steps."""
  config = run.config
  meter = Meter(run.trainer.engine.counters)
  stops = (config.eval.curve_steps, config.train.checkpoint_steps)
  with report.progress_bar(run.shown) as bar:
    task = bar.add_task('compiling', total=steps, completed=first)
    step = first
    while step < steps:
      end = min([steps] + [step - step % n + n for n in stops if n])
      meter.start()
      for at in train(run.trainer, run.batches, end - step):
        meter.add(at)
        if at.step % config.log_steps == 0 or at.step == end:
          line = meter.line()
          run.recorder.write(line)
          bar.update(task, completed=at.step, description=report.rates(line))
          if bar.disable and meter.quiet():
            run.shown.print(f'step {at.step}/{steps}  {report.rates(line)}')
      meter.stop()
      step = end
      _pause(run, step, steps)
  return meter.seconds


def _pause(run: Run, step: int, steps: int) -> None:
  """Evaluates and saves where the config asks for it between steps."""
  curve, save = run.config.eval.curve_steps, run.config.train.checkpoint_steps
  if curve and step % curve == 0 and step < steps:
    size = run.config.eval.batch_size
    batches = -(-run.config.eval.curve_inputs // size)
    metrics = evaluate(run.trainer, run.data.test(size), batches)
    _record_eval(run, step, metrics)
  if save and step % save == 0 and step < steps:
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
  run: Run, metrics: Metrics, steps: int, taken: int, seconds: float
) -> dict[str, Any]:
  """The run in numbers; speed is that of the `taken` steps of this process."""
  counters = run.trainer.engine.counters
  inputs = taken * run.config.data.batch_size
  return {
    'data': run.data.name,
    'seed': run.config.seed,
    'placement': run.config.placement,
    'steps': steps,
    'seconds': seconds,
    'samples_per_s': inputs / seconds if seconds else None,
    **{k: v for k, v in metrics._asdict().items() if k != 'inputs'},
    'inputs_evaluated': metrics.inputs,
    'bayes_auc': run.data.bayes_auc,
    **counters._asdict(),
    'compilations': compilations(),
    'peak_rss_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }


if __name__ == '__main__':
  cli.run(main)
