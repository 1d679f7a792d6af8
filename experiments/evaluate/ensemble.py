"""Evaluates the members of a run as an ensemble, and their average.

Members are checkpoints at the ends of cycles (docs/how-to/ensembles.md). They
are selected on validation examples, and all is measured on other ones.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import jax
from jaxtyping import Float
import ml_collections
import numpy as np
from rich.console import Console
from scipy import optimize

from experiments.common import interrupts, loading, report
from experiments.common.loading import LoadedRun
from slipstream_jax.data.source import BatchSource
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.errors import check_whole, choose, UserError
from slipstream_jax.training import metrics
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.metrics import Predictions
from slipstream_jax.training.trainer_parts import TrainerParts

Logits = Float[np.ndarray, 'M n']
"""Logits of n examples by each of M members, f64."""


def mean_of_logits(logits: Logits) -> Float[np.ndarray, ' n']:
  """Returns the mean of the members' logits."""
  return logits.mean(axis=0)


def mean_of_probabilities(logits: Logits) -> Float[np.ndarray, ' n']:
  """Returns the log odds of the mean of the members' probabilities."""
  clicks = np.logaddexp.reduce(-np.logaddexp(0, -logits))
  others = np.logaddexp.reduce(-np.logaddexp(0, logits))
  return clicks - others


Combine = Callable[[Logits], Float[np.ndarray, ' n']]
COMBINATIONS: dict[str, Combine] = {
  'logits': mean_of_logits,
  'probabilities': mean_of_probabilities,
}
"""How members predict together."""


def disagreement(logits: Logits) -> Float[np.ndarray, 'M M']:
  """Returns the mean KL divergence, in nats, of each pair of members."""
  click, none = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
  chance, size = np.exp(click), logits.shape[1]
  own = (chance * click + (1 - chance) * none).sum(axis=1)
  total = own[:, None] - chance @ click.T - (1 - chance) @ none.T
  return np.maximum(total / size, 0)  # without what rounding makes of 0


def greedy(
  logits: Logits, labels: Float[np.ndarray, ' n'], most: int, combine: Combine
) -> list[int]:
  """Returns members, beginning with the best, each of which lowers the loss.

  Args:
    logits: of the members.
    labels: of the examples.
    most: members to take.
    combine: how they predict together.
  """
  chosen, best = list[int](), np.inf
  while len(chosen) < most:
    losses = {
      one: metrics.log_loss(labels, combine(logits[[*chosen, one]]))
      for one in range(len(logits))
      if one not in chosen
    }
    one = min(losses, key=lambda one: losses[one] or 0.0, default=None)
    if one is None or not (losses[one] or 0.0) < best:
      break
    best = losses[one] or 0.0
    chosen.append(one)
  return chosen


def diverse_weights(
  logits: Logits, labels: Float[np.ndarray, ' n'], gamma: float
) -> Float[np.ndarray, ' M']:
  """Returns the weights w of members that err little together and disagree.

  They are at least 0, add up to 1, and have the least
  mean((sum_i w_i (p_i - y))^2) - gamma * sum_ij w_i w_j KL(p_i, p_j), as in
  SEERL (arXiv 2001.05209), with the error of a probability for that of a value.
  """
  errors = metrics.probabilities(logits) - labels
  terms = errors @ errors.T / len(labels) - gamma * disagreement(logits)
  return least_on_simplex((terms + terms.T) / 2)


def least_on_simplex(
  terms: Float[np.ndarray, 'M M'],
) -> Float[np.ndarray, ' M']:
  """Returns the w of least w Q w among those at least 0 that add up to 1."""
  scale = np.abs(terms).max() or 1.0
  members, terms = len(terms), terms / scale
  corners = np.eye(members)
  # Q need not be convex if members disagree a lot.
  middles = (corners[:, None] + corners).reshape(-1, members) / 2
  ends = [
    optimize.minimize(
      lambda w: w @ terms @ w,
      start,
      jac=lambda w: 2 * terms @ w,
      bounds=[(0, 1)] * members,
      constraints={
        'type': 'eq',
        'fun': lambda w: w.sum() - 1,
        'jac': np.ones_like,
      },
      method='SLSQP',
      options={'ftol': 1e-12},
    ).x
    for start in (np.full(members, 1 / members), *np.unique(middles, axis=0))
  ]
  weights = [np.maximum(w, 0) / np.maximum(w, 0).sum() for w in ends]
  return min(weights, key=lambda w: float(w @ terms @ w))


def largest(weights: Float[np.ndarray, ' M'], most: int) -> list[int]:
  """Returns the members of the largest weights, of those with some."""
  order = np.argsort(-weights, kind='stable')[:most]
  return [int(one) for one in order if weights[one] > 1e-6]


class HeldOut(NamedTuple):
  """Predictions of a model."""

  validation: Predictions
  test: Predictions


def held_out(run: LoadedRun) -> HeldOut:
  """Predicts validation and test examples.

  Data without a part to validate on are halved: the first half of the held-out
  examples is the validation part.
  """

  def scored(make: Callable[[int], BatchSource]) -> Predictions:
    size = run.config.eval.batch_size
    return predict(run.trainer, interrupts.Checked(make(size)))

  test = scored(run.data.test)
  if len(run.data.known) > 1:  # after the part to train on
    return HeldOut(scored(run.data.known[1]), test)
  assert test.labels is not None
  half = len(test.labels) // 2
  first = Predictions(test.labels[:half], test.logits[:half])
  return HeldOut(first, Predictions(test.labels[half:], test.logits[half:]))


def average_into(mean: TrainerParts, other: TrainerParts, count: int) -> None:
  """Turns the mean of `count` trainers into one of `other`, too.

  Rows, parameters and the model's state are averaged (Izmailov et al.,
  Stochastic Weight Averaging, arXiv 1803.05407), but row state is not. So are
  running statistics of batch normalization, which the paper computes anew.
  """

  def mixed(old: Any, new: Any) -> Any:
    whole = np.asarray(old, np.float64)
    # In this form equal values stay as they are.
    return (whole + (new - whole) / (count + 1)).astype(old.dtype)

  for table in mean.engine.tables.tables:
    start = 0
    pairs = mean.engine.pieces_of(table), other.engine.pieces_of(table)
    for old, new in zip(*pairs, strict=True):
      rows = np.flatnonzero((old != new).any(axis=1))
      if len(rows):
        values = mixed(old[rows], new[rows])
        mean.engine.set_rows(table, start + rows, values)
      start += len(old)
  old, new = (
    to_host((one.state.params, one.state.model_state)) for one in (mean, other)
  )
  params, model_state = to_device(jax.tree.map(mixed, old, new))
  mean.state = mean.state._replace(params=params, model_state=model_state)


def evaluate(
  folders: Sequence[pathlib.Path],
  data: str | None,
  config: ml_collections.ConfigDict | None,
  how: str,
  most: int,
  gamma: float,
  screen: Console,
) -> dict[str, Any]:
  """Evaluates an ensemble, prints the results, and returns them.

  The arguments are those of the program. Several folders give a member each.

  Raises:
    UserError: as in `loading.members`, an argument is invalid, a model does not
      predict clicks, or runs have other held-out examples.
  """
  combine = choose(COMBINATIONS, how, 'command line, --ensemble')
  check_whole(most, 1, 'command line, --members', 'give 3')
  if not 0 <= gamma < np.inf:  # NaN compares as False
    raise UserError(
      '--gamma must be a number, at least 0',
      got=gamma,
      where='command line, --gamma',
      hint='give 0.1',
    )
  if alone := len(folders) == 1:
    runs = loading.members(folders[0], data, config)
  else:
    loaded = (loading.load(folder, data, config) for folder in folders)
    runs = map(loading.check_clicks, loaded)
  names, scores = list[str](), list[HeldOut]()
  mean: LoadedRun | None = None
  for number, run in enumerate(runs):
    names.append(f'step {run.step}' if alone else str(folders[number]))
    scores.append(held_out(run))
    if mean is None:
      mean = run
      continue
    _check_same(scores[0], scores[-1], folders[-1 if alone else number])
    if alone:  # Rows of runs that started apart have no common mean.
      average_into(mean.trainer, run.trainer, number)
    run.trainer.engine.close()
  assert mean is not None
  chosen = {name: [number] for number, name in enumerate(names)}
  chosen |= _chosen(scores, combine, most, gamma)
  models = {
    name: HeldOut(
      *(_combined(parts, combine) for parts in zip(*some, strict=True))
    )
    for name, some in ((k, [scores[i] for i in v]) for k, v in chosen.items())
  }
  if alone:
    chosen['averaged weights'] = [*range(len(names))]
    models['averaged weights'] = held_out(mean)
  results = _results(names, scores, chosen, models)
  _print(screen, results, mean)
  return results


def _check_same(one: HeldOut, other: HeldOut, where: pathlib.Path) -> None:
  for ours, theirs in zip(one, other, strict=True):
    if not np.array_equal(_stacked([ours])[0], _stacked([theirs])[0]):
      raise UserError(
        'members must have the same held-out examples',
        got='other labels',
        where=str(where),
        hint='give runs on the same data; if it is synthetic, of one'
        ' config.data.proxy_seed',
      )


def _stacked(parts: Sequence[Predictions]) -> tuple[np.ndarray, Logits]:
  """Returns the labels of the first, and the logits of all, in f64."""
  assert parts[0].labels is not None
  logits = np.array([part.logits for part in parts], np.float64)
  return parts[0].labels.astype(np.float64), logits


def _combined(parts: Sequence[Predictions], combine: Combine) -> Predictions:
  labels, logits = _stacked(parts)
  return Predictions(labels, combine(logits))


def _chosen(
  scores: Sequence[HeldOut], combine: Combine, most: int, gamma: float
) -> dict[str, list[int]]:
  """Returns the members of each ensemble, chosen on validation examples."""
  labels, logits = _stacked([one.validation for one in scores])
  return {
    'all': [*range(len(scores))],
    'greedy': greedy(logits, labels, most, combine),
    'diverse': largest(diverse_weights(logits, labels, gamma), most),
  }


def _results(
  names: Sequence[str],
  scores: Sequence[HeldOut],
  chosen: Mapping[str, Sequence[int]],
  models: Mapping[str, HeldOut],
) -> dict[str, Any]:
  """Returns the figures of the models, and how far the members disagree."""
  rows = []
  for name, model in models.items():
    on_validation, on_test = map(metrics.compute, model)
    rows.append(
      {
        'model': name,
        'members': [number + 1 for number in chosen[name]],
        'validation_log_loss': on_validation.log_loss,
        'log_loss': on_test.log_loss,
        'auc': on_test.auc,
      }
    )
  _, logits = _stacked([one.test for one in scores])
  return {
    'members': [*names],
    'models': rows,
    'disagreement': disagreement(logits).tolist(),
    'validation_examples': len(scores[0].validation.logits),
    'examples': len(scores[0].test.logits),
  }


def _print(screen: Console, results: dict[str, Any], run: LoadedRun) -> None:
  rows = []
  for one in results['models']:
    figures = {k: f'{v:.5f}' for k, v in one.items() if isinstance(v, float)}
    rows.append(one | figures | {'members': ' '.join(map(str, one['members']))})
  screen.print(report.table('', rows))
  pairs = [
    {
      'member': str(number),
      **{str(k): f'{v:.5f}' for k, v in enumerate(row, 1)},
    }
    for number, row in enumerate(results['disagreement'], 1)
  ]
  title = 'mean KL divergence of each member from each, nats'
  screen.print(report.table(title, pairs))
  part = 'the validation part'
  if len(run.data.known) < 2:
    part = 'the first half of the held-out examples'
  report.teller(screen)(
    f'selected on {part}, {results["validation_examples"]:,}; log loss and AUC'
    f' are of {results["examples"]:,} other examples'
  )
