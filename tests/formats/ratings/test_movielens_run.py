"""MovieLens through the programs: trained raw and packed, with a history."""

import pytest

from configs import movielens
from experiments.common import datasets, report
from experiments.prepare.job import _prepare as prepare_config
from tests.formats.ratings.text import as_csv, ratings
from tests.support.runs import run_job, summary_of


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp('ml') / 'ratings.csv'
  path.write_text(as_csv(ratings(3000, users=60, items=90)))
  return path


def config_of(path, history, **changes):
  config = movielens.get_config('sample')
  with config.unlocked():
    config.update_from_flattened_dict(
      {
        'data.path': str(path),
        'data.history': history,
        'data.batch_size': 64,
        'model.bottom': (16,),
        'model.top': (16,),
        'train.steps': 20,
        'eval.curve_steps': 0,
      }
      | changes
    )
  return config


@pytest.mark.parametrize('history', [0, 3])
def test_it_trains_from_its_raw_file_and_from_what_was_packed_of_it(
  path, tmp_path, history
):
  config = config_of(path, history)
  assert run_job(tmp_path / 'raw', config) == 0
  raw = summary_of(tmp_path / 'raw')
  assert raw['data'].startswith('MovieLens, ratings.csv, examples 1-2,400 to')
  with config.unlocked():
    config.data.raw, config.data.path = str(path), str(tmp_path / 'packed')
  prepare_config(report.console(), config.data)
  data = datasets.dataset(config)
  assert len(data.features) == 2 + bool(history)
  assert run_job(tmp_path / 'run', config) == 0
  packed = summary_of(tmp_path / 'run')
  assert packed['examples_evaluated'] == raw['examples_evaluated'] == 600
  assert packed['steps'] == raw['steps'] == 20


def test_labels_may_be_stars_and_the_proxy_needs_no_file(path):
  config = config_of(path, 0, **{'data.threshold': 0.0})
  batch = next(datasets.dataset(config).train(64))
  assert {round(5 * float(label), 4) for label in batch.labels} <= {
    half / 2 for half in range(1, 11)
  }
  assert 0 < batch.labels.min() < batch.labels.max() <= 1
  data = datasets.dataset(movielens.get_config('smoke'))
  assert [*data.sizes.values()] == [9000, 4000]
  assert data.dense_features == 2
