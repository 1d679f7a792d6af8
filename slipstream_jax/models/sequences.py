"""SASRec and HSTU: causal blocks over a history, and a candidate.

Each step of a sequence is one vector, the sum of its features' rows. Blocks
turn the history, all steps but the last, into states. A state depends on its
own step and on earlier ones. The state of the last step of the history meets
the last step of the sequence, the candidate, whose click is predicted. A model
of next items learns which candidate of the batch comes next, as `TwoTower` does
(`towers.py`): the state is the user's vector, and the candidate the item's.

Padding may stand anywhere. A step without a lookup is no step: the others are
numbered without it. Dropout, of which both papers have some, is left out.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from slipstream_jax.errors import UserError
from slipstream_jax.models.embedding import stacked
from slipstream_jax.models.layers import MLP, split_off, widths_to_logit
from slipstream_jax.models.towers import against_batch
from slipstream_jax.types import DenseFeatures, Embeddings, RealLookups

Steps = Float[jax.Array, 'B H D']
There = Bool[jax.Array, 'B H']
"""Which steps are there, rather than padding."""
Places = Int[jax.Array, 'B H']
"""Number of each step among those that are there, from 0 on."""
Times = Float[jax.Array, 'B H']

_BUCKETS = 128  # of the logarithms of time differences
_BUCKET = 0.301  # width of a bucket, the log10 of 2
_norm = functools.partial(nn.LayerNorm, use_fast_variance=False)


class SASRecBlock(nn.Module):
  """Attention to earlier steps, then two layers (arXiv 1808.09781).

  Attributes:
    heads: number of heads. It must divide D.
  """

  heads: int = 1

  @nn.compact
  def __call__(self, x: Steps, there: There) -> Steps:
    """Returns f32[B, H, D]."""
    dim = x.shape[2]
    query = nn.Dense(dim, name='query')(_norm(name='norm')(x))
    key, value = (nn.Dense(dim, name=name)(x) for name in ('key', 'value'))
    query, key, value = (
      _split(one, self.heads, type(self).__name__)
      for one in (query, key, value)
    )
    scores = jnp.einsum('bitd,bjtd->btij', query, key)
    scores *= (dim // self.heads) ** -0.5
    allowed = _earlier(there)
    shares = nn.softmax(jnp.where(allowed, scores, -1e30))
    # A step of padding at the start may look at nothing.
    shares = jnp.where(allowed, shares, 0.0)
    mixed = jnp.einsum('btij,bjtd->bitd', shares, value).reshape(x.shape)
    x = x + mixed
    hidden = nn.relu(nn.Dense(dim, name='first')(_norm(name='norm_2')(x)))
    return x + nn.Dense(dim, name='second')(hidden)


class HSTUBlock(nn.Module):
  """Pointwise attention to earlier steps (arXiv 2402.17152).

  Weights are SiLU(q . k + position + time) / H in place of a softmax. The
  position's part depends on how many steps lie between two steps, and the
  time's part on the logarithm of the time between them.

  Attributes:
    heads: number of heads. It must divide D.
  """

  heads: int = 1

  @nn.compact
  def __call__(
    self, x: Steps, there: There, places: Places, times: Times | None = None
  ) -> Steps:
    """Returns f32[B, H, D]. Without times, weights depend on places alone."""
    examples, steps, dim = x.shape
    normed = _norm(name='norm')(x)
    parts = nn.silu(nn.Dense(4 * dim, use_bias=False, name='parts')(normed))
    gate, value, query, key = jnp.split(parts, 4, axis=2)
    value, query, key = (
      _split(one, self.heads, type(self).__name__)
      for one in (value, query, key)
    )
    start = nn.initializers.normal(0.02)
    between = places[:, :, None] - places[:, None, :]
    bias = self.param('place', start, (steps,))[jnp.clip(between, 0, steps - 1)]
    if times is not None:
      passed = jnp.abs(times[:, :, None] - times[:, None, :])
      bucket = jnp.log(jnp.maximum(passed, 1.0)) / _BUCKET
      bucket = jnp.clip(bucket.astype(jnp.int32), 0, _BUCKETS)
      bias += self.param('time', start, (_BUCKETS + 1,))[bucket]
    scores = jnp.einsum('bitd,bjtd->btij', query, key) + bias[:, None]
    weights = jnp.where(_earlier(there), nn.silu(scores) / steps, 0.0)
    mixed = jnp.einsum('btij,bjtd->bitd', weights, value)
    mixed = _norm(name='norm_2')(mixed.reshape(examples, steps, dim))
    return x + nn.Dense(dim, name='out')(mixed * gate)


def _split(x: Steps, heads: int, name: str) -> Float[jax.Array, 'B H T _']:
  """Splits vectors into heads.

  Raises:
    UserError: the heads do not divide D.
  """
  if x.shape[2] % heads:
    raise UserError(
      f'the heads of attention must divide the dim of the tables, {x.shape[2]}',
      got=heads,
      where=f'{name}.heads',
      hint='take a divisor, or change the dim',
    )
  return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def _earlier(there: There) -> Bool[jax.Array, 'B 1 H H']:
  """Returns which steps j a step i may look at: there, and not after i."""
  causal = jnp.tril(jnp.ones((there.shape[1],) * 2, bool))
  return (causal[None] & there[:, None, :])[:, None]


class SequenceModel(nn.Module):
  """Click model over sequences: steps of history, the candidate last.

  By itself it has no blocks: the last step of the history is its own state.

  Attributes:
    blocks: number of blocks.
    heads: heads of each block. They must divide D.
    top: layer widths over state, candidate, their product and the dense
      features, up to the logit. If empty, the logit is the dot product of state
      and candidate, as in the papers.
    times: the dense feature [B, L] with the time of each step, by name, or by
      the number of its first column. `top` does not see it. None: no times.
      SASRec has no use for them.
    next_item: whether to learn which item comes next, on positive examples
      alone, against the candidates of all other examples of the batch. `top`
      must then be empty.
    log_q: as in `TwoTower`, for a model of next items.
  """

  blocks: int = 2
  heads: int = 1
  top: Sequence[int] = (64,)
  times: str | int | None = None
  next_item: bool = False
  log_q: str | int | None = None

  @property
  def over_batch(self) -> bool:
    """Whether the loss of an example depends on the whole batch."""
    return self.next_item

  @nn.compact
  def __call__(
    self,
    dense: DenseFeatures,
    embeddings: Embeddings,
    *,
    real: RealLookups | None = None,
    train: bool = False,
    weights: Float[jax.Array, ' B'] | None = None,
    side: str | None = None,
  ) -> Float[jax.Array, ' B'] | Float[jax.Array, 'B D']:
    """Computes logits f32[B] of sequences.

    Args:
      dense: f32[B, I], or by name.
      embeddings: f32[B, L, D] by feature name. Pooled ones are refused.
      real: bool[B, L] by feature name, False for padding. None: all True.
      train: whether a model of next items computes log odds against the batch.
      weights: each example's weight in the loss, f32[B]. None: all 1.
      side: 'users' or 'items' returns states or candidates, f32[B, D].

    Raises:
      UserError: the examples are not sequences, the features differ in dim or
        length, the heads do not divide the dim, there are no such times, or
        a model of next items has layers on top.
    """
    name = type(self).__name__
    if self.next_item and self.top:
      raise UserError(
        'a model of next items scores by products alone, so top must be empty',
        got=list(self.top),
        where=f'{name}.top',
        hint='set top=(), or leave next_item out',
      )
    rows = stacked(embeddings, name)
    if rows.ndim != 4 or rows.shape[2] < 2:
      raise UserError(
        'the model needs sequences of a history and a candidate, [B, L, D]',
        got=[rows.shape[0], *rows.shape[2:]],
        where=f'{name}, embeddings',
        hint="take DLRM for pooled rows, or features with combiner 'none'",
      )
    there = jnp.ones((rows.shape[0], rows.shape[2]), bool)
    if real is not None:
      there = jnp.stack([real[key] for key in embeddings], axis=1).any(axis=1)
    steps = jnp.where(there[..., None], rows.sum(axis=1), 0.0)
    history, known, candidate = steps[:, :-1], there[:, :-1], steps[:, -1]
    others, times = split_off(
      dense, self.times, there.shape[1], f'{name}, times'
    )
    times = None if times is None else times[:, :-1]
    states = self.states(history, known, times)
    # The last step of the history that is there. Without one, the state is 0.
    number = jnp.arange(known.shape[1])[None]
    last = jnp.argmax(jnp.where(known, number + 1, 0), axis=1)
    state = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
    state = jnp.where(known.any(axis=1)[:, None], state, 0.0)
    if side is not None:
      return state if side == 'users' else candidate
    if self.next_item and train:
      _, log_q = split_off(dense, self.log_q, 1, f'{name}, log_q')
      return against_batch(state @ candidate.T, log_q, weights)
    product = state * candidate
    if not self.top:
      return product.sum(axis=1)
    joined = [state, candidate, product, others]
    sizes = widths_to_logit(self.top, f'{name}.top')
    top = MLP(sizes, activate_last=False, name='top')
    return top(jnp.concatenate(joined, axis=1))[:, 0]

  def states(self, history: Steps, there: There, times: Times | None) -> Steps:
    """Computes the state of each step of the history, f32[B, H, D]."""
    del there, times
    return history


class SASRec(SequenceModel):
  """Self-attentive sequential recommendation (arXiv 1808.09781).

  `SequenceModel` has its attributes.
  """

  def states(self, history: Steps, there: There, times: Times | None) -> Steps:
    """Computes the state of each step of the history, f32[B, H, D]."""
    del times
    shape = history.shape[1:]
    positions = self.param('position', nn.initializers.normal(0.02), shape)
    x = history * shape[1] ** 0.5 + positions[_places(there)]
    for number in range(self.blocks):
      x = SASRecBlock(self.heads, name=f'block_{number}')(x, there)
    return _norm(name='norm')(x)


class HSTU(SequenceModel):
  """Hierarchical sequential transduction unit (arXiv 2402.17152).

  `SequenceModel` has its attributes. In the authors' code a step's weights use
  the time of the next step. Here they use its own.
  """

  def states(self, history: Steps, there: There, times: Times | None) -> Steps:
    """Computes the state of each step of the history, f32[B, H, D]."""
    x: Any = history
    for number in range(self.blocks):
      block = HSTUBlock(self.heads, name=f'block_{number}')
      x = block(x, there, _places(there), times)
    return x


def _places(there: There) -> Places:
  """Numbers the steps that are there. Padding has its predecessor's number."""
  return jnp.maximum(jnp.cumsum(there.astype(jnp.int32), axis=1) - 1, 0)
