"""Makes models and optimizers of the names in a config."""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any

from flax import linen as nn
import ml_collections
import optax
import optax.contrib

from experiments.common import own
from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.dmt import DMT
from slipstream_jax.models.sequences import HSTU, SASRec
from slipstream_jax.models.tbsm import TBSM
from slipstream_jax.models.towers import TwoTower
from slipstream_jax.models.zoo import DCN, DeepFM, DHEN, WideDeep
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.shampoo import shampoo
from slipstream_jax.transforms.skip import skip_stale
from slipstream_jax.transforms.weights import (
  cosine_cycles,
  scale_by_data_seen,
  weight_aware,
)

_DTYPES = {name: name for name in ('float32', 'bfloat16')}


def _dtype(model: ml_collections.ConfigDict) -> str:
  return choose(_DTYPES, model.compute_dtype, 'config.model.compute_dtype')


def _frame(model: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the attributes that all models of pooled embeddings share.

  Raises:
    UserError: another model than a DMT is given towers, or a DMT none.
  """
  towers = model.get('towers')
  if (model.name == 'dmt') != bool(towers):
    raise UserError(
      "a model has towers if and only if it is a 'dmt'",
      got=f'{model.name!r} and {towers!r}',
      where='config.model.towers',
      hint='set config.model.name and config.model.towers, or take'
      ' configs/criteo.py:towers',
    )
  return {
    'bottom': tuple(model.bottom),
    'top': tuple(model.top),
    'first_order': model.first_order,
    'padded': model.get('dims') is not None,
    'normalization': model.normalization,
    'dtype': _dtype(model),
  }


def _dlrm(model: ml_collections.ConfigDict) -> nn.Module:
  return DLRM(**_frame(model))


def _dcn(model: ml_collections.ConfigDict) -> nn.Module:
  return DCN(**_frame(model), crosses=model.crosses, rank=model.rank)


def _deepfm(model: ml_collections.ConfigDict) -> nn.Module:
  return DeepFM(**_frame(model))


def _wide_deep(model: ml_collections.ConfigDict) -> nn.Module:
  return WideDeep(**_frame(model))


def _dhen(model: ml_collections.ConfigDict) -> nn.Module:
  layers = tuple(map(tuple, model.layers))
  return DHEN(**_frame(model), layers=layers, tokens=model.tokens)


def _dmt(model: ml_collections.ConfigDict) -> nn.Module:
  towers = tuple(map(tuple, model.towers))
  more = {'towers': towers, 'width': model.width, 'form': model.form}
  return DMT(**_frame(model), **more)


def _tbsm(model: ml_collections.ConfigDict) -> nn.Module:
  return TBSM(
    tuple(model.bottom),
    tuple(model.top),
    tuple(model.attention),
    tuple(model.final),
    model.normalization,
    _dtype(model),
  )


def _two_tower(model: ml_collections.ConfigDict) -> nn.Module:
  return TwoTower(
    tuple(model.item_features),
    tuple(model.widths),
    model.temperature,
    model.log_q,
  )


def _sequences(model: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the attributes of models with blocks over a history."""
  return {
    'blocks': model.blocks,
    'heads': model.heads,
    'top': tuple(model.top),
    'next_item': model.next_item,
    'log_q': model.log_q,
  }


def _sasrec(model: ml_collections.ConfigDict) -> nn.Module:
  return SASRec(**_sequences(model))


def _hstu(model: ml_collections.ConfigDict) -> nn.Module:
  return HSTU(**_sequences(model), times=model.times)


MODELS: dict[str, Callable[[ml_collections.ConfigDict], nn.Module]] = {
  'dlrm': _dlrm,
  'dcn': _dcn,
  'deepfm': _deepfm,
  'wide_deep': _wide_deep,
  'dhen': _dhen,
  'dmt': _dmt,
  'tbsm': _tbsm,
  'two_tower': _two_tower,
  'sasrec': _sasrec,
  'hstu': _hstu,
}
"""Functions that make a model, by `config.model.name`."""


def model_of(model: ml_collections.ConfigDict) -> nn.Module:
  """Returns the model of `config.model`: one of `MODELS`, or the user's own.

  Raises:
    UserError: there is no such model.
  """
  where = 'config.model.name'
  if own.is_own(model.name):
    returned: nn.Module | None = own.called(model.name, model, where)
    if returned is None:
      raise UserError(
        'a function that makes a model must return it',
        got='None',
        where=where,
        hint=f'look at {model.name}',
      )
    return returned
  if model.name not in MODELS:
    raise UserError(
      f'{where} must be one of {", ".join(MODELS)}, or my_module:function',
      got=repr(model.name),
      where=where,
      hint='pick one of them, or name a function of your own',
    )
  return MODELS[model.name](model)


def chain(
  factories: Mapping[str, Callable[..., Any]],
  steps: Sequence[tuple[str, dict[str, Any]]],
  where: str,
) -> optax.GradientTransformation:
  """Returns a chain of the transformations that names and arguments make.

  Args:
    factories: functions that make a transformation, by name.
    steps: name and arguments of each transformation, in order.
    where: config key of the steps.

  Raises:
    UserError: a step is malformed, or a name or argument does not exist.
  """
  try:
    return optax.chain(*(factories[name](**given) for name, given in steps))
  except UserError:
    raise
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(
      'an optimizer must be a chain of (name, arguments)',
      got=f'{steps!r}: {type(error).__name__} {error}',
      where=where,
      hint='take names and arguments of optax, for rows also '
      + ', '.join([*ROW_OPTIMIZERS, 'skip_stale']),
    ) from error


def row_optimizer(
  section: ml_collections.ConfigDict, steps: int
) -> optax.GradientTransformation:
  """Returns the optimizer of rows, for a run of `steps` batches."""
  falls = _fall(section, steps) if section.rows_fall else ()

  def make() -> optax.GradientTransformation:
    own = {**ROW_OPTIMIZERS, 'skip_stale': skip_stale}
    known = {**vars(optax), **own}
    given = chain(known, section.rows, 'config.optimizer.rows')
    if falls:
      given = optax.chain(given, scale_by_data_seen(_schedule(*falls)))
    return weight_aware(given)

  return _same(['rows', section.rows, *falls], make)


def _fall(
  section: ml_collections.ConfigDict, steps: int
) -> tuple[int, float, int]:
  return steps, section.dense_final, section.cycles


def _schedule(steps: int, final: float, cycles: int) -> optax.Schedule:
  """Returns the factor of the learning rates by batches of the source."""
  if cycles:
    return cosine_cycles(1.0, steps, cycles, final)
  return optax.linear_schedule(1.0, final, steps)


def dense_optimizer(
  section: ml_collections.ConfigDict, steps: int
) -> optax.GradientTransformation:
  """Returns the optimizer of dense parameters, for a run of `steps` batches."""

  def make() -> optax.GradientTransformation:
    known = {**vars(optax), 'muon': optax.contrib.muon, 'shampoo': shampoo}
    given = chain(known, section.dense, 'config.optimizer.dense')
    schedule = _schedule(*_fall(section, steps))
    return weight_aware(optax.chain(given, scale_by_data_seen(schedule)))

  return _same(['dense', section.dense, *_fall(section, steps)], make)


_CHAINS: dict[str, optax.GradientTransformation] = {}


def _same(
  settings: list[Any], make: Callable[[], optax.GradientTransformation]
) -> optax.GradientTransformation:
  """Returns one chain for equal settings, so that recipes share programs.

  Settings that are not JSON, such as functions, get a new chain in each call.
  """
  try:
    key = json.dumps(settings)
  except TypeError:
    return make()
  if key not in _CHAINS:
    _CHAINS[key] = make()
  return _CHAINS[key]
