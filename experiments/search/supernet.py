"""The space that a config spans, and how its supernet is trained."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_collections
import optax

from configs import common
from experiments.common import build
from experiments.common.models import model_of
from slipstream_jax.data.source import Dataset
from slipstream_jax.models.dlrm import TokenModel
from slipstream_jax.models.supernet import (
  ARCHITECTURE,
  cost_of,
  expected_cost,
  flops_of,
  Inputs,
  inputs_of,
  interaction_of,
  Net,
  Space,
  Supernet,
)
from slipstream_jax.training.recipe import Recipe

OWN = 'dot'
"""The interaction of the config's model."""
INTERACTIONS: dict[str, dict[str, Any]] = {
  OWN: {'name': 'dlrm'},
  'fm': {'name': 'dhen', 'layers': (('fm',),)},
  'low-rank cross': {'name': 'dcn', 'crosses': 1, 'rank': 8},
  'cross': {'name': 'dcn', 'crosses': 1},
  'dot + linear': {'name': 'dhen', 'layers': (('dot', 'linear'),)},
}
"""Keys of `config.model` for each interaction of a space, by name."""
WARM_UP = 0.5
"""Share of the steps in which weights alone are trained."""
TURN = 40, 10
"""Batches that train weights, and then logits, in turn. Each batch is new."""
_RATE = 0.05  # of Adam for logits


def with_net(
  config: ml_collections.ConfigDict, net: Net
) -> ml_collections.ConfigDict:
  """Returns a copy of a DLRM's config for one net of its space."""
  changed = config.copy_and_resolve_references()
  keys = INTERACTIONS[net.interaction]
  with changed.unlocked():
    if keys['name'] != changed.model.name:
      common.another_model(changed, keys['name'])
    changed.model.update(keys)
    changed.model.bottom, changed.model.top = net.bottom, net.top
    changed.model.dims = net.dims
  return changed


def space_of(
  config: ml_collections.ConfigDict,
  data: Dataset,
  widths: Sequence[int],
  interactions: Sequence[str],
  budget: float,
) -> tuple[Space, Inputs]:
  """Returns the space around a DLRM, and what its nets cost.

  Args:
    config: of the DLRM.
    data: what is trained on.
    widths: of hidden layers. Empty: those of the DLRM, and half of the least.
    interactions: names in `INTERACTIONS`.
    budget: interactions that alone have more FLOPs than this multiple of the
      DLRM are left out, but for its own.
  """
  model, names, own = config.model, list(data.sizes), own_net(config, data)
  hidden = sorted({*model.bottom[:-1], *model.top})
  dims = sorted({max(1, model.dim // part) for part in (4, 2, 1)})
  space = Space(
    interactions=tuple(
      (
        name,
        interaction_of(
          cast(
            TokenModel,
            model_of(with_net(config, own._replace(interaction=name)).model),
          )
        ),
      )
      for name in dict.fromkeys((OWN, *interactions))
    ),
    tables=tuple(names.index(one.table) for one in data.features.values()),
    widths=tuple(sorted({*widths} or {max(2, hidden[0] // 2), *hidden})),
    bottom=len(model.bottom) + 1,
    top=len(model.top) + 2,
    dims=tuple(dims),
  )
  sizes = [*data.sizes.values()]
  inputs = inputs_of(space, data.dense_features, sizes)
  most = budget * cost_of(inputs, own)[0]
  kept = tuple(
    pair
    for pair in space.interactions
    if pair[0] == OWN or inputs.flops[pair[0]] < most
  )
  return space._replace(interactions=kept), inputs


def supernet_steps(
  space: Space, inputs: Inputs, own: Net, steps: int, most: float
) -> int:
  """Returns the steps of a supernet beside a run of a net.

  Args:
    space: the nets.
    inputs: sizes of the data.
    own: the net of the run.
    steps: of the run. The supernet has at most as many.
    most: FLOPs of the supernet's steps, as a multiple of those of the run.
  """
  share = most * cost_of(inputs, own)[0] / flops_of(space, inputs)
  return max(1, min(steps, round(steps * share)))


def own_net(config: ml_collections.ConfigDict, data: Dataset) -> Net:
  """Returns the config's own model as a net."""
  model = config.model
  dims = (model.dim,) * len(data.sizes)
  return Net(tuple(model.bottom), tuple(model.top), OWN, dims)


def recipe_of(
  config: ml_collections.ConfigDict,
  data: Dataset,
  space: Space,
  inputs: Inputs,
  price: float,
  steps: int,
) -> Recipe:
  """Returns the recipe of a supernet: weights and logits trained in turn.

  Args:
    config: of a DLRM. Weights and rows have its optimizers.
    data: what it is trained on.
    space: the nets.
    inputs: sizes of the data.
    price: of the logarithm of the expected FLOPs, and of that of the elements
      of tables. Both are added to the loss of the logits.
    steps: of the run.
  """
  plain = build.recipe(config, data, steps)
  weights = functools.partial(_learns_weights, steps)

  def cost(logits: Mapping[str, jax.Array]) -> jax.Array:
    flops, elements = expected_cost(space, inputs, logits)
    return price * (jnp.log(flops) + jnp.log(elements))

  def label(params: Mapping[str, Any]) -> dict[str, str]:
    return {
      name: 'logits' if name == ARCHITECTURE else 'weights' for name in params
    }

  dense = optax.partition(
    {
      'weights': _in_turn(plain.dense_optimizer, weights),
      'logits': _in_turn(
        optax.chain(_with_gradient_of(cost), optax.adam(_RATE)),
        lambda batches: ~weights(batches),
      ),
    },
    label,
  )
  return plain._replace(
    model=Supernet(space, steps),
    row_optimizer=_in_turn(plain.row_optimizer, weights),
    dense_optimizer=dense,
  )


def _learns_weights(steps: int, batches: jax.Array) -> jax.Array:
  """Whether weights learn from the batch that is the n-th of the source."""
  after = batches - 1 - WARM_UP * steps
  return (after < 0) | (after % sum(TURN) < TURN[0])


def _in_turn(
  inner: optax.GradientTransformation,
  active: Callable[[jax.Array], jax.Array],
) -> optax.GradientTransformationExtraArgs:
  """Lets a chain learn from some batches of the source alone."""

  def is_active(step: Any, *, batches_seen: Any, **_: Any) -> jax.Array:
    return active(batches_seen)

  return optax.conditionally_mask(inner, is_active, forward_extra_args=True)


def _with_gradient_of(
  cost: Callable[[Mapping[str, jax.Array]], jax.Array],
) -> optax.GradientTransformation:
  """Adds the gradient of a cost of a supernet's logits to theirs."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    own = jax.grad(cost)(params[ARCHITECTURE])
    added = jax.tree.map(jnp.add, updates[ARCHITECTURE], own)
    return {**updates, ARCHITECTURE: added}, state

  return optax.GradientTransformation(optax.init_empty_state, update)
