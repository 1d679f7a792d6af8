"""Click models that differ in how features interact.

Each is the frame of `TokenModel` with interactions of its own: DCN-v2, DeepFM,
Wide & Deep and DHEN.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.dlrm import flat, TokenModel
from slipstream_jax.models.interactions import (
  Cross,
  FM,
  InteractionFactory,
  INTERACTIONS,
  Linear,
  Tokens,
  Vectors,
)
from slipstream_jax.models.layers import MLP
from slipstream_jax.models.normalization import Features

COMBINE = 'concat', 'sum', 'weighted_sum'
"""Ways in which a layer of `DHEN` combines what its interactions return."""
_Outputs = list[Float[jax.Array, 'B _ _']]
"""What the interactions of a layer return. Widths may differ."""


class DCN(TokenModel):
  """DCN-v2 (arXiv 2008.13535), stacked: crosses, then the MLP.

  `bottom=(512, 256, 128)`, `top=(1024, 1024, 512, 256)` and `rank=512` are the
  dense layers of MLPerf's DLRM-DCNv2.

  Attributes:
    crosses: number of crosses.
    rank: rank of their matrices. None: full rank.
  """

  crosses: int = 3
  rank: int | None = None

  def interact(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Features:
    """Returns the crossed tokens as one vector, f32[B, M D]."""
    del x
    cross = Cross(self.crosses, self.rank, name='cross')
    return flat(cross(tokens.astype(self.dtype)))


class WideDeep(TokenModel):
  """Wide & Deep (arXiv 1606.07792): a linear model beside an MLP.

  The linear part has a weight for each row, the last element of the row, and
  one for each dense feature. So tables need one dim more than `bottom` ends at.
  Crossed features of the wide part are tables of their own.
  """

  first_order: bool = True

  def beside(
    self, dense: Float[jax.Array, 'B I'], tokens: Tokens
  ) -> Float[jax.Array, ' B']:
    """Returns the dense features' part of the linear model, f32[B]."""
    del tokens
    return _linear(dense)


class DeepFM(TokenModel):
  """DeepFM (arXiv 1703.04247): a factorization machine beside an MLP.

  Both see the same embeddings. The linear part is that of `WideDeep`.
  """

  first_order: bool = True

  def beside(
    self, dense: Float[jax.Array, 'B I'], tokens: Tokens
  ) -> Float[jax.Array, ' B']:
    """Returns the products of all pairs, and the linear part, f32[B]."""
    return _linear(dense) + FM()(tokens).sum(axis=(1, 2))


def _linear(dense: Float[jax.Array, 'B I']) -> Float[jax.Array, ' B']:
  """Returns a linear function of the dense features that starts at 0."""
  start = nn.initializers.zeros
  return nn.Dense(1, use_bias=False, kernel_init=start, name='wide')(dense)[
    :, 0
  ]


class DHEN(TokenModel):
  """DHEN (arXiv 2203.11014): layers of several interactions each.

  A layer's interactions see the same tokens. Their outputs are projected and
  combined. Then a residual of the layer's input is added and each token is
  normalized.

  Attributes:
    layers: the interactions of each layer: names of `INTERACTIONS`, or
      functions that make a module, such as its class.
    tokens: tokens that a layer ends in. None: as many as it starts with.
    combine: how outputs are combined. 'concat': each is projected to its share
      of the layer's tokens. 'sum' and 'weighted_sum': each is projected to all
      of them. The weights are parameters, 1 at first.
    projected: whether outputs are projected. If not, those of a layer must have
      one width, that of tokens unless it is the last and has no residual.
    residual: whether the layer's input is added. If the number of tokens
      changes, linear mixtures of its tokens are added.
    norm: whether each token is normalized over its D elements.
  """

  layers: Sequence[Sequence[str | InteractionFactory]] = (
    ('dot', 'linear'),
    ('dot', 'linear'),
  )
  tokens: int | None = None
  combine: str = 'concat'
  projected: bool = True
  residual: bool = True
  norm: bool = True

  def interact(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Features:
    """Returns the last layer's tokens as one vector, f32[B, W].

    Raises:
      UserError: an interaction or a way to combine does not exist, or the
        outputs of a layer do not fit together.
    """
    del x
    for number, layer in enumerate(self.layers):
      tokens = self._layer(f'layer_{number}', layer, tokens)
    return flat(tokens)

  def _layer(
    self,
    name: str,
    layer: Sequence[str | InteractionFactory],
    tokens: Tokens,
  ) -> Vectors:
    """Returns the tokens that a layer ends in."""
    # Compiled apart, layers round alike in predictions and in exports, whose
    # programs differ in what comes before.
    tokens = jax.lax.optimization_barrier(tokens)
    outputs: _Outputs = []
    for member in layer:
      make = member
      if isinstance(make, str):
        make = choose(INTERACTIONS, make, 'DHEN, layers')
      outputs.append(make()(tokens.astype(self.dtype)))
    if self.projected:
      outputs = self._projected(name, outputs, tokens)
    widths = [output.shape[2] for output in outputs]
    width = tokens.shape[2] if self.residual else widths[0]
    if {*widths} != {width}:
      raise UserError(
        'interactions whose outputs are not projected must end at one width,'
        f' {width}',
        got=widths,
        where='DHEN, projected',
        hint='project them, or take interactions that return tokens',
      )
    vectors = self._combined(name, outputs)
    if self.residual:
      vectors = vectors + self._residual(name, tokens, vectors.shape[1])
    if self.norm:
      norm = nn.LayerNorm(use_fast_variance=False, name=f'{name}_norm')
      vectors = norm(vectors)
    return vectors

  def _combined(self, name: str, outputs: _Outputs) -> Vectors:
    """Returns the outputs of a layer, of one width, as its vectors."""
    choose(dict.fromkeys(COMBINE), self.combine, 'DHEN, combine')
    if self.combine == 'concat':
      return jnp.concatenate(outputs, axis=1)
    counts = [output.shape[1] for output in outputs]
    if len({*counts}) > 1:
      raise UserError(
        'interactions whose outputs are not projected must end in equally many'
        ' vectors to be summed',
        got=counts,
        where='DHEN, projected',
        hint="project them, or set combine to 'concat'",
      )
    weights = jnp.ones(len(outputs))
    if self.combine == 'weighted_sum':
      weights = self.param(
        f'{name}_weights', nn.initializers.ones, weights.shape
      )
    return sum(w * one for w, one in zip(weights, outputs, strict=True))

  def _projected(
    self, name: str, outputs: _Outputs, tokens: Tokens
  ) -> _Outputs:
    """Returns the outputs as tokens: all of a layer's, or about equal shares.

    Outputs that are tokens are mixed, as by `Linear`. Others are mapped by a
    matrix over all of their elements.
    """
    examples, count, dim = tokens.shape
    count = count if self.tokens is None else self.tokens
    shared = self.combine == 'concat'
    if shared and count < len(outputs):
      raise UserError(
        f'a layer must end in a token for each interaction, {len(outputs)}',
        got=count,
        where='DHEN, tokens',
        hint='take more tokens, or fewer interactions',
      )
    projected = []
    for place, output in enumerate(outputs):
      # Shares add up to the count.
      share = (count + place) // len(outputs) if shared else count
      own, cast = f'{name}_tokens_{place}', output.astype(self.dtype)
      if output.shape[2] == dim:
        projected.append(Linear(share, name=own)(cast))
      else:
        matrix = MLP((share * dim,), False, self.dtype, name=own)
        projected.append(matrix(flat(cast)).reshape(examples, share, dim))
    return projected

  def _residual(self, name: str, tokens: Tokens, count: int) -> Vectors:
    """Returns a layer's input as that many tokens."""
    if tokens.shape[1] == count:
      return tokens
    mixture = Linear(count, name=f'{name}_residual')
    return mixture(tokens.astype(self.dtype))
