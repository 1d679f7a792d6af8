"""Writes an export: a folder that is complete, or absent."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import pathlib
import shutil
from typing import Any
import uuid

import jax
from jax import export
import jax.numpy as jnp
from jaxtyping import Float, Integer, UInt8
import numpy as np

from slip_serve import layout as form
from slip_serve.layout import Layout
from slipstream_jax.checkpoint.quantize import Bits, quantize
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import check_path, choose, is_whole, UserError
from slipstream_jax.export.source import SourceFacts, write_ids
from slipstream_jax.files import checksum, Path, sync
from slipstream_jax.selection.hot import popular_rows_of_groups
from slipstream_jax.training.forward import forward
from slipstream_jax.training.trainer_parts import TrainerParts

BATCH_SIZES = 1, 64, 1024
"""The default sizes of batches that are scored at once."""
PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
"""The platforms that a program can be written for."""
_MOST_EXAMPLES = 1 << 24


def check_arguments(
  folder: Path,
  dtype: object,
  batch_sizes: Sequence[object],
  platforms: Sequence[str],
) -> None:
  """Checks the arguments of `write_export` before any work is done.

  Raises:
    UserError: one is invalid, or the folder is not new or empty.
  """
  check_path(folder, 'export, path')
  choose(dict.fromkeys(form.CODECS), dtype, 'export, dtype')
  for platform in platforms:
    choose(dict.fromkeys(PLATFORMS), platform, 'export, platforms')
  sizes = [*batch_sizes] if np.iterable(batch_sizes) else []
  for size in sizes or [None]:
    if not is_whole(size, 1, _MOST_EXAMPLES + 1):
      raise UserError(
        'batch_sizes must be a list of whole numbers from 1 to 2**24',
        got=repr(size if sizes else batch_sizes),
        where='export, batch_sizes',
        hint='give some, such as 1, 64, 1024',
      )
  path = pathlib.Path(folder)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(
      'an export needs a new or empty folder',
      got=path,
      where='export, path',
      hint='give another one, or remove what is there',
    )


def write_export(
  parts: TrainerParts,
  folder: Path,
  facts: SourceFacts,
  dtype: str = 'float32',
  batch_sizes: Sequence[Any] = BATCH_SIZES,
  platforms: Sequence[str] = ('cpu',),
  others: Sequence[TrainerParts] = (),
  ensemble: str = 'logits',
) -> Layout:
  """Writes a trainer's model, rows and vocabularies, and returns the layout.

  An ensemble is written as one model, whose rows are those of all members side
  by side. So the server reads each row once.

  Args:
    parts: the trainer. It must take no step meanwhile.
    folder: a new or empty folder.
    facts: what is known of the data.
    dtype: dtype of the rows, a member of `slip_serve.layout.CODECS`.
    batch_sizes: examples that one program scores at once.
    platforms: members of `PLATFORMS` that the programs run on.
    others: trainers of the same recipe that predict together with this one.
    ensemble: how they do, a member of `ENSEMBLES`.

  Raises:
    UserError: an invalid argument, a model that JAX cannot export, rows out of
      the dtype's range, or no room. Nothing of the export is then left.
  """
  check_arguments(folder, dtype, batch_sizes, platforms)
  members, popular = (parts, *others), popular_rows(parts, facts.counts)
  leaves = [leaf for member in members for leaf in leaves_of(member)]
  layout = _layout(parts, facts, leaves, popular, len(members))._replace(
    codec=dtype,
    programs=tuple(
      form.Program(size, f'score_{size}.jax')
      for size in sorted({int(size) for size in batch_sizes})
    ),
  )
  with _complete(pathlib.Path(folder)) as partial:
    _check_room(partial, layout)
    # The programs come first, because a model may fail to be exported.
    for size, file in layout.programs:
      program = serialized(members, size, platforms, ensemble)
      (partial / file).write_bytes(program)
    (partial / form.DENSE).write_bytes(b''.join(x.tobytes() for x in leaves))
    for number, group in enumerate(layout.groups):
      if group.popular:
        rows = popular[number].astype('<i8')
        (partial / group.popular).write_bytes(rows.tobytes())
      with open(partial / group.file, 'wb') as opened:
        for name in parts.recipe.tables.groups[number].tables:
          pieces = (member.engine.pieces_of(name) for member in members)
          for alike in zip(*pieces, strict=True):
            rows = np.concatenate(alike, axis=1)
            opened.write(encoded(dtype, rows, name).data)
        opened.truncate(form.padded(group.rows * layout.record(group)))
    layout = layout._replace(
      vocabulary=tuple(
        write_ids(ids, partial, number) for number, ids in enumerate(facts.ids)
      ),
      files=_synced(partial),
    )
    (partial / form.MANIFEST).write_text(form.text_of(layout))
    sync(partial / form.MANIFEST)
  return layout


def _layout(
  parts: TrainerParts,
  facts: SourceFacts,
  leaves: Sequence[np.ndarray],
  popular: Sequence[np.ndarray],
  members: int,
) -> Layout:
  """Returns the layout without codec, programs, vocabularies and files."""
  tables = parts.recipe.tables
  names = [*tables.tables]
  places: dict[str, tuple[int, int]] = {}  # group, and first row in it
  for number, group in enumerate(tables.groups):
    first = 0
    for name in group.tables:
      places[name] = number, first
      first += tables.tables[name].rows
  return Layout(
    name=facts.name,
    step=int(to_host(parts.state.step)),
    codec='float32',
    dense_features=parts.shape.dense_features,
    weighted=tables.is_weighted,
    features=tuple(
      form.Feature(
        name,
        names.index(feature.table),
        tables.columns[name].start,
        feature.max_length,
        feature.combiner,
      )
      for name, feature in tables.features.items()
    ),
    tables=tuple(
      form.Table(name, table.rows, *places[name])
      for name, table in tables.tables.items()
    ),
    groups=tuple(
      form.Group(
        group.num_rows,
        group.dim * members,
        f'rows_{number}.bin',
        group.columns,
        f'popular_{number}.bin' if len(popular[number]) else '',
      )
      for number, group in enumerate(tables.groups)
    ),
    programs=(),
    leaves=tuple(form.Leaf(leaf.dtype.name, leaf.shape) for leaf in leaves),
    vocabulary=(),
    files=(),
    dense=facts.dense,
    numbers=tuple(
      head for head, kind in enumerate(parts.kinds) if kind == 'numbers'
    ),
  )


@contextlib.contextmanager
def _complete(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a temporary folder that gets the folder's name when the block ends.

  If the block fails, the temporary folder is removed.
  """
  # A unique name, because a killed process may have left another one.
  partial = folder.with_name(f'{folder.name}.{uuid.uuid4().hex}.tmp')
  try:
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
      folder.rmdir()
    partial.rename(folder)
  except OSError as error:
    raise UserError(
      'an export needs a folder that can be written',
      got=f'{folder}: {error.strerror}',
      where='export, path',
      hint='give one on a disk with room',
    ) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _check_room(folder: pathlib.Path, layout: Layout) -> None:
  wanted = sum(group.rows * layout.record(group) for group in layout.groups)
  free = shutil.disk_usage(folder).free
  if free < wanted:
    raise UserError(
      f'an export of these rows needs {wanted / 1e9:.3g} GB of its disk',
      got=f'{free / 1e9:.3g} GB',
      where='export, path',
      hint='give another disk, or the dtype float16 or int8',
    )


def _synced(folder: pathlib.Path) -> tuple[form.File, ...]:
  """Syncs all files of a folder to disk and returns their checksums."""
  files = []
  for path in sorted(folder.iterdir()):
    sync(path)
    size = os.path.getsize(path)
    files.append(form.File(path.name, size, f'{checksum(path):08x}'))
  return tuple(files)


def leaves_of(parts: TrainerParts) -> list[np.ndarray]:
  """Returns the model's parameters and state, the first input of a program."""
  tree = parts.state.params, parts.state.model_state
  return [np.asarray(leaf) for leaf in jax.tree.leaves(to_host(tree))]


def _mean_of_probabilities(logits: jax.Array) -> jax.Array:
  clicks = jax.nn.logsumexp(jax.nn.log_sigmoid(logits), axis=0)
  return clicks - jax.nn.logsumexp(jax.nn.log_sigmoid(-logits), axis=0)


ENSEMBLES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'logits': lambda logits: logits.mean(axis=0),
  'probabilities': _mean_of_probabilities,
}
"""What members predict together, by the logits f32[M, ...] of each."""


def serialized(
  members: Sequence[TrainerParts],
  examples: int,
  platforms: Sequence[str],
  ensemble: str = 'logits',
) -> bytes:
  """Returns the forward pass for B examples as a program that only needs JAX.

  Its inputs are:
  * the lists of `leaves_of` of all M members, end to end,
  * for each group as many rows as there can be, f32[B * K_g, M * D],
  * for each group the place of each lookup in its rows, i32[B, K_g],
  * the dense features f32[B, I],
  * the weights of the lookups f32[B, K], if they have some.

  Only the number of rows differs from `Compiled.forward`, and no score depends
  on it.

  Raises:
    UserError: JAX cannot export the model.
  """
  parts = members[0]
  recipe, tables = parts.recipe, parts.recipe.tables
  tree = jax.tree.structure((parts.state.params, parts.state.model_state))
  own, together = len(leaves_of(parts)), ENSEMBLES[ensemble]

  def score(
    leaves: list[jax.Array],
    rows: tuple[jax.Array, ...],
    inverses: tuple[jax.Array, ...],
    dense: jax.Array,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    logits = []
    for number in range(len(members)):
      mine = leaves[number * own : (number + 1) * own]
      params, state = jax.tree.unflatten(tree, mine)
      parted = [
        block[:, number * group.dim : (number + 1) * group.dim]
        for block, group in zip(rows, tables.groups, strict=True)
      ]
      inputs = tuple(parted), inverses, dense, weights
      whole = forward(recipe, params, state, *inputs, portable=True)
      logits.append(whole[0])
    return logits[0] if len(logits) == 1 else together(jnp.stack(logits))

  shape, number = jax.ShapeDtypeStruct, jnp.float32
  widths = [
    (len(group.columns), group.dim * len(members)) for group in tables.groups
  ]
  inputs: list[Any] = [
    [shape(x.shape, x.dtype) for one in members for x in leaves_of(one)],
    tuple(shape((examples * width, dim), number) for width, dim in widths),
    tuple(shape((examples, width), jnp.int32) for width, _ in widths),
    shape((examples, parts.shape.dense_features), number),
  ]
  if tables.is_weighted:
    inputs.append(shape((examples, tables.num_columns), number))
  try:
    exported = export.export(jax.jit(score), platforms=tuple(platforms))
    return bytes(exported(*inputs).serialize())
  except UserError:
    raise
  except Exception as error:  # a user's model may raise anything
    raise UserError(
      'jax.export must be able to export the model',
      got=f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")}',
      where='export, model',
      hint='leave out of the model what calls Python or other programs',
    ) from error


def encoded(
  codec: str, rows: Float[np.ndarray, 'n D'], table: str
) -> UInt8[np.ndarray, 'n record']:
  """Returns the records of rows of any floating type.

  In float32 they have the rows' own bits. In int8 an element of a row with
  range r is at most r / 510 off, and a little more for rounding.

  Args:
    codec: a member of `slip_serve.layout.CODECS`.
    rows: the rows.
    table: the table's name, for errors.

  Raises:
    UserError: a row does not fit float16, or is not finite in int8.
  """
  exact = np.ascontiguousarray(rows, '<f4')
  if codec == 'float32':
    return exact.view(np.uint8)
  if codec == 'float16':
    with np.errstate(over='ignore'):
      half = exact.astype('<f2')
    if not np.isfinite(half).all():
      raise UserError(
        'rows in float16 must be below 65520',
        got=exact[~np.isfinite(half)][0],
        where=f'table {table}',
        hint='export them as float32 or int8',
      )
    return half.view(np.uint8)
  codes, scales, lows = quantize(exact, Bits(8))
  ranges = np.stack([scales, lows], axis=1).astype('<f4').view(np.uint8)
  return np.concatenate([ranges, codes], axis=1)


def popular_rows(
  parts: TrainerParts,
  counts: Callable[[], Integer[np.ndarray, ' N']] | None = None,
) -> list[Integer[np.ndarray, ' _']]:
  """Returns the most used rows of each group, in the group's numbers, i64.

  They are the trainer's hot rows. If it has none, they are the rows that
  `counts` says are used most. Without both they are empty.
  """
  tables, hot = parts.recipe.tables, parts.engine.hot
  rows = np.empty(0, np.int64)
  if hot is not None:
    rows = hot.rows
  elif counts is not None and (uses := counts()).any():
    rooms = [-(-group.num_rows // 4) for group in tables.groups]
    rows = popular_rows_of_groups(uses, tables, rooms)
  return [own for _, own in tables.in_groups(rows)]
