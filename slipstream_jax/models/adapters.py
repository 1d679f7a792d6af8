"""Turns any model into two pure functions: Flax linen, Flax nnx, or functions.

A model is called with dense features and with embeddings by name. It also gets
those of the keywords `train`, `weights`, `real` and `rng` that its signature
names.
"""

from collections.abc import Callable, Mapping
import inspect
import sys
from typing import Any, NamedTuple

from flax import errors as flax_errors
from flax import linen as nn
import jax

from slipstream_jax.errors import UserError

Params = Any
ModelState = dict[str, Any]


class Inputs(NamedTuple):
  """What a model may be called with."""

  dense: Any
  """Dense features, [B, I] or by name."""
  embeddings: Any
  """Embeddings by feature name."""
  keywords: Mapping[str, Any]
  """`train`, `weights`, `real` and `rng`."""


class Functions(NamedTuple):
  """A model of two pure functions. A plain pair of them is one as well."""

  init: Callable[..., Any]
  """Maps (key, dense, embeddings) to parameters, any tree of arrays. With
  `has_state` it returns (parameters, state)."""
  apply: Callable[..., Any]
  """Maps (parameters, dense, embeddings) to logits. With `has_state` it maps
  (parameters, state, dense, embeddings) to (logits, state)."""
  has_state: bool = False
  """Whether there is a state that only training steps change."""


class PureModel(NamedTuple):
  """A model as the functions that a step calls."""

  name: str
  """Name of the model, for errors."""
  init: Callable[[jax.Array, Inputs], tuple[Params, ModelState]]
  """Maps a key and inputs to parameters and state. A model without state has
  {}."""
  apply: Callable[[Params, ModelState, Inputs], tuple[Any, ModelState]]
  """Maps parameters, state and inputs to logits and state. The state changes
  only if the keyword `train` is true. `rng` is then the step's key."""


def adapt(model: Any) -> PureModel:
  """Returns the model as pure functions.

  Raises:
    UserError: it is no model, or takes no embeddings. Its functions also raise
      it when the model asks for a feature that does not exist.
  """
  if isinstance(model, PureModel):
    return model
  pure = _pure_model(model)
  return pure._replace(
    init=_naming_features(pure.name, pure.init),
    apply=_naming_features(pure.name, pure.apply),
  )


class _FeatureDict(dict[str, Any]):
  """Features by name. A missing one raises an error that lists them."""

  def __init__(self, what: str, name: str, features: Mapping[str, Any]) -> None:
    super().__init__(features)
    self._what, self._name = what, name

  def __missing__(self, key: object) -> Any:
    raise UserError(
      f'a model can ask only for {self._what} that exist,'
      f' {", ".join(map(repr, self)) or "none"}',
      got=repr(key),
      where=self._name,
      hint='give such a feature, or correct the name in the model',
    )


def _naming_features(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function with errors that name a missing feature."""

  def called(*arguments: Any) -> Any:
    *others, inputs = arguments
    dense, embeddings, keywords = inputs
    try:
      return call(*arguments)
    except TypeError as error:
      if isinstance(dense, dict) or 'string index' not in str(error):
        raise
      raise UserError(
        'a model that asks for dense features by name must get them by name',
        got='one array' if dense.shape[1] else 'none',
        where=name,
        hint="give them as a dict of columns, such as {'age': ages}",
      ) from error
    except KeyError as error:
      # The error does not say which dict lacked the key. It may be one of the
      # model's own, so the model is called again with dicts that do say. They
      # are not used at first, because JAX takes only plain dicts as trees.
      if isinstance(dense, dict):
        dense = _FeatureDict('dense features', name, dense)
      embeddings = _FeatureDict('embeddings of features', name, embeddings)
      real = _FeatureDict('lookups of features', name, keywords['real'])
      try:
        call(*others, Inputs(dense, embeddings, {**keywords, 'real': real}))
      except UserError as said:
        raise said from error
      except Exception:  # another failure does not explain the first one
        raise error from None
      raise

  return called


def _pure_model(model: Any) -> PureModel:
  if isinstance(model, nn.Module):
    return _linen(model)
  # Importing it takes a second. The user of such a model has done so.
  nnx = sys.modules.get('flax.nnx')
  if nnx is not None and isinstance(model, nnx.Module):
    return _nnx(nnx, model)
  if isinstance(model, tuple) and len(model) in (2, 3):
    functions = Functions(*model)
    if callable(functions.init) and callable(functions.apply):
      return _functions(functions)
  raise UserError(
    'a model must be a Flax module, linen or nnx, or a pair of functions, init'
    ' and apply',
    got=f'a {type(model).__name__}',
    where='Trainer, model',
    hint='give an instance such as DLRM(), not its class, or'
    ' Functions(init, apply)',
  )


def _linen(model: nn.Module) -> PureModel:
  name = type(model).__name__
  arguments = _arguments(type(model).__call__, 1, name)

  def init(key: jax.Array, inputs: Inputs) -> tuple[Params, ModelState]:
    args, named = arguments(inputs)
    state = dict(model.init(key, *args, **named))
    return state.pop('params', {}), state

  def apply(
    params: Params, state: ModelState, inputs: Inputs
  ) -> tuple[Any, ModelState]:
    args, named = arguments(inputs)
    variables = {**state, 'params': params}
    if not inputs.keywords['train']:
      try:
        return model.apply(variables, *args, **named), state
      except flax_errors.InvalidRngError as error:
        raise UserError(
          'a model must draw nothing outside of training, so that predictions'
          ' are the same each time',
          got='a draw, such as that of dropout',
          where=name,
          hint='let it take `train`, and write'
          ' nn.Dropout(rate, deterministic=not train)',
        ) from error
    # All other streams that a model draws from fall back on `params`.
    rng = inputs.keywords['rng']
    rngs = {'params': rng, 'dropout': rng}
    logits, changed = model.apply(
      variables, *args, mutable=list(state), rngs=rngs, **named
    )
    return logits, {**state, **changed}

  return PureModel(name, init, apply)


def _nnx(nnx: Any, model: Any) -> PureModel:
  """Converts an nnx module, which was made with its parameters and seed.

  Variables other than `nnx.Param` are state, except random keys, which each
  step makes.
  """
  name = type(model).__name__
  arguments = _arguments(type(model).__call__, 1, name)
  graph, *parts = nnx.split(model, nnx.Param, nnx.RngState, ...)

  def init(key: jax.Array, inputs: Inputs) -> tuple[Params, ModelState]:
    del key, inputs
    return _pure(nnx, parts[0]), _in_state(_pure(nnx, parts[2]))

  def apply(
    params: Params, state: ModelState, inputs: Inputs
  ) -> tuple[Any, ModelState]:
    args, named = arguments(inputs)
    train, rngs = inputs.keywords['train'], parts[1]
    if train:
      rngs = _reseeded(nnx, rngs, inputs.keywords['rng'])
    whole = nnx.merge(
      graph,
      _filled(nnx, parts[0], params),
      rngs,
      _filled(nnx, parts[2], state.get('state', {})),
    )
    (whole.train if train else whole.eval)()
    logits = whole(*args, **named)
    if not train:
      return logits, state
    rest = nnx.split(whole, nnx.Param, nnx.RngState, ...)[3]
    return logits, _in_state(_pure(nnx, rest))

  return PureModel(name, init, apply)


def _in_state(state: Any) -> ModelState:
  return {'state': state} if state else {}


def _pure(nnx: Any, state: Any) -> Any:
  """Converts an nnx.State to dicts of arrays with text keys, as files need."""

  def named(tree: Any) -> Any:
    if not isinstance(tree, dict):
      return tree
    return {str(key): named(value) for key, value in tree.items()}

  return named(nnx.to_pure_dict(state))


def _filled(nnx: Any, like: Any, pure: dict[str, Any]) -> Any:
  """Returns an nnx.State like `like` with the values of `_pure`'s dicts."""
  state = jax.tree.map(lambda leaf: leaf, like)  # a copy, which is filled
  nnx.replace_by_pure_dict(state, pure)
  return state


def _reseeded(nnx: Any, rngs: Any, key: jax.Array) -> Any:
  """Restarts each random stream from a key of its own."""
  flat = []
  for number, (path, variable) in enumerate(nnx.to_flat_state(rngs)):
    value = variable.get_value()
    if isinstance(variable, nnx.RngKey):
      own = jax.random.fold_in(key, number)
      value = jax.random.split(own, value.shape) if value.shape else own
    else:
      value = value * 0
    flat.append((path, variable.replace(value)))
  return nnx.from_flat_state(flat)


def _functions(model: Functions) -> PureModel:
  arguments = _arguments(
    model.apply, 2 if model.has_state else 1, 'Functions.apply'
  )
  start = _arguments(model.init, 1, 'Functions.init')

  def init(key: jax.Array, inputs: Inputs) -> tuple[Params, ModelState]:
    args, named = start(inputs)
    params = model.init(key, *args, **named)
    if not model.has_state:
      return params, {}
    params, state = params
    return params, {'state': state}

  def apply(
    params: Params, state: ModelState, inputs: Inputs
  ) -> tuple[Any, ModelState]:
    args, named = arguments(inputs)
    if not model.has_state:
      return model.apply(params, *args, **named), state
    logits, new = model.apply(params, state['state'], *args, **named)
    return logits, {'state': new} if inputs.keywords['train'] else state

  return PureModel('the model', init, apply)


def _arguments(
  call: Callable[..., Any], leading: int, name: str
) -> Callable[[Inputs], tuple[tuple[Any, ...], dict[str, Any]]]:
  """Returns a function from inputs to the arguments that a signature names.

  After the `leading` parameters come dense features and embeddings, under any
  name. If `embeddings` is the first of them, or there is only one, the model
  gets no dense features, unless it also names `dense`.
  """
  signature = inspect.signature(call)
  own = list(signature.parameters.values())[leading:]
  positional = [
    one.name
    for one in own
    if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
  ]
  some = [one for one in own if one.kind is one.VAR_POSITIONAL]
  if not positional and not some:
    raise UserError(
      'a model must take embeddings',
      got=f'{signature}',
      where=name,
      hint='let it take dense features and embeddings, in this order',
    )
  alone = positional[:1] == ['embeddings'] or (
    len(positional) == 1 and not some
  )
  bound = 1 if alone else 2
  named = {one.name for one in own} - {*positional[:bound]}

  def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dense, embeddings, keywords = inputs
    offered = {**keywords, 'dense': dense} if alone else keywords
    wanted = {key: offered[key] for key in offered if key in named}
    return ((embeddings,) if alone else (dense, embeddings)), wanted

  return arguments
