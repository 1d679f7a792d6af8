"""The parts of a run, and the numbers and the picture that they leave."""

import bisect
from collections.abc import Sequence
import pathlib
import resource
from typing import Any, NamedTuple

import ml_collections
from rich.console import Console

from experiments.common import build, page, report
from experiments.common.meter import compiled, Meter
from experiments.common.record import Recorder
from slipstream_jax.api.history import cost_in_words, pays_in_words
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.source import Dataset
from slipstream_jax.engine.clock import Payoff
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.selection.gain import VERDICTS
from slipstream_jax.selection.policies import POLICIES, RANDOM
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.retrieval import NDCG, RECALL
from slipstream_jax.training.trainer_parts import best_policy, TrainerParts
from slipstream_jax.transforms.weights import cycle_ends


class Cycles:
  """Counts the cycles of the learning rates that end before the run does.

  Each ends in a checkpoint that is kept.
  """

  def __init__(
    self, config: ml_collections.ConfigDict, trainer: TrainerParts, steps: int
  ) -> None:
    """Counts those of a run of `steps` batches from here on."""
    self._size, self._trainer = config.data.batch_size, trainer
    cycles = config.optimizer.cycles
    self._ends = cycle_ends(steps, cycles)[:-1] if cycles else []
    self.begin()

  def begin(self) -> None:
    """Counts from what the trainer has read by now."""
    self._done = self._now()

  def ended(self) -> bool:
    """Whether a cycle has ended since `begin`."""
    return self._now() > self._done

  def _now(self) -> int:
    seen = self._trainer.engine.counters.examples_seen / self._size
    return bisect.bisect_right(self._ends, seen)


class Run(NamedTuple):
  """The parts of a run under way."""

  config: ml_collections.ConfigDict
  data: Dataset
  trainer: TrainerParts
  batches: PlannedBatches
  checkpoints: Checkpoints
  recorder: Recorder
  screen: Console
  where: pathlib.Path
  before: dict[str, Any]
  """Totals of the run's earlier processes; see `totals`."""
  command: str
  """Shell command that continues the run."""
  cycles: Cycles


_WAITED = 'seconds_waiting_for_checkpoints'
TOTALS = 'totals'
"""Kind of the metrics' lines with the totals at a checkpoint, from which a
resumed run counts on."""


def totals_before(recorder: Recorder) -> dict[str, Any]:
  """Returns the totals of the run's earlier processes, or {}."""
  lines = [line for line in recorder.lines if line['kind'] == TOTALS]
  return lines[-1] if lines else {}


def totals(run: Run, meter: Meter, step: int) -> dict[str, Any]:
  """Returns what all processes of the run spent up to a step, as a line."""
  before = run.before
  now = {
    'seconds_compiling': compiled().seconds,
    'compilations': compiled().programs,
    'seconds_choosing': run.batches.seconds_choosing,
    'seconds_watching': run.trainer.seconds_watching,
    _WAITED: run.checkpoints.totals.seconds_waiting,
    'processes': 1,
  }
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {
    'step': step,
    'kind': TOTALS,
    'seconds': meter.seconds,
    'examples_timed': meter.examples,
    **{key: before.get(key, 0) + value for key, value in now.items()},
    **_tiers(run),
    'peak_rss_bytes': max(peak, before.get('peak_rss_bytes', 0)),
  }


_TIERS = {
  'store_rows_gathered': 'gathered',
  'store_rows_in_memory': 'hits',
  'store_rows_fetched_ahead': 'fetched',
  'store_rows_missed': 'missed',
  'store_rows_computed': 'first',
  'store_rows_written': 'written',
  'store_bytes_read': 'bytes_read',
  'store_bytes_written': 'bytes_written',
  'seconds_waiting_for_store': 'waited_s',
}
"""Names of the fields of `TierCounts`."""


def _tiers(run: Run) -> dict[str, Any]:
  """Returns what the stores on a disk did in all processes, or {}."""
  counts = [group.host.counts for group in run.trainer.engine.groups]
  there = [one for one in counts if one is not None]
  return {
    name: run.before.get(name, 0) + sum(getattr(one, field) for one in there)
    for name, field in _TIERS.items()
    if there
  }


_NOT_NUMBERS = 'examples', 'heads'  # metrics that have another name, or none
_SPENT = 'processes', 'compilations', 'seconds_compiling', 'peak_rss_bytes'


def summarize(
  run: Run, metrics: Metrics, spent: dict[str, Any]
) -> dict[str, Any]:
  """Returns the run in numbers, including the processes before this one.

  Args:
    run: a run that took its last step.
    metrics: of its last evaluation.
    spent: its last totals.
  """
  counters, seconds = run.trainer.engine.counters, spent['seconds']
  return {
    'data': run.data.name,
    'seed': run.config.seed,
    'system': run.config.system,
    'placement': run.trainer.engine.placements[0].name,
    'batches': -(-counters.examples_seen // run.config.data.batch_size),
    'steps': spent['step'],
    'seconds': seconds,
    'examples_per_s': spent['examples_timed'] / seconds if seconds else None,
    **{k: v for k, v in metrics._asdict().items() if k not in _NOT_NUMBERS},
    'examples_evaluated': metrics.examples,
    'bayes_auc': run.data.bayes_auc,
    **counters._asdict(),
    **{key: spent[key] for key in _TIERS if key in spent},
    **_skipped(run, spent),
    **_saved(run, spent),
    **{key: spent[key] for key in _SPENT},
    # The last totals were recorded before the last checkpoint was saved.
    _WAITED: run.before.get(_WAITED, 0)
    + run.checkpoints.totals.seconds_waiting,
  }


def _skipped(run: Run, spent: dict[str, Any]) -> dict[str, Any]:
  """Returns what skipping did and what it cost. A plain run has None."""
  skip, skips = run.config.skip, build.skips(run.config)
  policy = skip.policy or best_policy(run.trainer).name
  decisions = [x for x in run.recorder.lines if x['kind'] == 'decision']
  last = decisions[-1] if decisions else {}
  undecided = [x for x in run.recorder.lines if x['kind'] == 'undecided']
  kinds = 'decision', 'missed', 'undecided'
  lines = [x for x in run.recorder.lines if x['kind'] in kinds]
  missed = [x['missed'] for x in lines if x.get('missed') is not None]
  shares = (x for x in map(_hot_share, reversed(lines)) if x is not None)
  counters = run.trainer.engine.counters
  share = counters.examples_dropped / max(counters.examples_seen, 1)
  return {
    'skip_mode': skip.mode,
    'skip_policy': policy if skips else None,
    'skip_refill': run.batches.refills if skips else None,
    'drop': skip.drop if skips else None,
    'drop_of': skip.drop_of if skips else None,
    'examples_dropped_share': share if skips else None,
    'drop_missed_share': max(missed, key=abs, default=None),
    'times_undecided': len(undecided) or None,
    'examples_hot_share': next(shares, None),
    'rows_stale': last.get('rows_stale'),
    **_worth(run),
    'seconds_choosing': spent['seconds_choosing'] if skips else None,
    'seconds_watching': spent['seconds_watching'] if skips else None,
    **_paid(run),
  }


def _paid(run: Run) -> dict[str, Any]:
  """Returns whether choosing saves time, as this process has measured it."""
  paid = run.batches.clock.payoff()
  return {
    'step_ms': None if paid is None else paid.step_ms,
    'step_ms_to_pay': None if paid is None else paid.step_ms_to_pay,
    'skipping_saves_time': None if paid is None else paid.pays,
  }


def paid_in_words(summary: dict[str, Any]) -> str | None:
  """Returns whether skipping pays, if examples were chosen or it does not."""
  paid, worth = None, summary['choosing']
  if (pays := summary['skipping_saves_time']) is not None:
    share, step = summary['examples_dropped_share'], summary['step_ms']
    paid = Payoff(share, step, summary['step_ms_to_pay'], pays)
  if worth is not None:
    losses = summary['scorer_log_loss'], summary['log_loss']
    words = pays_in_words(VERDICTS.index(worth), paid, *losses)
    return f'does it pay to choose examples? {words}'
  return None if paid is None or paid.pays else cost_in_words(paid)


def auto_in_words(
  lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> str | None:
  """Returns what drop='auto' promised, and whether the model bears it out.

  The promise looks back: what a model gains later, after a plateau, is not in
  it. A model whose held-out loss still falls lost about as much with each half
  of the examples as it gained with the last half, so it lost more.

  Args:
    lines: of the metrics, in order of steps.
    summary: of the same run.

  Returns:
    A sentence, or None if nothing was dropped so.
  """
  share, promised = summary['examples_dropped_share'], summary['log_loss_lost']
  if summary['drop'] != 'auto' or not share:
    return None
  promised = promised or 0.0
  said = (
    'config.skip.drop=auto is experimental: it left out'
    f' {share:.0%} of the examples and promised to lose at most'
    f' {promised:.4f} of log loss'
  )
  fell = _fell(lines, summary['examples_trained'] / 2)
  if fell is None:
    return f'{said}, which too few evaluations were made to check'
  if share * fell <= promised:
    return said
  return (
    f'{said}, but the held-out log loss still fell by {fell:.4f} over the last'
    ' half of the examples trained, so it may have lost far more: train with'
    ' config.skip.mode=off to see'
  )


def _fell(lines: Sequence[dict[str, Any]], since: float) -> float | None:
  """Returns by how much the held-out loss fell since these examples, or None.

  It compares points of the learning curve, which are of the same examples. The
  last evaluation may be of more.
  """
  points = [x for x in lines if x['kind'] == 'eval' and 'log_loss' in x]
  points = [x for x in points if x['examples'] == points[0]['examples']]
  before = [x for x in points if x['examples_trained'] <= since]
  if not before or before[-1] is points[-1]:
    return None
  fell: float = before[-1]['log_loss'] - points[-1]['log_loss']
  return fell


def _worth(run: Run) -> dict[str, Any]:
  """Returns what choosing by scores is worth, by the last line that says it.

  What is lost is the most that any line promised.
  """
  lines = [line for line in run.recorder.lines if 'verdict' in line]
  last = lines[-1] if lines else {}
  lost = [line['log_loss_lost'] for line in lines if 'log_loss_lost' in line]
  names = 'scorer_auc', 'scorer_log_loss', 'scorer_chosen', 'variance_bound'
  return {
    'scorer': run.config.skip.scorer if last else None,
    **{name: last.get(name) for name in names},
    'log_loss_lost': max(lost, default=None),
    'drop_found': last.get('drop'),
    'choosing': VERDICTS[last['verdict']] if last else None,
  }


def _hot_share(line: dict[str, Any]) -> float | None:
  """Returns the share of hot examples in a line of a decision, or of a miss."""
  share: float | None = line.get('hot_share', line.get('examples_hot'))
  return share


def record_event(run: Run, step: int, event: dict[str, Any] | None) -> None:
  """Records a decision of the schedule, and prints what went wrong with it."""
  if event is None:
    return
  before = [x['verdict'] for x in run.recorder.lines if 'verdict' in x]
  kinds = 'decision', 'undecided'
  decided = [x['kind'] for x in run.recorder.lines if x['kind'] in kinds]
  run.recorder.write({'step': step, **event})
  verdict = event.get('verdict')
  # Only changes are printed.
  if verdict and before[-1:] != [verdict]:
    run.screen.print(VERDICTS[verdict], highlight=False)
  if event['kind'] == 'undecided' and decided[-1:] != ['undecided']:
    run.screen.print(_undecided_in_words(event), highlight=False)
  if event['kind'] == 'missed':
    line = _missed_in_words(run.config.skip, event)
    run.screen.print(line, highlight=False)


def _undecided_in_words(event: dict[str, Any]) -> str:
  """Returns why nothing could be decided, from an 'undecided' event."""
  if 'batches_left_out' in event:
    said = (
      f'the last {event["batches_left_out"]:,} batches of the source left'
      ' nothing to train, so no example is left out until the next decision'
    )
  elif 'examples_hot' in event:
    said = (
      'no example of the sample looks up hot rows only, so the drop target'
      ' cannot be met, and nothing is skipped until some do'
    )
  else:
    said = 'the next period began before the decision was due, so there is none'
  return f'{event["batches_seen"]:,} batches: {said}'


def _missed_in_words(
  skip: ml_collections.ConfigDict, event: dict[str, Any]
) -> str:
  """Returns by how much a drop target was missed, from a 'missed' event."""
  of = 'all' if skip.drop_of == 'all' else 'hot'
  return (
    f'{event["batches_seen"]:,} batches: {event["dropped"]:.0%} of {of} '
    f'examples were dropped lately, {event["asked"]:.0%} were asked for; '
    f'{event["hot_share"]:.0%} look up hot rows only, '
    f'{event["hot_share_before"]:.0%} did before'
  )


def _saved(run: Run, spent: dict[str, Any]) -> dict[str, Any]:
  """Returns what placement and skipping saved against streaming every row.

  If they moved more than that, the difference is `extra`.
  """
  counters = run.trainer.engine.counters
  rows = counters.rows_used - counters.rows_loaded
  moved = counters.bytes_loaded + counters.bytes_stored
  nbytes = 2 * counters.bytes_used - moved
  per_example = spent['seconds'] / max(spent['examples_timed'], 1)
  return {
    'saved_rows': max(rows, 0),
    'extra_rows': -rows if rows < 0 else None,
    'saved_bytes': max(nbytes, 0),
    'extra_bytes': -nbytes if nbytes < 0 else None,
    'saved_seconds': (
      counters.examples_dropped * per_example
      if build.skips(run.config)
      else None
    ),
  }


def figures(summary: dict[str, Any]) -> dict[str, Any]:
  """Returns the figures that a run prints. The summary has all others."""
  left_out = f'{summary["examples_dropped"]:,}'
  if share := summary['examples_dropped_share']:
    left_out += f' ({share:.1%})'
  moved = summary['bytes_loaded'] + summary['bytes_stored']
  compiling = f'{summary["seconds_compiling"]:,.1f} s compiling'
  quality = {
    'AUC': report.auc(summary['auc']),
    'log loss': summary['log_loss'],
    'calibration': summary['calibration'],
  }
  if RECALL in summary:
    quality = {'recall at 10': summary[RECALL], 'NDCG at 10': summary[NDCG]}
  exchanged = {}
  if nbytes := summary.get('bytes_exchanged'):
    exchanged = {'bytes between devices': nbytes}
  if nbytes := summary.get('bytes_between_hosts'):
    exchanged['bytes between hosts'] = nbytes
  if nbytes := summary.get('bytes_of_parameters'):
    exchanged['bytes of parameters moved'] = nbytes
  return {
    **quality,
    'examples per s': summary['examples_per_s'],
    'time': f'{summary["seconds"]:,.1f} s training, {compiling}',
    'examples left out': left_out,
    'bytes moved': moved,
    **exchanged,
    'peak memory': report.size(summary['peak_rss_bytes']),
  }


_TRAINED = 'million examples trained'


def draw_curve(
  path: pathlib.Path, lines: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> None:
  """Draws training loss and held-out AUC against examples trained."""
  figure, (left, right) = page.figure(3.8, width=10, ncols=2)
  color = page.color(0)
  left.plot(*_points(lines, 'train', 'loss'), color=color)
  loss, key, axis = 'log loss', 'auc', 'AUC'
  last = report.auc(summary['auc'])
  if RECALL in summary:
    loss, key, axis = 'softmax loss over the batch', RECALL, 'recall at 10'
    last = f'{summary[RECALL]:.4f}'
  title = 'training loss'
  policy = POLICIES.get(summary['skip_policy'], RANDOM)
  if policy.correction == 'offset' and summary['examples_dropped']:
    title += ' of the examples kept, which are hard ones'
  left.set(title=title, xlabel=_TRAINED, ylabel=loss)
  curve = _points(lines, 'eval', key)
  right.plot(*curve, color=color, marker='o', markersize=4)
  bayes = summary['bayes_auc']
  if bayes is not None:
    right.axhline(bayes, color=page.color(1), linestyle='--')
    words = f'Bayes AUC {bayes:.4f}'
    right.annotate(
      words,
      (0.98, bayes),
      xycoords=('axes fraction', 'data'),
      xytext=(0, -4),
      textcoords='offset points',
      **{'ha': 'right', 'va': 'top', 'fontsize': 8},
    )
  title = f'held-out {axis}, {last} at the end'
  right.set(title=title, xlabel=_TRAINED, ylabel=axis)
  figure.suptitle(summary['data'], fontsize=9, color=page.color('muted'))
  figure.savefig(path, dpi=130)


def _points(
  lines: Sequence[dict[str, Any]], kind: str, key: str
) -> tuple[list[float], list[float]]:
  kept = [x for x in lines if x['kind'] == kind and x.get(key) is not None]
  return [x['examples_trained'] / 1e6 for x in kept], [x[key] for x in kept]
