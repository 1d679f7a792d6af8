"""The parts of a run under way, and what they come to in numbers."""

import pathlib
import resource
from typing import Any, NamedTuple

import ml_collections
from rich.console import Console

from experiments.common import build
from experiments.common.meter import Meter
from experiments.common.record import Recorder
from slipstream_jax.data.base import Dataset
from slipstream_jax.runtime import compiled
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.training.checkpoint import Checkpoints
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.trainer import Trainer


class Run(NamedTuple):
  """The parts of a run under way."""

  config: ml_collections.ConfigDict
  data: Dataset
  trainer: Trainer
  batches: PlannedBatches
  checkpoints: Checkpoints
  recorder: Recorder
  screen: Console
  where: pathlib.Path


_NOT_NUMBERS = 'examples', 'heads'  # of metrics, under another name or none


def summarize(
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
    'examples_per_s': meter.examples / meter.seconds if meter.seconds else None,
    **{k: v for k, v in metrics._asdict().items() if k not in _NOT_NUMBERS},
    'examples_evaluated': metrics.examples,
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
  per_example = meter.seconds / max(meter.examples, 1)
  return {
    'skip_mode': skip.mode,
    'skip_policy': skip.policy if skips else None,
    'drop_target': skip.drop_target if skips else None,
    'examples_hot_share': last.get('examples_hot'),
    'rows_stale': last.get('rows_stale'),
    'seconds_choosing': choosing if skips else None,
    'seconds_watching': watching if skips else None,
    'saved_rows': counters.rows_used - counters.rows_loaded,
    'saved_bytes': (
      2 * counters.bytes_used - counters.bytes_loaded - counters.bytes_stored
    ),
    'saved_seconds': counters.examples_dropped * per_example if skips else None,
  }
