import numpy as np
import pytest

from experiments.bench import baselines
from slipstream_jax.errors import UserError
from slipstream_jax.tables import tables_of
from slipstream_jax.types import Batch

reason = baselines.absent('fbgemm')
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))
present = pytest.mark.parametrize(
  'name',
  [name for name in baselines.BASELINES if baselines.absent(name) is None],
)

ROWS = (7, 50, 3)


def make_batch(seed=0, size=16):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, ROWS, (size, len(ROWS)), dtype=np.int32)
  return Batch(
    rng.standard_normal((size, 13), dtype=np.float32),
    tables_of(dict(zip('abc', ROWS, strict=True))).lookups(ids),
    rng.integers(0, 2, size).astype(np.float32),
    rng.integers(1, 3, size).astype(np.float32),
  )


def build(name, learning_rate=0.05):
  return baselines.BASELINES[name](ROWS, 4, (8, 4), (8,), learning_rate)


def load(baseline, tables, dense):
  """Overwrites all parameters."""
  torch = pytest.importorskip('torch')
  ours = *baseline.tables, *baseline.dense
  for target, source in zip(ours, (*tables, *dense), strict=True):
    target.copy_(torch.from_numpy(source))


def numpy_rows(baseline):
  return np.concatenate([table.cpu().numpy() for table in baseline.tables])


def numpy_dense(baseline):
  return [param.cpu().numpy().copy() for param in baseline.dense]


def reference_loss(baseline, batch):
  *hidden, last = zip(*[iter(numpy_dense(baseline))] * 2, strict=True)
  x = batch.dense
  for weight, bias in hidden[:2]:
    x = np.maximum(x @ weight.T + bias, 0)
  met = np.concatenate(
    [x[:, None], numpy_rows(baseline)[batch.lookups]], axis=1
  )
  i, j = np.tril_indices(len(ROWS) + 1, -1)
  x = np.concatenate([x, (met @ met.transpose(0, 2, 1))[:, i, j]], axis=1)
  for weight, bias in hidden[2:]:
    x = np.maximum(x @ weight.T + bias, 0)
  logits = (x @ last[0].T + last[1])[:, 0]
  losses = np.logaddexp(0, logits) - batch.labels * logits
  return np.average(losses, weights=batch.weights)


@present
class TestBaseline:
  def test_loss_is_that_of_dlrm(self, name):
    baseline, batch = build(name), make_batch()
    expected = reference_loss(baseline, batch)
    loss = float(baseline.step(baseline.prepare(batch)))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

  def test_step_changes_the_touched_rows_only(self, name):
    baseline, batch = build(name), make_batch()
    # Where no ReLU closes, every row that is looked up has a gradient.
    load(
      baseline,
      [t.cpu().numpy() for t in baseline.tables],
      _open_relus(baseline),
    )
    before = numpy_rows(baseline)
    baseline.step(baseline.prepare(batch))
    changed = (numpy_rows(baseline) != before).any(axis=1)
    np.testing.assert_array_equal(
      np.flatnonzero(changed), np.unique(batch.lookups)
    )

  def test_steps_lower_the_loss(self, name):
    baseline, batch = build(name), make_batch()
    losses = [float(baseline.step(baseline.prepare(batch))) for _ in range(20)]
    assert losses[-1] < losses[0]

  def test_padding_is_refused(self, name):
    batch, baseline = make_batch(), build(name)
    columns = [batch.lookups[:, :2], batch.lookups[:, [0, 1, 2, 2]]]
    unequal = [batch._replace(lookups=lookups) for lookups in columns]
    batch.lookups[3, 1] = -1
    for bad in (batch, *unequal):
      with pytest.raises(UserError, match='without padding'):
        baseline.prepare(bad)


def _open_relus(baseline):
  return [0.1 * p if p.ndim == 2 else p + 1 for p in numpy_dense(baseline)]


def test_baselines_agree_on_sgd():
  one, other = build('embedding_bag'), build('fbgemm')
  load(other, [t.cpu().numpy() for t in one.tables], numpy_dense(one))
  for seed in range(3):
    batch = make_batch(seed)
    losses = [float(p.step(p.prepare(batch))) for p in (one, other)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
  pairs = zip(numpy_dense(one), numpy_dense(other), strict=True)
  for ours, theirs in [(numpy_rows(one), numpy_rows(other)), *pairs]:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_linear_baselines_train_bags():
  """Against numpy, by plain SGD where the rows have it."""
  first = make_batch()
  # Two lookups of a bag are rows of one table, and may be the same row.
  bags = np.stack([first.lookups, make_batch(1).lookups], axis=2)
  batch = first._replace(lookups=bags)
  weights = batch.weights / batch.weights.sum()
  for name in baselines.LINEAR:
    baseline = baselines.linear(name, ROWS, 4, 0.05)
    rows, (weight, bias) = numpy_rows(baseline), numpy_dense(baseline)
    x = rows[bags].sum(axis=2).reshape(len(bags), -1)
    logits = x @ weight[0] + bias
    losses = np.logaddexp(0, logits) - batch.labels * logits
    loss = float(baseline.step(baseline.prepare(batch)))
    np.testing.assert_allclose(loss, losses @ weights, rtol=1e-5)
    slope = weights * (1 / (1 + np.exp(-logits)) - batch.labels)
    if name in ('embedding_bag', 'fbgemm'):
      to_bags = np.outer(slope, weight[0]).reshape(len(bags), len(ROWS), 1, 4)
      np.subtract.at(rows, bags, 0.05 * np.repeat(to_bags, 2, axis=2))
      np.testing.assert_allclose(numpy_rows(baseline), rows, atol=1e-6)
    changed = weight - 0.05 * slope @ x
    np.testing.assert_allclose(numpy_dense(baseline)[0], changed, atol=1e-6)


@pytest.mark.parametrize('name', baselines.LINEAR[1:])
def test_bags_of_several_lengths_are_summed(name):
  first = make_batch()
  lengths = 2, *[1] * (len(ROWS) - 1)
  bags = np.concatenate([make_batch(1).lookups[:, :1], first.lookups], axis=1)
  batch = first._replace(lookups=bags)
  for make in baselines.linear, baselines.dcn:
    baseline = make(name, ROWS, 4, 0.05, lengths)
    rows = numpy_rows(baseline)
    losses = [float(baseline.step(baseline.prepare(batch))) for _ in range(20)]
    assert losses[-1] < losses[0]
    used = np.unique(bags)
    moved = (numpy_rows(baseline) != rows).any(axis=1)
    assert set(np.flatnonzero(moved)) == set(used)


def test_onednn_layer_has_the_gradients_of_torch():
  torch = pytest.importorskip('torch')
  generator = torch.Generator().manual_seed(0)
  shapes = (9, 5), (6, 5), (6,)
  ours, theirs = (
    [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    for g in (generator, generator.clone_state())
  )
  baselines._onednn_linear_relu()(*ours).square().sum().backward()
  torch.nn.functional.linear(*theirs).relu().square().sum().backward()
  for a, b in zip(ours, theirs, strict=True):
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
