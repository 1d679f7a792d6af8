"""DMT (arXiv 2403.00877): features meet in towers first, and then all of them.

A tower turns its features into fewer numbers. If each host has the tables of
one tower (`training.tower_parts`), only these cross to other hosts. On one
host, the model is trained like any other.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import check_whole, choose, UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.embedding import stacked
from slipstream_jax.models.interactions import Cross, Tokens
from slipstream_jax.models.layers import MLP, side_by_side
from slipstream_jax.models.normalization import Features
from slipstream_jax.types import DenseFeatures, Embeddings


def _identity(tokens: Tokens, width: int) -> Tokens:
  del width
  return tokens


def _linear(tokens: Tokens, width: int) -> Float[jax.Array, 'B M E']:
  """Mixes features, and then the elements of each: as many vectors of E.

  The mixture starts as the features themselves.
  """
  mix = nn.Dense(tokens.shape[1], kernel_init=_one, name='features')
  return _narrow(jnp.swapaxes(mix(jnp.swapaxes(tokens, 1, 2)), 1, 2), width)


def _one(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
  """Returns the first columns of the identity, or all of it."""
  del key
  return jnp.eye(*shape, dtype=dtype)


def _cross(tokens: Tokens, width: int) -> Float[jax.Array, 'B M E']:
  """Crosses the tower's elements as in DCN-v2, and projects each vector."""
  return _narrow(Cross(name='cross')(tokens), width)


def _narrow(tokens: Tokens, width: int) -> Float[jax.Array, 'B M E']:
  narrow: Float[jax.Array, 'B M E']
  narrow = nn.Dense(width, kernel_init=_one, name='elements')(tokens)
  return narrow


TOWERS: dict[str, Callable[[Tokens, int], jax.Array]] = {
  'identity': _identity,
  'linear': _linear,
  'cross': _cross,
}
"""What a tower computes from its tokens [B, M, D], given the width E."""


class _Tower(nn.Module):
  form: str
  width: int

  @nn.compact
  def __call__(self, tokens: Tokens) -> Float[jax.Array, 'B M E']:
    return TOWERS[self.form](tokens, self.width)


def tower_name(number: int) -> str:
  """Returns the name of a tower's parameters among those of a `DMT`."""
  return f'tower_{number}'


class DMT(DLRM):
  """Dot products of all pairs of vectors that towers return.

  With towers 'identity' it is a DLRM, whose features are in the order of the
  towers. `TokenModel` has its other attributes. `distributed.towers` finds
  features that belong together.

  Attributes:
    towers: for each tower, the places of its features in the order of the
      embeddings. Each feature is in one tower.
    width: elements of a vector that a tower returns. D / width is the paper's
      compression ratio. None: D.
    form: a name of `TOWERS`. 'linear' is the paper's tower for DLRM, with a
      vector for each feature and none for the tower. 'cross' is that for DCN.
  """

  towers: Sequence[Sequence[int]] = ()
  width: int | None = None
  form: str = 'linear'

  def interact(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Features:
    """Returns the dense token and the products of all pairs, f32[B, W].

    Raises:
      UserError: a feature is in no tower or in several, there is no such form,
        or identities were asked for another width.
    """
    features, dim = tokens.shape[1] - 1, tokens.shape[2]
    width = dim if self.width is None else self.width
    self.check_towers(features, width == dim)
    vectors = [
      _Tower(self.form, width, name=tower_name(number))(
        tokens[:, 1 + np.asarray(own)]
      )
      for number, own in enumerate(self.towers)
    ]
    return self.meet(x, vectors)

  def meet(
    self,
    x: Float[jax.Array, 'B D'],
    vectors: Sequence[Float[jax.Array, 'B _M E']],
  ) -> Features:
    """Returns what `interact` does, from the vectors of each tower."""
    width = vectors[0].shape[2]
    if width != x.shape[1]:
      x = nn.Dense(width, name='dense_token')(x)
    return super().interact(x, jnp.concatenate([x[:, None], *vectors], axis=1))

  def check_towers(self, features: int, whole: bool = True) -> None:
    """Checks the attributes for a number of features.

    Raises:
      UserError: as `interact`, where `whole` says whether the width is D.
    """
    choose(TOWERS, self.form, 'DMT, form')
    if self.width is not None:
      check_whole(self.width, 1, 'DMT, width', 'use half of the dim')
    places = sorted(place for own in self.towers for place in own)
    if places != [*range(features)]:
      raise UserError(
        f'each of the {features} features must be in one tower',
        got=[*map(list, self.towers)],
        where='DMT, towers',
        hint=f'give the places 0 to {features - 1}, each once',
      )
    if self.form == 'identity' and not whole:
      raise UserError(
        'identities return vectors as they are',
        got=f'width {self.width}',
        where='DMT, width',
        hint='leave it out, or take another form',
      )


def vectors_of(
  model: DMT, number: int, params: Any, tokens: Tokens
) -> Float[jax.Array, 'B M E']:
  """Returns the vectors of one tower of a model, f32[B, M, E].

  Args:
    model: whose tower it is.
    number: of the tower.
    params: of the whole model, or of its towers.
    tokens: the embeddings of the tower's features, in its order, [B, M, D].
  """
  width = tokens.shape[2] if model.width is None else model.width
  tower, own = _Tower(model.form, width), params.get(tower_name(number), {})
  vectors: Any = tower.apply({'params': own}, tokens)
  return vectors


def after_towers(model: DMT) -> 'AfterTowers':
  """Returns the part of a model that takes vectors in place of embeddings."""
  fields = {one.name for one in dataclasses.fields(model)} - {'parent', 'name'}
  return AfterTowers(**{name: getattr(model, name) for name in fields})


class AfterTowers(DMT):
  """The rest of a `DMT`, from the vectors of its towers to the logit.

  It has the parameters of a `DMT` with the same attributes.
  """

  @nn.compact
  def __call__(
    self,
    dense: DenseFeatures,
    embeddings: Embeddings,
    *,
    train: bool = False,
    weights: Float[jax.Array, ' B'] | None = None,
  ) -> Float[jax.Array, ' B']:
    """Computes logits f32[B] from vectors f32[B, E] by feature name."""
    vectors = stacked(embeddings, type(self).__name__)
    bottom = MLP(self.bottom, dtype=self.dtype, name='bottom')
    of_towers = [vectors[:, np.asarray(own)] for own in self.towers]
    features = self.meet(bottom(side_by_side(dense)), of_towers)
    return self.head(features, weights, train)
