"""Members of one run score as they did in it, and together as they should."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest
from rich.console import Console
from scipy import special

from experiments.common import loading
from experiments.evaluate import ensemble
from experiments.evaluate import job as evaluation
from experiments.run import job
import slip_serve
from slipstream_jax.checkpoint.chain import kept_steps
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.errors import UserError
from slipstream_jax.export.folder import ENSEMBLES, write_export
from slipstream_jax.export.source import facts_of_dataset
from slipstream_jax.training import loop, metrics
from slipstream_jax.training.evaluate import predict, predict_batch
from tests.experiments.test_resume import Interrupted
from tests.support.runs import (
  arrays_of,
  assert_one_sentence,
  assert_same_tree,
  run_job,
  smoke,
)

STEPS, CYCLES = 60, 3  # batches of the source: skipping takes fewer steps
CONFIG = {
  'train.steps': STEPS,
  'optimizer.cycles': CYCLES,
  'optimizer.rows_fall': True,
  'skip.period_batches': 45,  # a window is cut by a restart of the rates
  'eval.curve_steps': 0,
  'checkpoint.keep': 1,
  'data.test_examples': 2048,
}


def kept_of(workdir):
  return kept_steps(open_place(workdir / 'checkpoints'))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of three cycles, and its predictions when each member was saved."""
  workdir, then = tmp_path_factory.mktemp('ensembles') / 'run', {}
  save = job._save

  def watched(run, meter, step, *kept, **how):
    seen = run.trainer.engine.counters.examples_seen / 256
    scores = predict(run.trainer, run.data.test(1024))
    then.setdefault(step, (seen, scores.logits))
    return save(run, meter, step, *kept, **how)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(job, '_save', watched)
    assert run_job(workdir, smoke(**CONFIG)) == 0
  return workdir, then


@pytest.fixture(scope='module')
def members(run):
  return [*loading.members(run[0])]


def test_each_cycle_ends_in_a_checkpoint(run):
  workdir, then = run
  steps = kept_of(workdir)
  assert len(steps) == CYCLES
  assert steps[-1] < STEPS  # examples were left out
  assert then[steps[-1]][0] >= STEPS
  for number, step in enumerate(steps[:-1], 1):
    assert 0 <= then[step][0] - number * STEPS / CYCLES < 2


def test_a_member_scores_as_it_did_then(run, members):
  _, then = run
  assert [one.step for one in members] == [*then]
  for one in members:
    logits = predict(one.trainer, one.data.test(1024)).logits
    np.testing.assert_array_equal(logits, then[one.step][1])


@pytest.mark.parametrize('at', ['within', 'end', 'last'])
def test_a_stopped_run_on_other_placements_keeps_the_members(
  at, run, tmp_path, monkeypatch
):
  """Also of a run that is stopped where a cycle ends, and keeps one more."""
  workdir, _ = run
  steps = kept_of(workdir)
  stop = {'within': steps[0] + 3, 'end': steps[0], 'last': steps[-1]}[at]
  changes = CONFIG | {'placement': 'streamed', 'train.checkpoint_steps': 9}
  with monkeypatch.context() as patched:
    patched.setattr(loop, 'take_step', Interrupted(loop.take_step, stop))
    assert run_job(tmp_path / 'run', smoke(**changes)) == 130
  assert run_job(tmp_path / 'run', smoke(**changes, resume=True)) == 0
  assert kept_of(tmp_path / 'run') == steps
  for step in steps:
    one, other = arrays_of(workdir, step), arrays_of(tmp_path / 'run', step)
    assert_same_tree(one['rows'], other['rows'])
    assert_same_tree(one['values'], other['values'])
    assert_same_tree(one['dense'], other['dense'])


def test_an_ensemble_is_selected_apart_from_the_test(run, members, tmp_path):
  workdir, then = run
  output = str(tmp_path / 'out.json')
  evaluation.write_metrics(None, workdir, ensemble='logits', output=output)
  assert 'averaged weights' in (tmp_path / 'out.json').read_text()
  results = ensemble.evaluate(
    [workdir], None, None, 'logits', 2, 0.1, Console()
  )
  by_name = {row['model']: row for row in results['models']}
  labels = predict(members[0].trainer, members[0].data.test(1024)).labels
  logits = np.array([logits for _, logits in then.values()], np.float64)
  half = len(labels) // 2
  assert results['validation_examples'] == half
  assert results['examples'] == len(labels) - half
  for part, key in (
    (slice(half), 'validation_log_loss'),
    (slice(half, None), 'log_loss'),
  ):
    loss = metrics.log_loss(labels[part], logits[:, part].mean(axis=0))
    assert by_name['all'][key] == pytest.approx(loss, rel=1e-12)
  assert len(by_name['greedy']['members']) <= 2
  assert len(by_name['diverse']['members']) <= 2


def test_a_validation_part_selects_and_the_whole_test_tests(members):
  """Where the data have such a part. Else the held-out examples are halved."""
  run = members[0]
  calls = []

  def validation(size):
    calls.append(size)
    return run.data.test(size)

  known = run.data.test, validation  # the first one is to train on
  parts = ensemble.held_out(run._replace(data=run.data._replace(known=known)))
  whole = predict(run.trainer, run.data.test(1024)).logits
  assert calls == [1024]
  for part in parts:
    np.testing.assert_array_equal(part.logits, whole)
  halves = ensemble.held_out(run)
  both = np.concatenate([part.logits for part in halves])
  np.testing.assert_array_equal(both, whole)


def test_averaged_weights_are_means(run, members):
  (mean, one, other) = loading.members(run[0])
  tables = [*mean.trainer.engine.tables.tables]
  of = [
    [member.trainer.engine.rows_of(table) for table in tables]
    for member in (mean, one, other)
  ]
  ensemble.average_into(mean.trainer, mean.trainer, 1)  # equal ones stay
  ensemble.average_into(mean.trainer, one.trainer, 1)
  ensemble.average_into(mean.trainer, other.trainer, 2)
  for table, *rows in zip(tables, *of, strict=True):
    meant = np.mean(np.array(rows, np.float64), axis=0)
    found = mean.trainer.engine.rows_of(table)
    np.testing.assert_allclose(found, meant, rtol=1e-5, atol=1e-6)
    for one_of in rows:  # untouched rows keep their bits
      same = (rows[0] == one_of).all(axis=1) & (rows[0] == rows[2]).all(axis=1)
    same &= (rows[0] == rows[1]).all(axis=1)
    np.testing.assert_array_equal(found[same], rows[0][same])
  assert (of[0][0] != of[2][0]).any()


@pytest.mark.parametrize('how', ENSEMBLES)
def test_an_export_scores_all_members(how, members, tmp_path):
  *others, newest = (one.trainer for one in members)
  facts = facts_of_dataset(members[0].data)
  how_much = 'float32', (64,), ('cpu',)
  write_export(newest, tmp_path / 'export', facts, *how_much, others, how)
  with contextlib.closing(members[0].data.test(100)) as source:
    batch = next(source)
  alone = [predict_batch(one.trainer, batch).logits for one in members]
  meant = ensemble.COMBINATIONS[how](np.array(alone, np.float64))
  with slip_serve.Scorer(tmp_path / 'export') as scorer:
    firsts, _ = newest.recipe.tables.column_rows
    rows = np.where(batch.lookups < 0, -1, batch.lookups - firsts)
    logits = scorer.logits(slip_serve.Query(batch.dense, rows))
  np.testing.assert_allclose(logits, meant, rtol=1e-5, atol=1e-6)
  assert ENSEMBLES.keys() == ensemble.COMBINATIONS.keys()


@pytest.fixture
def drawn():
  """Logits f64[6, 900] of six members, and labels of some skill."""
  rng = np.random.default_rng(0)
  truth = rng.normal(size=900)
  noise = rng.normal(size=(6, 900)) * np.linspace(0.3, 1.2, 6)[:, None]
  labels = (rng.random(900) < special.expit(truth)).astype(np.float64)
  return truth + noise, labels


@pytest.mark.parametrize('how', ensemble.COMBINATIONS)
def test_equal_members_predict_what_one_predicts(how, drawn):
  combine, one = ensemble.COMBINATIONS[how], drawn[0][0]
  together = combine(np.array([one, one])).astype(np.float32)
  np.testing.assert_array_equal(together, one.astype(np.float32))
  extreme = np.array([[700.0, -700.0, 0.0], [-700.0, -700.0, 90.0]])
  assert np.isfinite(combine(extreme)).all()


def test_means_are_of_what_they_say(drawn):
  logits, _ = drawn
  together = ensemble.mean_of_probabilities(logits)
  meant = special.expit(logits).mean(axis=0)
  np.testing.assert_allclose(special.expit(together), meant, rtol=1e-12)


def test_disagreement_is_the_divergence(drawn):
  chance = special.expit(drawn[0])
  meant = [
    [
      np.mean(special.rel_entr(p, q) + special.rel_entr(1 - p, 1 - q))
      for q in chance
    ]
    for p in chance
  ]
  found = ensemble.disagreement(drawn[0])
  np.testing.assert_allclose(found, meant, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize('seed', range(12))
def test_weights_are_the_best_of_all_supports(seed):
  """Also where the form is not convex, as it is if members disagree a lot."""
  rng = np.random.default_rng(seed)
  half = rng.normal(size=(6, 6))
  form = half @ half.T if seed % 2 else half + half.T
  best = np.inf
  for size in range(1, 7):  # a minimum is stationary on its support
    for support in itertools.combinations(range(6), size):
      own = form[np.ix_(support, support)]
      border = np.block([[own, np.ones((size, 1))], [np.ones((1, size)), 0]])
      w = np.linalg.solve(border, [*[0.0] * size, 1.0])[:size]
      if (w >= 0).all():
        best = min(best, w @ own @ w)
  w = ensemble.least_on_simplex(form)
  assert w.min() >= 0
  assert w.sum() == pytest.approx(1)
  assert w @ form @ w == pytest.approx(best, abs=1e-6)


def test_diverse_weights_minimize_errors_less_divergence(drawn):
  logits, labels = drawn
  chance = special.expit(logits)

  def loss(w, gamma):
    errors = np.mean((w @ (chance - labels)) ** 2)
    return errors - gamma * w @ ensemble.disagreement(logits) @ w

  rng = np.random.default_rng(1)
  for gamma in (0.0, 0.3):
    w = ensemble.diverse_weights(logits, labels, gamma)
    others = rng.dirichlet(np.ones(6), 2000)
    assert loss(w, gamma) <= min(loss(one, gamma) for one in others)
  apart = ensemble.diverse_weights(logits, labels, 100.0)
  assert {*np.flatnonzero(apart > 1e-6)} >= {5}  # the noisiest one


def test_greedy_takes_the_best_and_what_lowers_the_loss(drawn):
  logits, labels = drawn
  combine = ensemble.mean_of_logits
  chosen = ensemble.greedy(logits, labels, 6, combine)
  losses = [
    metrics.log_loss(labels, combine(logits[chosen[: n + 1]]))
    for n in range(len(chosen))
  ]
  alone = [metrics.log_loss(labels, one) for one in logits]
  assert chosen[0] == int(np.argmin(alone))
  assert losses == sorted(losses, reverse=True)
  assert 1 < len({*chosen}) == len(chosen)
  twice = np.array([logits[0], logits[0]])
  assert ensemble.greedy(twice, labels, 2, combine) == [0]


def test_what_is_no_ensemble_is_refused(run, tmp_path, capsys):
  workdir, _ = run
  with pytest.raises(UserError, match='--step and --input'):
    evaluation.write_metrics(None, workdir, ensemble='logits', step=3)
  with pytest.raises(UserError, match='must be one of logits'):
    evaluation.write_metrics(None, workdir, ensemble='votes')
  with pytest.raises(UserError, match='--gamma must be'):
    evaluation.write_metrics(None, workdir, ensemble='logits', gamma=np.nan)
  with pytest.raises(UserError, match='evaluated as an ensemble'):
    evaluation.write_metrics(None, workdir, workdir)
  shutil.copytree(workdir, tmp_path / 'one')
  for step in kept_of(workdir)[:-1]:
    (next((tmp_path / 'one').rglob(f'manifest-*{step}.json'))).unlink()
  with pytest.raises(UserError, match='two checkpoints or more'):
    evaluation.write_metrics(None, tmp_path / 'one', ensemble='logits')
  capsys.readouterr()
  for changes, key in (
    ({'optimizer.cycles': STEPS + 1}, 'config.train.steps'),
    ({'train.keep_checkpoint': False}, 'config.train.keep_checkpoint'),
  ):
    assert run_job(tmp_path / 'no', smoke(**CONFIG | changes)) == 1
    assert_one_sentence(capsys.readouterr().err, key)
