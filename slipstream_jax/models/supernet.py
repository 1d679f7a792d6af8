"""A supernet: click models of all widths, depths, interactions and dims in one.

Each decision has a logit for each option. In training the outputs of its
options are weighted by a Gumbel softmax of these logits, drawn anew for each
example. Weights and logits are trained in turn, on different examples. Then
nets are sampled from the logits and trained from scratch (DNAS for CTR, Krishna
et al., arXiv 2110.14812). Two things are ours. The interaction is searched as
the input of the first layer above it. And the expected cost is that of the nets
that would be sampled, in closed form, where the paper takes that of the draws.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.models.dlrm import TokenModel
from slipstream_jax.models.embedding import stacked
from slipstream_jax.models.interactions import Tokens
from slipstream_jax.models.layers import side_by_side, summed_in_f32
from slipstream_jax.types import DenseFeatures, Embeddings

V = TypeVar('V')
Path = tuple[int, ...]
Logits = Mapping[str, Any]
"""Logits by decision: f32[options], and f32[T, options] of 'dims' for T tables,
arrays of JAX or numpy."""
ARCHITECTURE = 'architecture'
"""Name of the logits among the parameters of a supernet."""
_DIMS, _INTERACTION = 'dims', 'interaction'


class Space(NamedTuple):
  """The nets that a supernet contains."""

  interactions: tuple[tuple[str, Callable[..., nn.Module]], ...]
  """Name of each, and what `interaction_of` returns for it."""
  tables: tuple[int, ...]
  """Number of the table of each feature, from 0."""
  widths: tuple[int, ...] = (16, 32, 64)
  """Widths of hidden layers, at least 2, ascending."""
  bottom: int = 3
  """Most layers over the dense features, at least 2."""
  top: int = 4
  """Most layers over the interaction, with that of the logit, at least 2."""
  dims: tuple[int, ...] = (4, 8, 16)
  """Dims of tables, ascending. All rows of the supernet have the last one, in
  which `bottom` ends."""


class Net(NamedTuple):
  """One net of a space."""

  bottom: tuple[int, ...]
  """Widths of its `TokenModel.bottom`."""
  top: tuple[int, ...]
  """Widths of its `TokenModel.top`, without the logit's layer."""
  interaction: str
  """Its name in `Space.interactions`."""
  dims: tuple[int, ...]
  """Dim of each table."""


class Inputs(NamedTuple):
  """Sizes of the data, and features and FLOPs of each interaction by name."""

  dense: int
  """I, dense features."""
  rows: tuple[int, ...]
  """Rows of each table."""
  features: dict[str, int]
  """Features that an interaction returns."""
  flops: dict[str, float]
  """FLOPs of an interaction for an example, forward."""


class _Layer(NamedTuple):
  """A layer, which can compute each output from any of its inputs."""

  name: str
  inputs: tuple[int, ...]
  """Widths of its inputs."""
  outputs: tuple[int, ...]
  """Widths of its outputs."""
  skips: bool
  """Whether an output may be the input of the same place as it is. It is then
  the last option."""

  def decision(self, width: int) -> str:
    """Returns the decision of the output of this width.

    The first layer above the interaction has one for all: the interaction.
    """
    return _INTERACTION if self.name == 'top_0' else f'{self.name}_{width}'


def interaction_of(model: TokenModel) -> Callable[..., nn.Module]:
  """Returns a function that makes the interaction of a model as a module.

  Args:
    model: its `interact` counts, and the attributes that this reads.

  Raises:
    UserError: the model has more than an interaction and a head.
  """
  kind = type(model)
  if model.first_order or kind.beside is not TokenModel.beside:
    raise UserError(
      'a model to search must have nothing beside its interaction and its head',
      got=f'{kind.__name__}, which adds to the logit',
      where='interaction_of, model',
      hint='take DLRM, DCN, DHEN or a TokenModel of your own',
    )

  class Interaction(kind):  # type: ignore[valid-type, misc]
    """The interaction alone, with parameters as in the model."""

    @nn.compact
    def __call__(self, x: Float[jax.Array, 'B D'], tokens: Tokens) -> Any:
      """Returns features f32[B, W]."""
      return self.interact(x, tokens)

  given = {
    field.name: getattr(model, field.name)
    for field in dataclasses.fields(model)
    if field.init and field.name not in ('parent', 'name')
  }
  return functools.partial(Interaction, **given)


class Supernet(nn.Module):
  """All nets of a space, as one click model for `Recipe` and `Trainer`.

  In training it needs `rng`. Otherwise each decision takes the option with the
  largest logit, so that logits are those of one net.

  Attributes:
    space: its nets.
    steps: training steps in which the temperature falls.
    fall: natural logarithm by which it falls, from 1. The paper's is 0.1 to 0.2
      in each of 5 epochs.
    dtype: as in `TokenModel`.
  """

  space: Space
  steps: int
  fall: float = 0.75
  dtype: str = 'float32'

  @nn.compact
  def __call__(
    self,
    dense: DenseFeatures,
    embeddings: Embeddings,
    *,
    train: bool = False,
    rng: jax.Array | None = None,
  ) -> Float[jax.Array, ' B']:
    """Computes logits f32[B] of examples.

    Args:
      dense: dense features f32[B, I], or by name.
      embeddings: f32[B, D] by feature name, D the largest of the dims.
      train: whether options are drawn, and the temperature falls.
      rng: key of the draws.

    Raises:
      UserError: a setting of the space is invalid.
    """
    space, rows = self.space, stacked(embeddings, 'Supernet')
    _check(space, rows.shape)
    dense = side_by_side(dense)
    shares = self._shares(len(dense), train, rng)
    masks = np.arange(space.dims[-1]) < np.array(space.dims)[:, None]
    kept = shares[_DIMS] @ jnp.asarray(masks, jnp.float32)  # [B or 1, T, D]
    vectors = rows * kept[:, np.array(space.tables)]
    x = self._mlp('bottom', [dense], shares)
    tokens = jnp.concatenate([x[:, None], vectors], axis=1)
    features = [
      make(name=f'interaction_{place}')(x, tokens)
      for place, (_, make) in enumerate(space.interactions)
    ]
    return self._mlp('top', features, shares)[:, 0]

  def _shares(
    self, examples: int, train: bool, rng: jax.Array | None
  ) -> dict[str, Float[jax.Array, '...']]:
    """Returns what each option counts for: f32[B or 1, ..., options]."""
    shapes = decisions(self.space)
    logits = self.param(
      ARCHITECTURE,
      lambda _: {name: jnp.zeros(shape) for name, shape in shapes.items()},
    )
    taken = self.variable('search', 'steps', jnp.zeros, (), jnp.int32)
    if not train:
      return {
        name: jax.nn.one_hot(x.argmax(-1), x.shape[-1])[None]
        for name, x in logits.items()
      }
    temperature = jnp.exp(-self.fall * jnp.minimum(taken.value / self.steps, 1))
    taken.value += 1
    assert rng is not None
    keys = jax.random.split(rng, len(shapes))

    def drawn(key: jax.Array, x: jax.Array) -> jax.Array:
      noise = jax.random.gumbel(key, (examples, *x.shape))
      return jax.nn.softmax((x[None] + noise) / temperature)

    pairs = zip(keys, shapes, strict=True)
    return {name: drawn(key, logits[name]) for key, name in pairs}

  def _mlp(
    self,
    part: str,
    inputs: Sequence[Float[jax.Array, 'B _I']],
    shares: Mapping[str, Float[jax.Array, '...']],
  ) -> Float[jax.Array, 'B O']:
    """Returns the last output of 'bottom' or 'top'."""

    def through(layer: _Layer, place: int, x: jax.Array) -> list[jax.Array]:
      # One product for all outputs, each with the start that it has alone.
      x = nn.Dense(
        sum(layer.outputs),
        kernel_init=_side_by_side(layer, nn.initializers.glorot_normal()),
        bias_init=_side_by_side(layer, _bias),
        dtype=self.dtype,
        dot_general=summed_in_f32,
        name=f'{layer.name}_{place}',
      )(x)
      if part == 'bottom' or layer.outputs != (1,):
        x = nn.relu(x)
      return jnp.split(x, np.cumsum(layer.outputs)[:-1], axis=1)

    def mixed(name: str, options: list[jax.Array]) -> jax.Array:
      share = shares[name]
      parts = [share[:, i, None] * x for i, x in enumerate(options)]
      return functools.reduce(jnp.add, parts)

    layers = _layers(self.space, part, [x.shape[1] for x in inputs])
    return _fold(layers, inputs, through, mixed)


def _bias(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
  """Returns the start of a bias [O] in `MLP`."""
  return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5


def _side_by_side(
  layer: _Layer, init: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
  """Returns a function that makes the start of each output by itself."""

  def start(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    keys = jax.random.split(key, len(layer.outputs))
    parts = [
      init(own, (*shape[:-1], width), dtype)
      for own, width in zip(keys, layer.outputs, strict=True)
    ]
    return jnp.concatenate(parts, axis=-1)

  return start


def decisions(space: Space) -> dict[str, tuple[int, ...]]:
  """Returns the shape of the logits of each decision."""
  dims = 1 + max(space.tables), len(space.dims)
  shapes: dict[str, tuple[int, ...]] = {_DIMS: dims}
  for part, count in (('bottom', 1), ('top', len(space.interactions))):
    for layer in _layers(space, part, [0] * count):
      options = len(layer.inputs) + layer.skips
      names = map(layer.decision, layer.outputs)
      shapes |= {name: (options,) for name in names if options > 1}
  return shapes


def sampled(space: Space, logits: Logits, rng: np.random.Generator) -> Net:
  """Returns a net, each decision of which is drawn with its probabilities.

  Logits of zero make all options equally probable.
  """
  picks = {
    name: (np.asarray(logits[name]) + rng.gumbel(size=shape)).argmax(-1)
    for name, shape in decisions(space).items()
  }
  return _net(space, picks)


def likeliest(space: Space, logits: Logits) -> Net:
  """Returns the net that a supernet with these logits computes as a model."""
  picks = {
    name: np.asarray(logits[name]).argmax(-1) for name in decisions(space)
  }
  return _net(space, picks)


def _net(space: Space, picks: Mapping[str, Any]) -> Net:
  """Returns the net with these options, by decision."""

  def through(layer: _Layer, place: int, path: Path) -> list[Path]:
    return [(*path, width) for width in layer.outputs]

  def chosen(name: str, options: list[Path]) -> Path:
    return options[picks[name]]

  none: Path = ()
  bottom = _fold(_layers(space, 'bottom', [0]), [none], through, chosen)
  starts: list[Path] = [(place,) for place in range(len(space.interactions))]
  layers = _layers(space, 'top', [0] * len(starts))
  place, *top, _ = _fold(layers, starts, through, chosen)
  dims = tuple(space.dims[pick] for pick in picks[_DIMS])
  return Net(bottom, tuple(top), space.interactions[place][0], dims)


def inputs_of(space: Space, dense: int, rows: Sequence[int]) -> Inputs:
  """Returns sizes of data, and features and FLOPs of each interaction.

  FLOPs are those that XLA counts in a forward pass before it optimizes.

  Args:
    space: its interactions.
    dense: I, dense features.
    rows: rows of each table.
  """
  size, dim = 64, space.dims[-1]
  x = jax.ShapeDtypeStruct((size, dim), jnp.float32)
  tokens = jax.ShapeDtypeStruct((size, 1 + len(space.tables), dim), jnp.float32)
  features, flops = {}, {}
  for name, make in space.interactions:
    module = make()
    variables = jax.eval_shape(
      lambda *given, own=module: own.init(jax.random.key(0), *given), x, tokens
    )
    lowered = jax.jit(module.apply).lower(variables, x, tokens)
    cost: Any = lowered.cost_analysis()
    features[name] = lowered.out_info.shape[1]
    flops[name] = float(cost.get('flops', 0)) / size
  return Inputs(dense, tuple(rows), features, flops)


def cost_of(inputs: Inputs, net: Net) -> tuple[float, int]:
  """Returns a net's FLOPs for an example, forward, and elements of its tables.

  A layer from I to O has 2 I O FLOPs.
  """
  widths = [inputs.dense, *net.bottom]
  above = [inputs.features[net.interaction], *net.top, 1]
  pairs = [*itertools.pairwise(widths), *itertools.pairwise(above)]
  flops = inputs.flops[net.interaction] + sum(2 * i * o for i, o in pairs)
  elements = zip(inputs.rows, net.dims, strict=True)
  return flops, sum(rows * dim for rows, dim in elements)


def flops_of(space: Space, inputs: Inputs) -> float:
  """Returns the FLOPs of the supernet for an example, as those of `cost_of`."""
  names = [name for name, _ in space.interactions]
  sides = {
    'bottom': [inputs.dense],
    'top': [inputs.features[name] for name in names],
  }
  products = sum(
    sum(layer.inputs) * sum(layer.outputs)
    for part, widths in sides.items()
    for layer in _layers(space, part, widths)
  )
  return 2 * products + sum(inputs.flops[name] for name in names)


def expected_cost(
  space: Space, inputs: Inputs, logits: Logits
) -> tuple[Float[jax.Array, ''], Float[jax.Array, '']]:
  """Returns the mean of `cost_of` over sampled nets, exactly.

  Decisions are independent and costs are sums, so the mean passes through the
  layers as their values do.
  """
  shares = {name: jax.nn.softmax(x) for name, x in logits.items()}

  def through(layer: _Layer, place: int, cost: jax.Array) -> list[jax.Array]:
    inputs = layer.inputs[place]
    return [cost + 2 * inputs * width for width in layer.outputs]

  def mean(name: str, options: list[jax.Array]) -> jax.Array:
    return shares[name] @ jnp.stack(options)

  names, zero = [name for name, _ in space.interactions], jnp.zeros(())
  below = _fold(_layers(space, 'bottom', [inputs.dense]), [zero], through, mean)
  flops = _fold(
    _layers(space, 'top', [inputs.features[name] for name in names]),
    [below + inputs.flops[name] for name in names],
    through,
    mean,
  )
  dims = shares[_DIMS] @ jnp.array(space.dims, jnp.float32)
  return flops, jnp.array(inputs.rows, jnp.float32) @ dims


def _layers(space: Space, part: str, inputs: Sequence[int]) -> list[_Layer]:
  """Returns the layers of 'bottom' or 'top'.

  `inputs` are the widths of the first layer's inputs.
  """
  count, end = (
    (space.bottom, space.dims[-1]) if part == 'bottom' else (space.top, 1)
  )
  layers, before = [], tuple(inputs)
  for number in range(count):
    last = number == count - 1
    widths = (end,) if last else space.widths
    # A layer can be left out where its inputs have the widths of its outputs.
    skips = number > 0 and not last
    layers.append(_Layer(f'{part}_{number}', before, widths, skips))
    before = widths
  return layers


def _fold(
  layers: Sequence[_Layer],
  inputs: Sequence[V],
  through: Callable[[_Layer, int, V], list[V]],
  choose: Callable[[str, list[V]], V],
) -> V:
  """Computes the value of the last output from those of the first inputs.

  Args:
    layers: from first to last.
    inputs: values of the first layer's inputs.
    through: a layer, the place of an input, and the input's value, to the value
      that each output would have of it.
    choose: a decision and the values of its options, to the output's value.
  """
  values = [*inputs]
  for layer in layers:
    of_inputs = [through(layer, *pair) for pair in enumerate(values)]
    outputs = []
    for place, width in enumerate(layer.outputs):
      options = [own[place] for own in of_inputs]
      if layer.skips:
        options.append(values[place])
      if len(options) > 1:
        outputs.append(choose(layer.decision(width), options))
      else:
        outputs += options
    values = outputs
  (value,) = values
  return value


def _check(space: Space, rows: tuple[int, ...]) -> None:
  for name in ('bottom', 'top'):
    check_whole(getattr(space, name), 2, f'Space.{name}', 'give a few layers')
  for name, least in (('widths', 2), ('dims', 1)):
    given = getattr(space, name)
    if not given or list(given) != sorted({*given}) or given[0] < least:
      raise UserError(
        f'{name} must be whole numbers of at least {least}, ascending',
        got=list(given),
        where=f'Space.{name}',
        hint='give each once, such as (4, 8, 16)',
      )
  if len(rows) != 3 or rows[1:] != (len(space.tables), space.dims[-1]):
    raise UserError(
      f'a supernet needs {len(space.tables)} pooled embeddings of dim'
      f' {space.dims[-1]}, a table number for each',
      got=list(rows[1:]),
      where='Supernet, embeddings',
      hint='let all tables have the largest of the dims',
    )
