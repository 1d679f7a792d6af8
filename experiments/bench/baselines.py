"""Trains DLRM in PyTorch, written as its users write it for speed.

A baseline has the same model (arXiv 1906.00091), data and update. A comparison
should err in favour of the baselines. So where PyTorch leaves a choice, the
fastest measured one is taken, and examples are laid out before the timed step.
PyTorch and FBGEMM are the extra `slipstream_jax[baselines]`. They are imported
on use.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
import importlib
import itertools
from typing import Any, Literal, NamedTuple, TYPE_CHECKING
import warnings

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import offsets
from slipstream_jax.types import Batch

if TYPE_CHECKING:
  from torch import Tensor


class Examples(NamedTuple):
  """A batch in PyTorch's layout."""

  dense: 'Tensor'
  """f32[B, I]."""
  ids: 'Tensor'
  """Local ids, feature-major: i64[F, B * L]. Flat if L differs."""
  starts: 'Tensor'
  """Start of the bag of each lookup, and the last end: i64[F * B + 1]."""
  labels: 'Tensor'
  """f32[B]."""
  weights: 'Tensor'
  """Weights in the loss, divided by their sum: f32[B]."""


class Baseline(NamedTuple):
  """A model with its tables and optimizers. `step` changes them in place."""

  prepare: Callable[[Batch], Examples]
  """Lays a batch of bags of one length out for `step`; not to be timed."""
  step: Callable[[Examples], 'Tensor']
  """Trains on one batch; returns its loss before the update, f32[]."""
  tables: tuple['Tensor', ...]
  """Views of the tables' storage: f32[R, D] each."""
  dense: tuple['Tensor', ...]
  """Views of each layer's weight f32[out, in] and bias, bottom before top."""


def absent(name: str) -> str | None:
  """Returns why the baseline cannot be built here, or None if it can."""
  module = 'fbgemm_gpu' if name.startswith('fbgemm') else 'torch'
  try:
    importlib.import_module(module)
  except (ImportError, OSError) as error:  # OSError: a library is missing
    return f'{module} cannot be imported: {error}'
  if name == HYBRID:
    import torch

    if not torch.cuda.is_available():
      return 'torch finds no CUDA device'
  return None


def turn_of(
  baseline: Baseline, batches: Sequence[Batch]
) -> Callable[[int], None]:
  """Returns a turn of a contest that trains on batches, over and over."""
  examples = itertools.cycle([baseline.prepare(batch) for batch in batches])

  def turn(steps: int) -> None:
    for _ in range(steps):
      float(baseline.step(next(examples)))  # ours reads its losses, too

  return turn


def embedding_bag(
  rows: tuple[int, ...],
  dim: int,
  bottom: Sequence[int],
  top: Sequence[int],
  learning_rate: float,
  num_dense: int = 13,
  onednn: bool = False,
  device: str = 'cpu',
) -> Baseline:
  """Returns one `nn.EmbeddingBag(sparse=True)` per table, trained by SGD.

  Args:
    rows: R of each table.
    dim: D.
    bottom: widths of the MLP over the dense features; ends at D.
    top: widths of the MLP over the interactions, less its last layer of 1.
    learning_rate: of rows and dense parameters.
    num_dense: I.
    onednn: multiply hidden layers with oneDNN rather than torch's default.
    device: of the dense layers; the tables stay in host memory.
  """
  tables = _embedding_bags(rows, dim, learning_rate)
  widths = (num_dense, *bottom)
  model = _dlrm(tables.pool, len(rows) + 1, widths, top, onednn, device)
  return _baseline(model, tables, learning_rate)


def fbgemm(
  rows: tuple[int, ...],
  dim: int,
  bottom: Sequence[int],
  top: Sequence[int],
  learning_rate: float,
  num_dense: int = 13,
  onednn: bool = False,
  optimizer: Literal['sgd', 'rowwise_adagrad'] = 'sgd',
) -> Baseline:
  """Returns FBGEMM's batched tables in host memory, as TorchRec has them.

  The arguments are those of `embedding_bag`, with D a multiple of 4, and the
  rows' `optimizer`, which is fused into their backward pass.
  """
  tables = _fbgemm_tables(rows, dim, learning_rate, optimizer)
  model = _dlrm(tables.pool, len(rows) + 1, (num_dense, *bottom), top, onednn)
  return _baseline(model, tables, learning_rate)


HYBRID = 'embedding_bag_hybrid'
BASELINES: dict[str, Callable[..., Baseline]] = {
  'embedding_bag': embedding_bag,
  HYBRID: partial(embedding_bag, device='cuda'),
  'fbgemm': fbgemm,
  'fbgemm_rowwise_adagrad': partial(fbgemm, optimizer='rowwise_adagrad'),
  'fbgemm_onednn': partial(fbgemm, onednn=True),
}
"""Builder of every baseline by its name; all take the same arguments."""

LINEAR = 'embedding_bag', 'fbgemm', 'fbgemm_rowwise_adagrad'
"""Baselines that `linear` can build."""


DCN_BOTTOM, DCN_TOP = (512, 256, 128), (1024, 1024, 512, 256)
DCN_CROSSES, DCN_RANK = 3, 512
"""Sizes of MLPerf's DLRM-DCNv2."""


def linear(
  name: str,
  rows: tuple[int, ...],
  dim: int,
  learning_rate: float,
  lengths: Sequence[int] | None = None,
) -> Baseline:
  """Returns a baseline whose model is a linear layer over all embeddings.

  Args:
    name: one of `LINEAR`.
    rows: R of each table.
    dim: D.
    learning_rate: of rows and dense parameters.
    lengths: lookups of each table's bags, which `embedding_bag` needs to be
      equal. None: any number, the same for all tables.
  """
  import torch

  tables = _tables(name, rows, dim, learning_rate)
  layer = torch.nn.Linear(len(rows) * dim, 1)
  pool = tables.pool

  def loss(examples: Examples) -> 'Tensor':
    logits = layer(torch.cat(pool(examples), 1)).squeeze(1)
    return _entropy(logits, examples)

  model = loss, [*layer.parameters()]
  return _baseline(model, tables, learning_rate, lengths)


def dcn(
  name: str,
  rows: tuple[int, ...],
  dim: int,
  learning_rate: float,
  lengths: Sequence[int] | None = None,
  num_dense: int = 13,
) -> Baseline:
  """Returns a baseline with the layers of MLPerf's DLRM-DCNv2, by oneDNN.

  The arguments are those of `linear`, and I.
  """
  import torch

  tables = _tables(name, rows, dim, learning_rate)
  layer, width = torch.nn.Linear, DCN_BOTTOM[-1] + len(rows) * dim
  lower, upper = (
    [layer(*widths) for widths in itertools.pairwise(mlp)]
    for mlp in ((num_dense, *DCN_BOTTOM), (width, *DCN_TOP, 1))
  )
  downs = [layer(width, DCN_RANK, bias=False) for _ in range(DCN_CROSSES)]
  ups = [layer(DCN_RANK, width) for _ in range(DCN_CROSSES)]
  hidden, whole = _onednn_linear_relu(), _onednn_linear()
  no_bias = torch.zeros(DCN_RANK)

  def loss(examples: Examples) -> 'Tensor':
    x = examples.dense
    for one in lower:
      x = hidden(x, one.weight, one.bias)
    x = first = torch.cat([x, *tables.pool(examples)], 1)
    for down, up in zip(downs, ups, strict=True):
      low = whole(x, down.weight, no_bias)
      x = torch.addcmul(x, first, whole(low, up.weight, up.bias))
    for one in upper[:-1]:
      x = hidden(x, one.weight, one.bias)
    return _entropy(upper[-1](x).squeeze(1), examples)

  layers = [*lower, *downs, *ups, *upper]
  parameters = [p for one in layers for p in one.parameters()]
  return _baseline((loss, parameters), tables, learning_rate, lengths)


_Pool = Callable[[Examples], list['Tensor']]  # side by side f32[B, F * D]
_Model = tuple[Callable[[Examples], 'Tensor'], Sequence['Tensor']]


class _Tables(NamedTuple):
  pool: _Pool
  views: Sequence['Tensor']
  optimizers: tuple[Any, ...] = ()
  """Optimizers of the rows. Empty if the backward pass updates them."""


def _tables(
  name: str, rows: tuple[int, ...], dim: int, learning_rate: float
) -> _Tables:
  """Returns the tables of a baseline in `LINEAR`."""
  if name == 'embedding_bag':
    return _embedding_bags(rows, dim, learning_rate)
  optimizer = name.removeprefix('fbgemm_') if name != 'fbgemm' else 'sgd'
  return _fbgemm_tables(rows, dim, learning_rate, optimizer)


def _embedding_bags(
  rows: tuple[int, ...], dim: int, learning_rate: float
) -> _Tables:
  import torch

  bag = partial(torch.nn.EmbeddingBag, mode='sum', sparse=True)
  # _weight skips the module's own, slow initialiser.
  modules = [bag(r, dim, _weight=torch.empty(r, dim)) for r in rows]
  tables = [module.weight for module in modules]
  # foreach and fused have no kernels for sparse gradients.
  optimizer = torch.optim.SGD(tables, learning_rate, foreach=False)

  def pool(examples: Examples) -> list['Tensor']:
    starts = examples.starts[: len(examples.labels)]
    return [m(i, starts) for m, i in zip(modules, examples.ids, strict=True)]

  return _Tables(pool, tables, (optimizer,))


def _fbgemm_tables(
  rows: tuple[int, ...], dim: int, learning_rate: float, optimizer: str
) -> _Tables:
  with warnings.catch_warnings():  # of kernels for SSD, not in this build
    warnings.filterwarnings('ignore', '(?s).*Failed to import.*_ssd')
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

  module = ops.SplitTableBatchedEmbeddingBagsCodegen(
    [(r, dim, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for r in rows],
    optimizer=getattr(ops.OptimType, f'EXACT_{optimizer.upper()}'),
    learning_rate=learning_rate,
    # _prepare checks the ids, so that the timed step need not.
    bounds_check_mode=ops.BoundsCheckMode.NONE,
  )

  def pool(examples: Examples) -> list['Tensor']:
    return [module(examples.ids.view(-1), examples.starts)]

  return _Tables(pool, module.split_embedding_weights())


def _prepare(
  rows: tuple[int, ...], lengths: Sequence[int] | None, batch: Batch
) -> Examples:
  import torch

  if lengths is not None and len({*lengths}) > 1:
    return _prepare_uneven(rows, lengths, batch)
  length, rest = divmod(batch.lookups[0].size, len(rows))
  bad = length == 0 or rest > 0
  if not bad:
    ids = batch.lookups.reshape(-1, len(rows), length).transpose(1, 0, 2)
    ids = ids.reshape(len(rows), -1) - offsets(rows)[:-1, None]
    bad = bool(((ids < 0) | (ids >= np.reshape(rows, (-1, 1)))).any())
  if bad:
    raise UserError(
      'a baseline takes equally many lookups per example in each of its tables',
      got=f'shape {batch.lookups.shape}, or rows outside of their table',
      where='Batch.lookups',
      hint='give bags of one length without padding',
    )
  starts = np.arange(0, ids.size + 1, length)
  lookups = np.ascontiguousarray(ids), starts
  weights = batch.weights / batch.weights.sum()
  arrays = batch.dense, *lookups, batch.labels, weights
  return Examples(*map(torch.from_numpy, arrays))


def _prepare_uneven(
  rows: tuple[int, ...], lengths: Sequence[int], batch: Batch
) -> Examples:
  """Lays out bags whose length depends on the table. Ids are i64[B * K]."""
  import torch

  firsts = np.repeat(offsets(rows)[:-1], lengths)
  ids = batch.lookups.reshape(len(batch.labels), -1) - firsts
  by_table = np.split(ids, np.cumsum(lengths)[:-1], axis=1)
  starts = np.cumsum([0, *np.repeat(lengths, len(ids))])
  flat = np.concatenate([own.ravel() for own in by_table])
  weights = batch.weights / batch.weights.sum()
  arrays = batch.dense, flat, starts, batch.labels, weights
  return Examples(*map(torch.from_numpy, arrays))


def _dlrm(
  pool: _Pool,
  vectors: int,
  bottom: Sequence[int],
  top: Sequence[int],
  onednn: bool,
  device: str = 'cpu',
) -> _Model:
  """Returns DLRM. The bottom MLP's vector and those of `pool` interact."""
  import torch

  pairs = torch.from_numpy(np.flatnonzero(np.tri(vectors, k=-1))).to(device)
  linear = partial(torch.nn.Linear, device=device)
  lower, upper = (
    [linear(*widths) for widths in itertools.pairwise(mlp)]
    for mlp in (bottom, (bottom[-1] + len(pairs), *top, 1))
  )
  hidden = _onednn_linear_relu() if onednn else _linear_relu

  def loss(examples: Examples) -> 'Tensor':
    x = examples.dense.to(device)
    for layer in lower:
      x = hidden(x, layer.weight, layer.bias)
    pooled = [part.to(device) for part in pool(examples)]
    met = torch.cat([x, *pooled], 1).view(len(x), vectors, -1)
    products = torch.bmm(met, met.transpose(1, 2)).flatten(1)
    # gather beats index_select, a mask and slices, mostly on its way back.
    x = torch.cat([x, products.gather(1, pairs.expand(len(x), -1))], 1)
    for layer in upper[:-1]:
      x = hidden(x, layer.weight, layer.bias)
    return _entropy(upper[-1](x).squeeze(1), examples)

  return loss, [p for layer in lower + upper for p in layer.parameters()]


def _entropy(logits: 'Tensor', examples: Examples) -> 'Tensor':
  """Returns the loss of logits f32[B]."""
  import torch

  entropy = torch.nn.functional.binary_cross_entropy_with_logits
  to = logits.device
  labels, weights = examples.labels.to(to), examples.weights.to(to)
  return entropy(logits, labels, weights, reduction='sum')


def _baseline(
  model: _Model,
  tables: _Tables,
  rate: float,
  lengths: Sequence[int] | None = None,
) -> Baseline:
  """Adds initial rows, uniform in +-1/sqrt(R) as DLRM's, and the SGD step."""
  import torch

  for table in tables.views:
    table.detach().uniform_(-(len(table) ** -0.5), len(table) ** -0.5)
  loss_of, dense = model
  optimizers = *tables.optimizers, torch.optim.SGD(dense, rate, fused=True)

  def step(examples: Examples) -> 'Tensor':
    loss = loss_of(examples)
    loss.backward()
    for optimizer in optimizers:
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  views = [tuple(p.detach() for p in some) for some in (tables.views, dense)]
  prepare = partial(_prepare, tuple(map(len, views[0])), lengths)
  return Baseline(prepare, step, *views)


def _linear_relu(x: 'Tensor', weight: 'Tensor', bias: 'Tensor') -> 'Tensor':
  import torch

  return torch.relu(torch.nn.functional.linear(x, weight, bias))


@cache
def _onednn_linear(activation: str = 'none') -> Callable[..., 'Tensor']:
  """Returns a linear layer: (f32[B, in], weight, bias) -> f32[B, out].

  Its activation is 'none' or 'relu'.

  torch's own layer multiplies with MKL, which on AMD does not use AVX-512 and
  takes twice the time of oneDNN. The operator is private and tied to one
  version of torch. Users do not write this, but it shows what torch could do.
  """
  import torch

  onednn = torch.ops.mkldnn._linear_pointwise

  class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: 'Tensor', weight: 'Tensor', bias: 'Tensor') -> Any:
      out = onednn(x, weight, bias, activation, [], '')
      ctx.save_for_backward(x, weight, out)
      return out

    @staticmethod
    def backward(ctx: Any, *grads: 'Tensor') -> Any:
      x, weight, out = ctx.saved_tensors
      grad = grads[0]
      if activation == 'relu':
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
      to_x = None  # the dense features need no gradient
      if ctx.needs_input_grad[0]:
        to_x = onednn(grad, weight.t(), None, 'none', [], '')
      to_weight = onednn(grad.t(), x.t(), None, 'none', [], '')
      return to_x, to_weight, grad.sum(0)

  return Linear.apply


def _onednn_linear_relu() -> Callable[..., 'Tensor']:
  return _onednn_linear('relu')
