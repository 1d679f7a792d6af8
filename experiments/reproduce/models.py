"""The paper's four models, and one with bags, as configs at three scales.

`full` is what was published: all rows, an epoch, batches of 1024 (256 of
Taobao). `laptop` is a part of it for two cores: tables a tenth as long or less,
about a hundred batches, phases that are the same shares of a run. `medium`
trains ten times as many batches, enough to tell most speeds apart with five
seeds. Hot rows take the published share of the tables' bytes at all scales.

Real data are read from folders of one directory, named by their formats:
DIR/taobao, DIR/criteo, DIR/terabyte and DIR/avazu, as `experiments.prepare`
packs them. A model without its folder trains on its synthetic proxy.
"""

from collections.abc import Callable
import pathlib
from typing import NamedTuple

import ml_collections

from configs import avazu, common, criteo, taobao, terabyte
from experiments.reproduce.bags import bag_dataset, BagSpec
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.selection.policies import SURPRISE
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.spec import SyntheticSpec

LAPTOP, MEDIUM, FULL = SCALES = ('laptop', 'medium', 'full')
_LONGER = 10  # times the batches of a laptop
BAG = 20
"""Lookups of a bag."""
_LEAST = 100  # rows of the smallest table that is shortened


class Part(NamedTuple):
  """The size of a model on a laptop."""

  shorter: int
  """Factor by which the tables are shorter."""
  batch_size: int
  steps: int
  test_examples: int = 1 << 15


class Model(NamedTuple):
  """A model of the paper."""

  title: str
  config: Callable[[], ml_collections.ConfigDict]
  """Function that returns a config with the published model and tables."""
  proxy: str
  """A key of `PROXIES`."""
  format: str | None
  """Format of the real data; None where there are none."""
  laptop: Part
  full_batch_size: int = 1024


def _terabyte() -> ml_collections.ConfigDict:
  return terabyte.get_config('full')


def _bags() -> ml_collections.ConfigDict:
  config = criteo.get_config()
  config.data.source = 'experiments.reproduce.models:bags'
  return config


MODELS = {
  'rm1': Model(
    'RM1, TBSM on Taobao',
    taobao.get_config,
    'taobao',
    'taobao',
    Part(10, 256, 140, 1 << 14),
    256,
  ),
  'rm2': Model(
    'RM2, DLRM on Criteo Kaggle',
    criteo.get_config,
    'kaggle',
    'criteo',
    Part(10, 512, 70),
  ),
  'rm2_l20': Model(
    f'RM2 with bags of {BAG} lookups',
    _bags,
    'kaggle',
    None,
    Part(10, 256, 36, 1 << 13),
  ),
  'rm3': Model(
    'RM3, DLRM on Criteo Terabyte',
    _terabyte,
    'terabyte',
    'terabyte',
    Part(300, 512, 44, 1 << 14),
  ),
  'rm4': Model(
    'RM4, DLRM on Avazu', avazu.get_config, 'avazu', 'avazu', Part(10, 512, 70)
  ),
}
"""The names that `--models` takes. `rm2_l20` comes with `rm2`."""


def config_of(
  name: str, scale: str, data: str | None, seed: int, drop: float
) -> ml_collections.ConfigDict:
  """Returns the config that all runs of a model and seed share.

  Args:
    name: a key of `MODELS`.
    scale: one of `SCALES`.
    data: folder of real data; None without any.
    seed: of the data, the model and the choices.
    drop: drop target, as a share of the hot examples.
  """
  model = MODELS[name]
  config = model.config()
  config.seed = seed
  # As published: a share of the hot examples, and one fit per period.
  config.skip.policy = SURPRISE.name
  config.skip.drop, config.skip.drop_of = drop, 'hot'
  config.skip.refit_batches = 0
  config.data.path = path_of(name, data)
  proxy = PROXIES[model.proxy]
  config.data.batch_size = model.full_batch_size
  steps = steps_of(name, scale)
  config.data.rows = tuple(proxy.spec.rows)
  bag = BAG if config.data.source else 1  # as many lookups, not examples
  config.hot.profile_examples = proxy.profile_examples // bag
  # An epoch of the real data that there are.
  config.train.steps = 0 if config.data.path else steps
  if scale != FULL:
    part = model.laptop
    config.train.steps = steps
    config.data.batch_size = part.batch_size
    config.data.rows = tuple(
      max(min(rows, _LEAST), rows // part.shorter) for rows in proxy.spec.rows
    )
    config.hot.profile_examples //= part.shorter
    config.data.test_examples = part.test_examples
    config.eval.batch_size = min(4096, part.test_examples)
    config.eval.curve_examples = part.test_examples // 4
  config.eval.curve_steps = max(1, steps // 4)
  # One window in a run. Skipping begins at 29 % of it, as published.
  warm_up, window, settle = (
    max(1, round(share * steps)) for share in (0.14, 0.1, 0.05)
  )
  common.phases(config, warm_up, window, settle, period=0)
  return config


def steps_of(name: str, scale: str) -> int:
  """Returns the batches of a run: an epoch, or a part of it."""
  model = MODELS[name]
  if scale != FULL:
    return model.laptop.steps * (_LONGER if scale == MEDIUM else 1)
  return PROXIES[model.proxy].epoch_examples // model.full_batch_size


def path_of(name: str, data: str | None) -> str | None:
  """Returns the model's folder of real data; None where there is none.

  Raises:
    UserError: there is no such folder for any model.
  """
  if data is None:
    return None
  formats = {model.format for model in MODELS.values()} - {None}
  folder = pathlib.Path(data)
  if not any((folder / str(format)).exists() for format in formats):
    raise UserError(
      'real data must be in folders named by their formats',
      got=f'{data} without {", ".join(sorted(map(str, formats)))}',
      where='--data',
      hint='pack some with experiments.prepare, or leave it out for proxies',
    )
  path = folder / (MODELS[name].format or '')
  return str(path) if MODELS[name].format and path.exists() else None


def bags(config: ml_collections.ConfigDict) -> Dataset:
  """Returns the stream of bags of a config."""
  data = config.data
  spec = SyntheticSpec(rows=tuple(data.rows), seed=config.seed)
  return bag_dataset(BagSpec(spec, BAG), data.test_examples)


def hot_bytes(name: str, table_bytes: int) -> int:
  """Returns the bytes of hot rows: the published share of the tables' bytes."""
  share = PROXIES[MODELS[name].proxy].hot_bytes
  assert share is not None  # all four have one
  return max(1, round(share * table_bytes))


def configured(
  config: ml_collections.ConfigDict, system: str, skip: str
) -> ml_collections.ConfigDict:
  """Returns the config of one run.

  Args:
    config: what all runs share.
    system: a key of `SYSTEMS`, or `PINNED`.
    skip: 'off'; 'published': examples with stale rows only are dropped, and a
      row that the window did not touch is stale; or 'ours', the default policy.
  """
  config = config.copy_and_resolve_references()
  config.system = 'plain' if system == 'pinned' else system
  config.placement = 'pinned' if system == 'pinned' else 'streamed'
  config.skip.mode = 'off' if skip == 'off' else 'examples'
  if skip == 'published':
    config.skip.policy, config.skip.min_touches = 'stale', 0
  return config
