"""The forward pass of a trained model as a program of its own."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import export
import jax.numpy as jnp
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import choose, UserError
from slipstream_jax.training.forward import make_forward
from slipstream_jax.training.parts import TrainerParts

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
"""That a program can be for."""


def leaves_of(trainer: TrainerParts) -> list[np.ndarray]:
  """What the program takes first: parameters and state of the model."""
  tree = trainer.state.params, trainer.state.model_state
  return [np.asarray(leaf) for leaf in jax.tree.leaves(to_host(tree))]


def serialized(
  trainer: TrainerParts, examples: int, platforms: Sequence[str]
) -> bytes:
  """The forward pass for a number of examples, outside of training.

  It takes the list of `leaves_of`; per group rows f32[B * K_g, D], as many as
  there may be at most, so that it has one shape, and the place in them of each
  lookup, i32[B, K_g]; dense features f32[B, I]; and f32[B, K], where lookups
  have weights. It is `Compiled.predict` but for the number of rows, of which no
  score depends.

  Args:
    trainer: whose.
    examples: B.
    platforms: that it can run on, 'cpu' among others.

  Raises:
    UserError: JAX cannot export the model, or there is no such platform.
  """
  for platform in platforms:
    choose(dict.fromkeys(PLATFORMS), platform, 'command line, --platforms')
  recipe, tables = trainer.recipe, trainer.recipe.tables
  forward = make_forward(recipe)
  _, tree = jax.tree.flatten((trainer.state.params, trainer.state.model_state))

  def score(
    leaves: list[jax.Array],
    rows: tuple[jax.Array, ...],
    inverses: tuple[jax.Array, ...],
    dense: jax.Array,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    params, state = jax.tree.unflatten(tree, leaves)
    return forward(params, state, rows, inverses, dense, weights)[0]

  shape, columns = jax.ShapeDtypeStruct, tables.num_columns
  number = jnp.float32
  lengths = [len(group.columns) for group in tables.groups]
  inputs: list[Any] = [
    [shape(leaf.shape, leaf.dtype) for leaf in leaves_of(trainer)],
    tuple(
      shape((examples * length, group.dim), number)
      for length, group in zip(lengths, tables.groups, strict=True)
    ),
    tuple(shape((examples, length), jnp.int32) for length in lengths),
    shape((examples, trainer.shape.dense_features), number),
  ]
  if tables.is_weighted:
    inputs.append(shape((examples, columns), number))
  try:
    exported = export.export(jax.jit(score), platforms=tuple(platforms))
    return bytes(exported(*inputs).serialize())
  except UserError:
    raise
  except Exception as error:  # a model of one's own may do anything
    raise UserError(
      'a model is exported as jax.export can',
      got=f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")}',
      where='config.model',
      hint='leave out of the model what calls Python or other programs',
    ) from error
