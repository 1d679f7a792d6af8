"""Adapts any model to two pure functions: Flax linen, Flax nnx, or functions.

A model gets dense features and embeddings by name. It also gets those of the
keywords `train`, `weights`, `real` and `rng` that its signature names.
"""

from collections.abc import Callable, Mapping
import inspect
import sys
from typing import Any, NamedTuple

from flax import errors as flax_errors
from flax import linen as nn
import jax

from slipstream_jax.errors import UserError

Keywords = Mapping[str, Any]
Params = Any
ModelState = dict[str, Any]


class Functions(NamedTuple):
  """A model of two pure functions. A plain pair of them will do, too."""

  init: Callable[..., Any]
  """Maps (key, dense, embeddings) to parameters, a tree of arrays. With
  `has_state`, to (parameters, state)."""
  apply: Callable[..., Any]
  """Maps (parameters, dense, embeddings) to logits. With `has_state`, maps
  (parameters, state, dense, embeddings) to (logits, state)."""
  has_state: bool = False
  """Whether there is a state, which only training steps change."""


class Adapted(NamedTuple):
  """A model as a step calls it."""

  name: str
  """Name of the model, for errors."""
  init: Callable[[jax.Array, Any, Any, Keywords], tuple[Params, ModelState]]
  """Maps (key, dense, embeddings, keywords) to parameters and state, {} if
  there is none."""
  apply: Callable[..., tuple[Any, ModelState]]
  """Maps (parameters, state, dense, embeddings, keywords) to logits and state.
  The state changes only with the keyword `train`. `rng` is then the step's
  key."""


def adapt(model: Any) -> Adapted:
  """Returns the model as pure functions.

  Raises:
    UserError: it is not a known kind of model, or takes no embeddings. The
      functions raise it if the model asks for a feature that does not exist.
  """
  adapted = _adapted(model)
  return adapted._replace(
    init=_naming_features(adapted.name, adapted.init),
    apply=_naming_features(adapted.name, adapted.apply),
  )


class _Features(dict[str, Any]):
  """Features by name. A missing one raises an error that names all."""

  def __init__(self, what: str, name: str, features: Mapping[str, Any]) -> None:
    super().__init__(features)
    self._what, self._name = what, name

  def __missing__(self, key: object) -> Any:
    raise UserError(
      f'a model can ask only for {self._what} that there are,'
      f' {", ".join(map(repr, self)) or "none"}',
      got=repr(key),
      where=self._name,
      hint='give such a feature, or correct the name in the model',
    )


def _naming_features(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function with better errors for features that do not exist."""

  def explained(*arguments: Any) -> Any:
    try:
      return call(*arguments)
    except TypeError as error:
      dense = arguments[-3]
      if isinstance(dense, dict) or 'string index' not in str(error):
        raise
      raise UserError(
        'a model that asks for dense features by name must get them by name',
        got='one array' if dense.shape[1] else 'none',
        where=name,
        hint="give them as a dict of columns, such as {'age': ages}",
      ) from error
    except KeyError as error:
      # The missing key may be of one of the model's own dicts. So the model is
      # called again, with features that raise an error of their own. JAX would
      # not take these as trees, so the first call has plain dicts.
      *others, dense, embeddings, keywords = arguments
      if isinstance(dense, dict):
        dense = _Features('dense features', name, dense)
      real = _Features('lookups of features', name, keywords['real'])
      again = (
        dense,
        _Features('embeddings of features', name, embeddings),
        {**keywords, 'real': real},
      )
      try:
        call(*others, *again)
      except UserError as explanation:
        raise explanation from error
      except Exception:  # an unrelated error of the second call
        raise error from None
      raise

  return explained


def _adapted(model: Any) -> Adapted:
  if isinstance(model, nn.Module):
    return _linen(model)
  # Not imported here, because it takes a second. Users of nnx have imported it.
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


def _linen(model: nn.Module) -> Adapted:
  name = type(model).__name__
  arguments = _arguments(type(model).__call__, 1, name)

  def init(
    key: jax.Array, dense: Any, embeddings: Any, keywords: Keywords
  ) -> tuple[Params, ModelState]:
    args, named = arguments(dense, embeddings, keywords)
    state = dict(model.init(key, *args, **named))
    return state.pop('params', {}), state

  def apply(
    params: Params,
    state: ModelState,
    dense: Any,
    embeddings: Any,
    keywords: Keywords,
  ) -> tuple[Any, ModelState]:
    args, named = arguments(dense, embeddings, keywords)
    variables = {**state, 'params': params}
    if not keywords['train']:
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
    # All other streams fall back on the first.
    rngs = {'params': keywords['rng'], 'dropout': keywords['rng']}
    logits, changed = model.apply(
      variables, *args, mutable=list(state), rngs=rngs, **named
    )
    return logits, {**state, **changed}

  return Adapted(name, init, apply)


def _nnx(nnx: Any, model: Any) -> Adapted:
  """Adapts an nnx module, whose own values are the initial parameters.

  All variables but `nnx.Param` and random keys are state. Random keys are made
  anew in each step.
  """
  name = type(model).__name__
  arguments = _arguments(type(model).__call__, 1, name)
  graph, *parts = nnx.split(model, nnx.Param, nnx.RngState, ...)

  def init(
    key: jax.Array, dense: Any, embeddings: Any, keywords: Keywords
  ) -> tuple[Params, ModelState]:
    del key, dense, embeddings, keywords
    return _pure(nnx, parts[0]), _in_state(_pure(nnx, parts[2]))

  def apply(
    params: Params,
    state: ModelState,
    dense: Any,
    embeddings: Any,
    keywords: Keywords,
  ) -> tuple[Any, ModelState]:
    args, named = arguments(dense, embeddings, keywords)
    rngs = parts[1]
    if keywords['train']:
      rngs = _reseeded(nnx, rngs, keywords['rng'])
    whole = nnx.merge(
      graph,
      _filled(nnx, parts[0], params),
      rngs,
      _filled(nnx, parts[2], state.get('state', {})),
    )
    (whole.train if keywords['train'] else whole.eval)()
    logits = whole(*args, **named)
    if not keywords['train']:
      return logits, state
    rest = nnx.split(whole, nnx.Param, nnx.RngState, ...)[3]
    return logits, _in_state(_pure(nnx, rest))

  return Adapted(name, init, apply)


def _in_state(state: Any) -> ModelState:
  return {'state': state} if state else {}


def _pure(nnx: Any, state: Any) -> dict[str, Any]:
  """Returns an nnx.State as dicts of arrays with text as keys, for files."""

  def named(tree: Any) -> Any:
    if not isinstance(tree, dict):
      return tree
    return {str(key): named(value) for key, value in tree.items()}

  pure: dict[str, Any] = named(nnx.to_pure_dict(state))
  return pure


def _filled(nnx: Any, like: Any, pure: dict[str, Any]) -> Any:
  """Returns an nnx.State like `like` with the values of `_pure`."""
  state = jax.tree.map(lambda leaf: leaf, like)  # a copy
  nnx.replace_by_pure_dict(state, pure)
  return state


def _reseeded(nnx: Any, rngs: Any, key: jax.Array) -> Any:
  """Returns the random state with every stream started from its own key."""
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


def _functions(model: Functions) -> Adapted:
  arguments = _arguments(
    model.apply, 2 if model.has_state else 1, 'Functions.apply'
  )
  start = _arguments(model.init, 1, 'Functions.init')

  def init(
    key: jax.Array, dense: Any, embeddings: Any, keywords: Keywords
  ) -> tuple[Params, ModelState]:
    args, named = start(dense, embeddings, keywords)
    params = model.init(key, *args, **named)
    if not model.has_state:
      return params, {}
    params, state = params
    return params, {'state': state}

  def apply(
    params: Params,
    state: ModelState,
    dense: Any,
    embeddings: Any,
    keywords: Keywords,
  ) -> tuple[Any, ModelState]:
    args, named = arguments(dense, embeddings, keywords)
    if not model.has_state:
      return model.apply(params, *args, **named), state
    logits, new = model.apply(params, state['state'], *args, **named)
    return logits, {'state': new} if keywords['train'] else state

  return Adapted('the model', init, apply)


def _arguments(
  call: Callable[..., Any], leading: int, name: str
) -> Callable[[Any, Any, Keywords], tuple[tuple[Any, ...], dict[str, Any]]]:
  """Returns a function that makes the arguments of `call`.

  It passes dense features and embeddings after the `leading` parameters, and
  only those keywords that the signature names. If the first or only parameter
  after the leading ones is the embeddings, dense features are a keyword.
  """
  signature = inspect.signature(call)
  own = list(signature.parameters.values())[leading:]
  positional = [
    one.name
    for one in own
    if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
  ]
  variadic = any(one.kind is one.VAR_POSITIONAL for one in own)
  if not positional and not variadic:
    raise UserError(
      'a model must take embeddings',
      got=f'{signature}',
      where=name,
      hint='let it take dense features and embeddings, in this order',
    )
  alone = positional[:1] == ['embeddings'] or (
    len(positional) == 1 and not variadic
  )
  bound = 1 if alone else 2
  named = {one.name for one in own} - {*positional[:bound]}

  def arguments(
    dense: Any, embeddings: Any, keywords: Keywords
  ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    offered = {**keywords, 'dense': dense} if alone else keywords
    wanted = {key: offered[key] for key in offered if key in named}
    return ((embeddings,) if alone else (dense, embeddings)), wanted

  return arguments
