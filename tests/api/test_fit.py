"""`train` in passes, validated, stopped early: as a user would write it."""

import re

import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.api.history import pays_in_words
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.engine.clock import Payoff
from slipstream_jax.errors import UserError
from tests.api import shop

PASS = 20  # full batches in a shuffled pass without end


def column_batches(**arguments):
  lookups = np.stack([shop.USERS, shop.ITEMS + 60], axis=1).astype(np.int32)
  columns = Columns(shop.DENSE, lookups, shop.CLICKS)
  return ColumnBatches(columns, shop.BATCH, **arguments)


def test_epochs_of_a_source_without_end_are_so_many_steps():
  with shop.trainer() as one, shop.trainer() as other:
    history = one.train(shop.source(), epochs=2)
    assert len(history.losses) == 2 * PASS
    np.testing.assert_array_equal(history.steps, np.arange(1, 2 * PASS + 1))
    steps = other.train(shop.source(), steps=2 * PASS)
    np.testing.assert_array_equal(history.losses, steps.losses)
    shop.assert_same(one, other)


def test_a_loop_over_epochs_is_as_many_epochs():
  with shop.trainer() as one, shop.trainer() as other:
    source = shop.source(epochs=3)
    for _ in range(3):
      assert len(one.train(source, epochs=1).losses) == 21
      one.evaluate(shop.held_out())
    with pytest.raises(UserError, match='a source that has ended'):
      one.train(source, epochs=1)
    other.train(shop.source(epochs=3))
    shop.assert_same(one, other)


def test_a_pass_under_way_is_the_first():
  with shop.trainer() as trainer:
    source = shop.source()
    trainer.train(source, steps=PASS + 5)
    assert len(trainer.train(source, epochs=1).losses) == PASS - 5
    assert len(trainer.train(source, epochs=1).losses) == PASS
    assert len(trainer.train(source, steps=3, epochs=1).losses) == 3
    assert len(trainer.train(source, steps=100, epochs=1).losses) == PASS - 3


def test_epochs_of_a_list_and_of_a_function_are_read_again():
  items = [*shop.dicts(5)]
  with shop.trainer() as one, shop.trainer() as other, shop.trainer() as third:
    history = one.train(items + items + items)
    again = other.train(items, epochs=2)
    assert len(again.losses) == 10
    more = other.train(items, epochs=1)
    losses = [*again.losses, *more.losses]
    np.testing.assert_array_equal(history.losses, losses)
    shop.assert_same(one, other)

    def make():
      return iter(items)

    third.train(make, steps=5)  # and does not look for the end
    third.train(make, epochs=2)
    shop.assert_same(one, third)


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    (lambda: shop.dicts(5), 'at most the 1 that the source can be read, got 2'),
    (lambda: shop.source(epochs=1), 'at most the 1'),
    (lambda: column_batches(epochs=1), 'at most the 1'),
  ],
)
def test_what_cannot_be_passed_twice_says_so_first(source, message):
  with shop.trainer() as trainer:
    given = source()
    with pytest.raises(UserError, match=message):
      trainer.train(given, epochs=2)
    trainer.train(given, epochs=1)


def test_a_run_says_that_less_was_left_out_than_asked():
  """Nothing is before the first decision, which is most of a short run."""
  phases = slip.Phases(warm_up=10, settle=5)
  with shop.trainer() as trainer:
    skip = slip.Skip(drop=0.5, phases=phases, policy='random')
    short = trainer.train(shop.source(), epochs=1, skip=skip)
    assert short.asked == 0.5
    counts = short.counters
    assert 0 < counts.examples_dropped < 0.48 * counts.examples_seen
    assert 'left out, fewer than the 50% asked for' in repr(short)
    freezing = skip._replace(mode='rows')
    assert trainer.train(shop.source(), epochs=1, skip=freezing).asked is None


@pytest.mark.parametrize('noise', [True, False])
def test_a_run_says_whether_choosing_can_pay(noise):
  """By labels that ids say nothing of, and by labels that they decide."""
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 50, 40_000)
  labels = rng.random(len(ids)) < (0.2 if noise else (ids % 10 == 0) * 0.9)
  none = np.zeros((len(ids), 0))
  source = slip.batches(none, {'id': ids}, labels, batch_size=500, seed=0)
  model = slip.Functions(
    lambda key, dense, rows: {},
    lambda params, dense, rows: rows['id'].sum(axis=1),
  )
  with slip.Trainer(model, {'id': slip.Table(50, 4)}) as trainer:
    skip = slip.Skip(0.3, phases=slip.Phases(warm_up=5, settle=5))
    history = trainer.train(source, steps=60, skip=skip)
  says = 'no, nothing to gain here: scores are no better than the base rate'
  assert (history.choosing == says) == noise  # else its time decides
  assert f'does choosing pay? {history.choosing}' in repr(history)


@pytest.mark.parametrize(
  ('known', 'says'),
  [
    ({}, 'yes, '),
    ({'verdict': 1}, 'no, nothing to gain.* base rate'),
    ({'verdict': 2}, 'no, nothing to gain.* too uncertain'),
    ({'verdict': 3}, 'unknown, .* too few examples'),
    ({'payoff': Payoff(0.4, 2.0, 3.0, False)}, 'no, .* 40% .* more than 3 ms'),
    ({'payoff': Payoff(0.4, 2.0, None, False)}, 'no, .* 40% .* the CPU'),
    ({'payoff': None}, 'unknown, .* too short'),
    ({'model': 0.37}, 'unknown, .* far worse than the model'),
    ({'scorer': 0.4}, 'unknown, .* far better than the model'),
    ({'model': None}, 'yes, '),
  ],
)
def test_a_run_says_whether_choosing_pays(known, says):
  of = {'verdict': 0, 'payoff': Payoff(0.4, 4.0, 3.0, True)}
  of |= {'scorer': 0.46, 'model': 0.45} | known
  assert re.match(says, pays_in_words(**of))


def test_a_validated_run_says_if_scores_are_far_from_the_model():
  """Here the model may not learn, so what the scorer knows is far better."""
  ids = np.random.default_rng(0).integers(0, 50, 40_000)
  columns = {'id': ids}
  source = slip.batches(None, columns, ids % 2, batch_size=1000, seed=0)
  held_out = slip.batches(None, columns, ids % 2, batch_size=500, epochs=1)
  model = slip.Functions(
    lambda key, rows: {}, lambda params, rows: rows['id'].sum(axis=1)
  )
  slow = slip.sgd(1e-6)
  with slip.Trainer(
    model, {'id': slip.Table(50, 4)}, row_optimizer=slow
  ) as trainer:
    skip = slip.Skip(0.3, phases=slip.Phases(warm_up=5, settle=5))
    how = {'validation': held_out, 'every': 30}
    history = trainer.train(source, steps=30, skip=skip, **how)
  assert 'far better than the model' in history.choosing


def test_a_validated_run_reads_like_this():
  with shop.trainer() as trainer:
    history = trainer.train(
      shop.source(), epochs=3, validation=shop.held_out(), patience=2
    )
    assert [v.step for v in history.validations] == [20, 40, 60]
    losses = history.curve('log_loss')
    assert history.best.metrics.log_loss == losses.min()
    assert trainer.evaluate(shop.held_out()) == history.best.metrics
    with pytest.raises(UserError, match='use one of auc, log_loss'):
      history.curve('recall')


@pytest.mark.parametrize(
  ('arguments', 'steps'),
  [
    ({'steps': 25, 'every': 10}, [10, 20, 25]),
    ({'steps': 20, 'every': 10}, [10, 20]),
    ({'steps': 25}, [20, 25]),
    ({'epochs': 2, 'every': 15}, [15, 30, 40]),
    ({'steps': 0, 'every': 10}, []),
  ],
)
def test_when_it_is_validated(arguments, steps):
  with shop.trainer() as trainer:
    held_out = shop.held_out()
    history = trainer.train(shop.source(), validation=held_out, **arguments)
    assert [v.step for v in history.validations] == steps


@pytest.mark.parametrize(
  'held_out',
  [
    lambda: [*shop.dicts(5)],
    lambda: lambda: shop.dicts(5),
    lambda: column_batches(epochs=1),
    lambda: slip.batches([*shop.dicts(5)], label='label', dense='dense'),
  ],
)
def test_any_held_out_source_that_can_be_read_again(held_out):
  with shop.trainer() as trainer:
    held_out = held_out()
    history = trainer.train(
      shop.source(), steps=30, validation=held_out, every=10
    )
    assert len({v.metrics.examples for v in history.validations}) == 1
    assert len(history.validations) == 3
    assert history.validations[2].metrics.log_loss > 0


def unknown_ids():
  ids = shop.IDS | {'user': np.where(shop.USERS == 3, 60, shop.USERS)}
  return slip.batches(shop.DENSE, ids, shop.CLICKS, batch_size=16, epochs=1)


def narrow():
  for one in shop.dicts(2):
    yield one | {'dense': one['dense'][:, :2]}


def with_dense(values):
  ids, clicks = shop.IDS, shop.CLICKS
  return slip.batches(values, ids, clicks, batch_size=16, epochs=1)


def by_name(names, label='label', **dense):
  """Held-out examples of the columns of `dense`, in a frame."""
  columns = {'user': [1, 2], 'item': [1, 2], label: [0, 1]} | dense
  return slip.batches(columns, batch_size=2, epochs=1, dense=names, label=label)


NAMED = by_name(['age', 'hour'], age=[3, 4], hour=[5, 6])


@pytest.mark.parametrize(
  ('source', 'validation', 'message'),
  [
    (
      shop.source(),
      slip.batches(
        shop.DENSE[:, :2], shop.IDS, shop.CLICKS, batch_size=16, epochs=1
      ),
      'must have the dense features .* got 2 in place of 3',
    ),
    (
      shop.source(),
      with_dense(None),
      'must have the dense features .* got 0 in place of 3',
    ),
    (
      shop.source(),
      shop.held_out(np.stack([shop.CLICKS] * 2, axis=1)),
      'must have the labels .* got 2 in place of 1',
    ),
    ([*shop.dicts(5)], [*narrow()], 'must have the dense features'),
    (NAMED, by_name(['age', 'day'], age=[3, 4], day=[5, 6]), "'day'"),
    (NAMED, by_name(['age'], age=[3, 4]), "'hour'"),
  ],
)
@pytest.mark.usefixtures('as_users_run_it')
def test_other_columns_to_validate_on_are_named_before_any_step(
  source, validation, message
):
  with shop.trainer() as trainer:
    with pytest.raises(UserError, match=message):
      trainer.train(source, 1, validation=validation)
    with pytest.raises(UserError, match='when its first source comes'):
      trainer.parts  # noqa: B018


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'validation': shop.source()}, 'one without end .*epochs=1'),
    ({'validation': shop.dicts(5)}, 'got an iterator .*give a list'),
    ({'validation': shop.held_out(None)}, 'examples without labels'),
    ({'validation': unknown_ids()}, r'must be in \[0, 60\) of .*got 60'),
    ({'validation': 3}, 'ids must come by feature'),
    ({'patience': 2}, 'patience is about validations'),
    ({'every': 2}, 'every is about validations'),
    ({'epochs': 0}, 'epochs must be a whole number, at least 1, got 0'),
    ({'epochs': 1.5}, 'epochs must be a whole number'),
    ({'validation': shop.held_out(), 'every': 0}, 'every must be a whole'),
    ({'validation': shop.held_out(), 'patience': 0}, 'patience must be'),
    ({'monitor': 'auc'}, "function of metrics .*got 'auc'"),
    ({'callbacks': [print]}, 'objects with on_step'),
    ({'callbacks': 3}, 'must be a list'),
  ],
)
@pytest.mark.usefixtures('as_users_run_it')
def test_wrong_arguments_end_in_a_sentence_before_any_step(arguments, message):
  with shop.trainer() as trainer:
    with pytest.raises(UserError, match=message):
      trainer.train(shop.source(), **({'steps': 5} | arguments))
    with pytest.raises(UserError, match='when its first source comes'):
      trainer.parts  # noqa: B018


class Ear:
  def __init__(self):
    self.heard = []

  def on_step(self, record):
    self.heard.append(record.step)

  def on_validation(self, record):
    self.heard.append(('validation', record.step))

  def on_end(self, history):
    self.heard.append(len(history.losses))


class OnlyTheEnd:
  def on_end(self, history):
    self.steps = history.steps


def test_callbacks_hear_steps_validations_and_the_end():
  ear, end = Ear(), OnlyTheEnd()
  with shop.trainer() as trainer:
    trainer.train(
      shop.source(),
      steps=4,
      validation=shop.held_out(),
      every=2,
      callbacks=[ear, end],
    )
  two = ('validation', 2), ('validation', 4)
  assert ear.heard == [1, 2, two[0], 3, 4, two[1], 4]
  assert [*end.steps] == [1, 2, 3, 4]


# The log loss on these rises from the first validation on.
WORSE = shop.held_out(1 - shop.CLICKS)


def test_after_an_early_stop_other_sources_are_trained_as_ever():
  """Fine-tuning on a second source, then back to the first one."""
  stops = {'validation': WORSE, 'every': 5, 'patience': 2}
  with shop.trainer() as one, shop.trainer() as other:
    first, second = shop.source(), shop.source(seed=2)
    same, too = shop.source(), shop.source(seed=2)
    history = one.train(first, steps=50, **stops)
    assert [v.step for v in history.validations] == [5, 10, 15]
    assert len(history.losses) == 15
    other.train(same, steps=5)
    for trainer, a, b in (one, first, second), (other, same, too):
      trainer.train(b, steps=7)
      trainer.train(a, steps=3)
    shop.assert_same(one, other)


def test_batches_of_the_user_go_back_with_an_early_stop():
  stops = {'validation': WORSE, 'every': 5, 'patience': 1}
  with shop.trainer() as one, shop.trainer() as other:
    source, same = column_batches(), column_batches()
    one.train(source, steps=50, **stops)
    other.train(same, steps=5)
    one.train(source, steps=3)
    other.train(same, steps=3)
    shop.assert_same(one, other)


def test_an_iterator_continues_where_it_is_after_an_early_stop():
  stops = {'validation': WORSE, 'every': 5, 'patience': 1}
  items = [*shop.dicts(20)]
  with shop.trainer() as one, shop.trainer() as other:
    stream = iter(items)
    assert len(one.train(stream, **stops).losses) == 10
    other.train(items, steps=5)
    shop.assert_same(one, other)
    assert len(one.train(stream).losses) == 10
    other.train(items[10:])
    shop.assert_same(one, other)


def test_an_early_stop_in_the_second_pass_of_a_list(tmp_path):
  items = [*shop.dicts(5)]
  stops = {'validation': WORSE, 'patience': 1}
  with shop.trainer() as one, shop.trainer() as other:
    one.train(items, epochs=9, **stops)
    other.train(items, epochs=1)
    shop.assert_same(one, other)
    one.save(tmp_path)
    one.train(items, epochs=1)
    other.train(items, epochs=1)
    shop.assert_same(one, other)


def test_a_failed_run_leaves_the_trainer_and_no_folder(tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))

  def stop(record):
    if record.step == 12:
      assert len([*tmp_path.iterdir()]) == 1
      raise KeyboardInterrupt

  with shop.trainer() as one, shop.trainer() as other:
    source, same = shop.source(), shop.source()
    with pytest.raises(KeyboardInterrupt):
      one.train(source, 50, validation=WORSE, every=5, patience=9, on_step=stop)
    assert not [*tmp_path.iterdir()]
    other.train(same, 12)
    shop.assert_same(one, other)
    one.train(source, 3)
    other.train(same, 3)
    shop.assert_same(one, other)


def test_a_user_says_what_is_watched():
  stops = {'validation': WORSE, 'every': 5, 'patience': 1}
  with shop.trainer() as trainer:
    history = trainer.train(
      shop.source(), 50, monitor=lambda metrics: -metrics.log_loss, **stops
    )
    losses = history.curve('log_loss')
    assert len(losses) == 10
    assert history.best.metrics.log_loss == losses.max()


def test_another_source_in_between_and_patience_exclude_each_other():
  with shop.trainer() as trainer:
    other = shop.source(seed=2)

    def monitor(metrics):
      trainer.train(other, steps=1)
      return metrics.log_loss

    with pytest.raises(UserError, match='trained by one thread alone'):
      trainer.train(
        shop.source(), 9, validation=WORSE, every=3, patience=1, monitor=monitor
      )
    trainer.train(other, steps=1)
