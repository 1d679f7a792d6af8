"""What a step that is divided into parts refuses, before anything is trained.

Row chains are refused if the update of a row depends on another row, because
the rows of a step are on several devices. This is found by trying: the gradient
of one row is changed, and nothing else may change.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.distributed.exchange import EXCHANGES
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.mesh import devices_of
from slipstream_jax.engine.planner import HostTowers, Slices
from slipstream_jax.errors import check_whole, choose, UserError
from slipstream_jax.models.dmt import DMT
from slipstream_jax.models.towers import is_over_batch
from slipstream_jax.tables import Group, TableSet
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.transforms.row_state import RowStateLayout, split

_ROWS = 4  # that show whether a chain treats each alone


def divided(
  devices: Any,
  parts: Any,
  exchange: Any = 'float32',
  replicas: Any = 1,
  hosts: Any = 1,
  towers: HostTowers | None = None,
) -> Slices | None:
  """Returns how a step is divided. None: one device computes it as a whole.

  Args:
    devices: W, that share the rows and the examples.
    parts: G, into which a batch is cut. None: 1 for one device that exchanges
      f32, else 8 or W.
    exchange: a member of `EXCHANGES`.
    replicas: R, devices that have the same rows.
    hosts: H of a replica, to each of which a row crosses at most once.
    towers: from `towers_of`.

  Raises:
    UserError: one is no power of two, or there are fewer devices, or parts
      than devices, devices than replicas or hosts of each, or one part of which
      nothing is exchanged, or several hosts with towers have replicas.
  """
  check_whole(devices, 1, 'Trainer, devices', 'use 1, or a power of two')
  element = choose(EXCHANGES, exchange, 'Trainer, exchange')
  whole = element == 4
  if parts is None:
    parts = 1 if devices == 1 and whole else max(8, devices)
  of_all = {'devices': devices, 'parts': parts, 'replicas': replicas}
  of_all['hosts'] = hosts
  for name, value in of_all.items():
    where = f'Trainer, {name}'
    check_whole(value, 1, where, 'such as 8')
    if value & (value - 1):
      raise UserError(
        f'{name} must be a power of two, as gradients are added in pairs',
        got=value,
        where=where,
        hint='such as 8',
      )
  if devices > parts:
    raise UserError(
      f'the devices must divide the {parts} parts of a batch',
      got=devices,
      where='Trainer, devices',
      hint='take fewer devices, or more parts: a run with other parts has'
      ' other last bits',
    )
  if replicas > devices:
    raise UserError(
      f'the replicas of the rows must divide the {devices} devices',
      got=replicas,
      where='Trainer, replicas',
      hint='take fewer replicas, such as one for each host',
    )
  if hosts > devices // replicas:
    raise UserError(
      f'the hosts of a replica must divide its {devices // replicas} devices',
      got=hosts,
      where='Trainer, hosts',
      hint='take more devices, or fewer hosts',
    )
  if towers is not None and replicas > 1:
    raise UserError(
      'hosts with a tower each have no replicas of rows',
      got=replicas,
      where='Trainer, replicas',
      hint='leave it out, or hosts',
    )
  if parts == 1 and jax.process_count() == 1:
    if whole:
      return None
    raise UserError(
      'rows are exchanged between parts, so that there must be several',
      got=f'1 part, and exchange {exchange!r}',
      where='Trainer, parts',
      hint='take 8 parts, or leave exchange out',
    )
  devices_of(devices)
  return Slices(devices, parts, exchange, replicas, hosts, towers)


def towers_of(model: Any, tables: TableSet, hosts: Any) -> HostTowers | None:
  """Returns the towers of several hosts. None: they have none.

  Raises:
    UserError: there are several hosts, and the model is a `DMT` of other than
      as many towers whose tables differ, or one with weights of first order or
      padding.
  """
  check_whole(hosts, 1, 'Trainer, hosts', 'use 1, or the number of hosts')
  if hosts == 1 or not isinstance(model, DMT):
    return None
  if model.first_order or model.padded or len(model.towers) != hosts:
    odd = model.first_order or model.padded
    raise UserError(
      f'{hosts} hosts need a DMT of {hosts} towers, one for each',
      got='towers with first_order, or padded'
      if odd
      else f'{len(model.towers)} towers',
      where='Trainer, hosts',
      hint='leave hosts out, or give DMT as many towers',
    )
  model.check_towers(len(tables.features))
  names = [*tables.features]
  towers = tuple(tuple(names[i] for i in own) for own in model.towers)
  _check_tables(tables, towers)
  return HostTowers(towers, model.width or tables.groups[0].dim)


def _check_tables(tables: TableSet, towers: Sequence[Sequence[str]]) -> None:
  owner: dict[str, int] = {}
  for number, own in enumerate(towers):
    for name in own:
      table = tables.features[name].table
      if owner.setdefault(table, number) != number:
        raise UserError(
          'a table must be looked up by features of one tower alone, as one'
          ' host has it',
          got=f'table {table!r} in towers {owner[table]} and {number}',
          where='Trainer, hosts',
          hint='put its features in one tower, or leave hosts out',
        )


def check_examples(parts: int, examples: int) -> None:
  """Checks that a batch can be cut.

  Raises:
    UserError: the parts do not divide it.
  """
  if examples % parts:
    raise UserError(
      f'the parts must divide each batch, here one of {examples} examples',
      got=parts,
      where='Trainer, parts',
      hint='take batches of a multiple of the parts',
    )


def check_divided(
  recipe: Recipe,
  layouts: Sequence[RowStateLayout],
  state: TrainState,
  rows: str,
) -> None:
  """Checks that a step gives the same bits however it is divided.

  Raises:
    UserError: it would not, or it is not supported yet.
  """
  refused = {
    'a model that keeps statistics of batches': bool(state.model_state),
    'a model whose loss is over the whole batch': is_over_batch(recipe.model),
    f'{recipe.microbatches} microbatches': recipe.microbatches > 1,
    f'rows that cross as {rows}': rows != 'stream',
  }
  for got, is_there in refused.items():
    if is_there:
      raise UserError(
        'a step divided into parts or over devices must not depend on how',
        got=got,
        where='Trainer, devices',
        hint='leave devices and parts out, or leave this out',
      )
  for group in recipe.tables.groups:
    _check_rows_apart(recipe, group, recipe.layout(group))


def check_one_process(got: str) -> None:
  """Checks that there are not several processes, for what needs one alone.

  Raises:
    UserError: there are, given what was asked for.
  """
  if jax.process_count() > 1:
    raise UserError(
      f'what {jax.process_count()} processes share must be in reach of all',
      got=got,
      where='Trainer.train',
      hint='leave it out, or train in one process',
    )


def _check_rows_apart(
  recipe: Recipe, group: Group, layout: RowStateLayout
) -> None:
  """Checks that an optimizer updates each row without reading others."""
  chain = optax.with_extra_args_support(recipe.optimizer_of(group))
  shape = _ROWS, group.dim
  rows = np.linspace(-1, 1, _ROWS * group.dim, dtype=np.float32).reshape(shape)

  @jax.jit
  def results(rows: jax.Array, gradients: jax.Array) -> Any:
    state, results_of_steps = chain.init(rows), []
    for gradient in gradients:
      updates, state = chain.update(
        gradient,
        state,
        rows,
        batches_seen=jnp.float32(0),
        example_weight=jnp.ones(_ROWS, jnp.float32),
        value=jnp.float32(1),
      )
      own, shared = split(layout, state)
      results_of_steps.append(((updates, *own), shared))
    return results_of_steps

  gradients = np.stack([rows * 3 + 1, rows - 2]).astype(np.float32)
  other = gradients.copy()
  other[:, 0] = 100 * other[:, 0] + 7
  one, two = (
    to_host(results(*to_device((rows, values))))
    for values in (gradients, other)
  )
  for (own, shared), (own_two, shared_two) in zip(one, two, strict=True):
    apart = [x[1:] for x in own], shared
    if jax.tree.all(
      jax.tree.map(
        np.array_equal, apart, ([x[1:] for x in own_two], shared_two)
      )
    ):
      continue
    raise UserError(
      'the update of a row must not depend on other rows, which another device'
      ' may have',
      got='a row optimizer that reads several rows at once',
      where=recipe.where(group),
      hint='leave out what clips or scales by a norm of all rows, or train on'
      ' one device without parts',
    )
