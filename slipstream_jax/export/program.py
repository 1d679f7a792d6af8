"""The forward pass of a trained model, as a program that only needs JAX."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import export
import jax.numpy as jnp
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import UserError
from slipstream_jax.training.forward import forward
from slipstream_jax.training.parts import TrainerParts

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
"""The platforms that a program can be written for."""


def leaves_of(parts: TrainerParts) -> list[np.ndarray]:
  """Returns the model's parameters and state, the first input of a program."""
  tree = parts.state.params, parts.state.model_state
  return [np.asarray(leaf) for leaf in jax.tree.leaves(to_host(tree))]


def serialized(
  parts: TrainerParts, examples: int, platforms: Sequence[str]
) -> bytes:
  """Returns the forward pass for a number of examples, outside of training.

  Its inputs are the list of `leaves_of`; for each group the rows
  f32[B * K_g, D], as many as there can be, and the place of each lookup in
  them, i32[B, K_g]; the dense features f32[B, I]; and, if lookups have
  weights, f32[B, K]. Only the number of rows differs from `Compiled.forward`,
  and no score depends on it.

  Args:
    parts: the trainer.
    examples: B.
    platforms: members of `PLATFORMS`.

  Raises:
    UserError: JAX cannot export the model.
  """
  recipe, tables = parts.recipe, parts.recipe.tables
  _, tree = jax.tree.flatten((parts.state.params, parts.state.model_state))

  def score(
    leaves: list[jax.Array],
    rows: tuple[jax.Array, ...],
    inverses: tuple[jax.Array, ...],
    dense: jax.Array,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    params, state = jax.tree.unflatten(tree, leaves)
    return forward(recipe, params, state, rows, inverses, dense, weights)[0]

  shape, number = jax.ShapeDtypeStruct, jnp.float32
  sizes = [(examples * len(group.columns), group) for group in tables.groups]
  inputs: list[Any] = [
    [shape(leaf.shape, leaf.dtype) for leaf in leaves_of(parts)],
    tuple(shape((size, group.dim), number) for size, group in sizes),
    tuple(
      shape((examples, len(group.columns)), jnp.int32)
      for group in tables.groups
    ),
    shape((examples, parts.shape.dense_features), number),
  ]
  if tables.is_weighted:
    inputs.append(shape((examples, tables.num_columns), number))
  try:
    exported = export.export(jax.jit(score), platforms=tuple(platforms))
    return bytes(exported(*inputs).serialize())
  except UserError:
    raise
  except Exception as error:  # a user's model may raise anything
    raise UserError(
      'jax.export must be able to export the model',
      got=f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")}',
      where='export, model',
      hint='leave out of the model what calls Python or other programs',
    ) from error
