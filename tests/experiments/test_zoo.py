"""The models that configs name, and the program that compares them."""

import csv
import itertools
import math

import jax
import numpy as np
import pytest

from configs import common, criteo, movielens, taobao, terabyte
from experiments.common import cli, datasets
from experiments.common.models import model_of
from experiments.zoo import job, page
from experiments.zoo.hashing import LONGER, Past, shared, WAYS
from tests.formats.text_formats import FORMATS
from tests.support.runs import assert_one_sentence, changed

SMALL = {
  'data.batch_size': 64,
  'data.test_examples': 256,
  'eval.batch_size': 128,
  'model.bottom': (16,),
  'model.top': (4,),
}
TWO = 'dlrm', 'deepfm'
CONFIGS = {
  **{name: criteo.get_config(name).model for name in ('planted', *common.ZOO)},
  'mlperf': terabyte.get_config('dcn').model,
  'towers': terabyte.get_config('towers').model,
}


def sizes_of(model, dense=13, features=26):
  """Elements of each parameter, by its path."""
  rows = {
    f'C{i}': np.zeros((2, model.dim), np.float32) for i in range(features)
  }
  shapes = jax.eval_shape(
    lambda *x: model_of(model).init(jax.random.key(0), *x),
    np.zeros((2, dense), np.float32),
    rows,
  )
  leaves = jax.tree.leaves_with_path(shapes['params'])
  return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_makes_the_model_that_it_names(name):
  sizes = sizes_of(CONFIGS[name])
  kind = type(model_of(CONFIGS[name])).__name__.lower()
  assert kind == {'planted': 'dlrm', 'mlperf': 'dcn', 'towers': 'dmt'}.get(
    name, name.replace('_', '')
  )
  assert any('top' in path for path in sizes)
  assert any('wide' in path for path in sizes) == (
    name in ('deepfm', 'wide_deep')
  )


@pytest.mark.parametrize('name', ['sasrec', 'hstu'])
def test_a_config_makes_a_model_of_sequences(name):
  model = model_of(taobao.get_config(name).model)
  assert type(model).__name__.lower() == name
  assert (model.blocks, model.heads, model.top) == (2, 2, (64,))


def test_the_layers_of_dlrm_dcnv2():
  """As in MLPerf's reference: 27 vectors of 128, three crosses of rank 512."""
  lengths = terabyte.get_config('dcn').data.multi_hot
  assert (len(lengths), sum(lengths), max(lengths)) == (26, 214, 100)
  sizes = sizes_of(CONFIGS['mlperf'])
  crosses = [shape for path, shape in sizes.items() if 'cross' in path]
  width = 27 * 128
  assert crosses.count((width, 512)) == crosses.count((512, width)) == 3
  assert crosses.count((width,)) == 3
  assert len(crosses) == 9
  kernels = [s for p, s in sizes.items() if 'top' in p and len(s) == 2]
  wide = [width, 1024, 1024, 512, 256, 1]
  assert kernels == [*itertools.pairwise(wide)]
  bottom, crossed, top = 171_392, 3 * (2 * width * 512 + width), 5_245_953
  counted = sum(math.prod(shape) for shape in sizes.values())
  assert counted == bottom + crossed + top == 16_044_545


def zoo(workdir, config=None, rates=('3',), **more):
  config = config or changed(criteo.get_config('planted'), SMALL)
  given = {'data': None, 'family': 'clicks', 'seeds': 2, 'steps': 6} | more
  return cli.guarded(
    lambda: job.zoo(config, rates=rates, workdir=str(workdir), **given)
  )


@pytest.mark.slow
def test_a_stopped_zoo_continues_and_writes_a_page(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(job.FAMILIES, 'clicks', {n: job.Entry(n) for n in TWO})
  measure, ran = job.measure, []

  def stopping(config, cell, *rest):
    if len(ran) == 2:
      raise KeyboardInterrupt
    ran.append(cell)
    return measure(config, cell, *rest)

  monkeypatch.setattr(job, 'measure', stopping)
  assert zoo(tmp_path) == 130
  assert len((tmp_path / 'zoo.csv').read_text().splitlines()) == 3
  monkeypatch.setattr(job, 'measure', measure)
  assert zoo(tmp_path) == 0
  with (tmp_path / 'zoo.csv').open() as file:
    runs = [*csv.DictReader(file)]
  cells = [(run['model'], float(run['rate'])) for run in runs]
  assert cells == [(name, 3.0) for name in TWO] * 2
  assert [run['seed'] for run in runs] == ['0', '0', '1', '1']
  assert len({run[x] for run in runs for x in ('choosing', 'log_loss')}) == 8
  page = (tmp_path / 'zoo.html').read_text()
  assert 'SYNTHETIC DATA' in page
  assert all(name in page for name in TWO)
  assert 'best possible log loss is 0.4' in page
  capsys.readouterr()
  assert zoo(tmp_path, steps=7) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.train.steps', 'got 7')


@pytest.mark.slow
def test_ids_share_rows_in_several_ways(tmp_path, monkeypatch):
  """All ways have as few rows, and steps that are not of the past."""
  family = job.FAMILIES['hash10']
  assert {*family} == {*WAYS, *(f'{one}, longer' for one in LONGER)}
  rows, measure = {}, job.measure

  def looking(config, cell, data, *rest):
    rows[cell.model] = data.sizes
    return measure(config, cell, data, *rest)

  monkeypatch.setattr(job, 'measure', looking)
  assert zoo(tmp_path, family='hash10', seeds=1, steps=9) == 0
  with (tmp_path / 'zoo.csv').open() as file:
    runs = {run['model']: run for run in csv.DictReader(file)}
  assert {*runs} == {*family}
  for name, run in runs.items():
    assert run['steps'] == ('9' if 'longer' in name else '6')
    whole = rows['all rows'].items()
    fewer = {t: max(min(n, 16), n // 10) for t, n in whole}
    assert rows[name] == (dict(whole) if 'all rows' in name else fewer)
  assert len({run['log_loss'] for run in runs.values()}) == len(runs)


@pytest.mark.parametrize('way', WAYS)
def test_shared_rows_are_those_that_a_way_gives(way):
  """And no lookup is lost: each example keeps its own, in order."""
  config = changed(criteo.get_config('planted'), SMALL)
  data = datasets.dataset(config)
  total, rng = sum(data.sizes.values()), np.random.default_rng(0)
  counts = rng.integers(0, 9, total)
  past = Past(counts, rng.normal(size=(total, 4)))
  fewer = shared(data, WAYS[way], 10, 2, past)
  old, new = data.train(64), fewer.train(64)
  for _ in range(3):
    before = next(old)
  after = next(new)
  assert (before.labels == after.labels).all()
  assert (before.dense == after.dense).all()
  first = np.cumsum([0, *fewer.sizes.values()])
  rows = after.lookups.reshape(64, len(fewer.sizes), -1)
  for table in range(len(fewer.sizes)):
    own = rows[:, table]
    real = own >= 0
    assert real[:, 0].all()
    assert (own[real] >= first[table]).all()
    assert (own[real] < first[table + 1]).all()
    for row in np.unique(before.lookups[:, table]):
      same = own[before.lookups[:, table] == row]
      assert (same == same[0]).all()
  if way == 'all rows':
    assert (rows[..., 0] == before.lookups).all()


@pytest.mark.slow
def test_models_that_rank_items_are_compared_by_recall(tmp_path, monkeypatch):
  two = {name: job.Entry(name) for name in ('two_tower', 'hstu')}
  monkeypatch.setitem(job.FAMILIES, 'retrieval', two)
  log = FORMATS['ml csv']
  path = log.write(tmp_path / 'ratings.csv', log.lines(600))
  config = changed(
    movielens.get_config('two_tower'),
    {'data.batch_size': 32, 'eval.batch_size': 64},
  )
  more = {'family': 'retrieval', 'seeds': 1, 'steps': 4, 'data': str(path)}
  assert zoo(tmp_path / 'run', config, **more) == 0
  with (tmp_path / 'run' / 'zoo.csv').open() as file:
    runs = [*csv.DictReader(file)]
  assert [run['model'] for run in runs] == [*two]
  for run in runs:
    assert 0 <= float(run['ndcg']) <= float(run['recall']) <= 1
    assert float(run['flops']) > 0
  written = (tmp_path / 'run' / 'zoo.html').read_text()
  assert 'recall at 10' in written
  assert 'NDCG 0.0513' in written  # of RecBole


@pytest.mark.slow
def test_models_of_equal_flops():
  """Layers above are wider where a model has fewer FLOPs than another."""
  config = changed(criteo.get_config('planted'), SMALL)
  data = datasets.dataset(config)
  some = ('dlrm', 'dot', 'dot + linear')
  entries = {name: job.FAMILIES['dhen'][name] for name in some}
  found = job.widened(config, entries, data)
  costs = [
    job.cost_of(job.configured(config, entry, page.Cell(name, 1.0), 0), data)[1]
    for name, entry in found.items()
  ]
  assert max(costs) < 1.1 * min(costs)
  assert found['dot'].top == config.model.top
  assert found['dlrm'].top > found['dot + linear'].top > config.model.top


def test_a_rate_scales_the_rates_of_rows_and_of_the_model():
  config = changed(criteo.get_config('sample'), {'seed': 5})
  found = job.configured(
    config, job.FAMILIES['dhen']['all four'], page.Cell('all four', 0.5), 7
  )
  (rows,), (dense,) = found.optimizer.rows, found.optimizer.dense
  start = {'learning_rate': 0.015, 'initial_accumulator_value': 1e-7}
  assert rows == ('adagrad', start)
  assert dense == ('adam', {'learning_rate': 0.0015})
  assert (found.seed, config.seed) == (7, 5)
  assert len(model_of(found.model).layers[0]) == 4
  assert config.model.name == 'dlrm'


@pytest.mark.parametrize(
  ('settings', 'said'),
  [
    ({'rates': ['1', '-1']}, '--rates'),
    ({'family': 'birds'}, '--family'),
    ({'config': terabyte.get_config('dcn')}, 'config.model.name'),
    ({'family': 'retrieval'}, 'config.model.name'),
  ],
)
def test_settings_that_cannot_be(settings, said, tmp_path, capsys):
  assert zoo(tmp_path / 'run', **settings) == 1
  assert_one_sentence(capsys.readouterr().err, said)


def run_of(model, rate, seed, choosing, log_loss):
  more = {'normalized_entropy': 0.9, 'auc': 0.7, 'parameters': 9, 'flops': 8.0}
  return page.Run(
    *(model, rate, seed, 10, 4, 2.0, choosing), log_loss=log_loss, **more
  )


def test_one_half_chooses_the_rate_and_the_other_scores_it():
  runs = [
    *(run_of('a', 1.0, seed, 0.5, 0.50 + seed / 100) for seed in range(3)),
    *(run_of('a', 3.0, seed, 0.6, 0.40) for seed in range(3)),
    *(run_of('b', 1.0, seed, 0.5, 0.49 + seed / 100) for seed in range(3)),
  ]
  first, second = page.figures(runs)
  assert (first['rate'], first['log loss'][:6]) == ('1', '0.5100')
  assert (first['minus a'], second['minus a'][:7]) == ('-', '-0.0100')
  assert first['ms a step'][:6] == '200.00'
  assert first['examples/s'] == '20'
  ranking = [run._replace(recall=run.log_loss) for run in runs]
  assert page.figures(ranking)[0]['rate'] == '3'  # 0.6 is more recall


def test_flops_and_parameters_of_a_model_that_is_known():
  """One layer of 2 on each side; a dot product has 2 D FLOPs."""
  config = changed(criteo.get_config('planted'), SMALL)
  data = datasets.dataset(config)
  parameters, flops = job.cost_of(config, data)
  bottom, top = (4 + 1) * 16, (16 + 13 * 12 // 2 + 1) * 4 + 4 + 1
  assert parameters == bottom + top
  forward = 2 * (4 * 16 + 13 * 13 * 16 + (16 + 78) * 4 + 4)
  assert 2.0 < flops / forward < 4.0
