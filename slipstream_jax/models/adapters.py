"""Any model as two pure functions: Flax linen, Flax nnx, or functions.

A model is called with dense features and embeddings by name; and with those of
the keywords `train`, `weights`, `real` and `rng` that its signature names.
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
  """A model of two pure functions; a plain pair of them is one as well."""

  init: Callable[..., Any]
  """(key, dense, embeddings) to parameters, any tree of arrays; with
  `has_state` to (parameters, state)."""
  apply: Callable[..., Any]
  """(parameters, dense, embeddings) to logits; with `has_state` (parameters,
  state, dense, embeddings) to (logits, state)."""
  has_state: bool = False
  """Whether there is a state that only training steps change."""


class Adapted(NamedTuple):
  """What a step calls, whatever the model is."""

  name: str
  """Of the model, for errors."""
  init: Callable[[jax.Array, Any, Any, Keywords], tuple[Params, ModelState]]
  """(key, dense, embeddings, keywords) to parameters and state, {} if none."""
  apply: Callable[..., tuple[Any, ModelState]]
  """(parameters, state, dense, embeddings, keywords) to logits and state. The
  state changes only if `train` of the keywords holds; `rng` is then the key of
  this step."""


def adapt(model: Any) -> Adapted:
  """Returns the model as pure functions.

  Raises:
    UserError: it is none of those that there are, or takes no embeddings. When
      they are called, also a feature that the model asks for and nobody gives.
  """
  adapted = _adapted(model)
  return adapted._replace(
    init=_told(adapted.name, adapted.init),
    apply=_told(adapted.name, adapted.apply),
  )


class _Told(dict[str, Any]):
  """Features by name that say so where one is asked for in vain."""

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


def _told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
  """The function, which says which feature was asked for in vain."""

  def asked(*arguments: Any) -> Any:
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
      # Which dict lacked the key, it does not say: it may be one of the
      # model's own. So the model is asked again, with dicts that do say. The
      # first time it gets plain ones, which are trees to JAX.
      *others, dense, embeddings, keywords = arguments
      if isinstance(dense, dict):
        dense = _Told('dense features', name, dense)
      real = _Told('lookups of features', name, keywords['real'])
      again = (
        dense,
        _Told('embeddings of features', name, embeddings),
        {**keywords, 'real': real},
      )
      try:
        call(*others, *again)
      except UserError as said:
        raise said from error
      except Exception:  # what fails otherwise says nothing of the first time
        raise error from None
      raise

  return asked


def _adapted(model: Any) -> Adapted:
  if isinstance(model, nn.Module):
    return _linen(model)
  # Not imported here, which takes a second: who has such a model did so.
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
    # Any other stream that a model draws from falls back on the first.
    rngs = {'params': keywords['rng'], 'dropout': keywords['rng']}
    logits, changed = model.apply(
      variables, *args, mutable=list(state), rngs=rngs, **named
    )
    return logits, {**state, **changed}

  return Adapted(name, init, apply)


def _nnx(nnx: Any, model: Any) -> Adapted:
  """Parameters are its own: a module is made with them, and the seed of both.

  What is no `nnx.Param` is state, but for random keys, which each step makes.
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
  """An nnx.State as dicts of arrays, whose keys are text, as files need it."""

  def named(tree: Any) -> Any:
    if not isinstance(tree, dict):
      return tree
    return {str(key): named(value) for key, value in tree.items()}

  pure: dict[str, Any] = named(nnx.to_pure_dict(state))
  return pure


def _filled(nnx: Any, like: Any, pure: dict[str, Any]) -> Any:
  """The inverse: an nnx.State as `like`, of these values."""
  state = jax.tree.map(lambda leaf: leaf, like)  # a copy, which is filled
  nnx.replace_by_pure_dict(state, pure)
  return state


def _reseeded(nnx: Any, rngs: Any, key: jax.Array) -> Any:
  """The random state with streams that begin anew, each from its own key."""
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
  """How to call it: what it names, it gets.

  Beyond the `leading` parameters come dense features and embeddings, of any
  name. One whose first or only one of these is the embeddings gets no dense
  features, unless it names `dense`, too.
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

  def arguments(
    dense: Any, embeddings: Any, keywords: Keywords
  ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    offered = {**keywords, 'dense': dense} if alone else keywords
    wanted = {key: offered[key] for key in offered if key in named}
    return ((embeddings,) if alone else (dense, embeddings)), wanted

  return arguments
