"""The state of a growing vocabulary, and the same as plain arrays."""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import polars as pl

from slipstream_jax.errors import check_whole, is_whole, UserError
from slipstream_jax.vocabulary import saved
from slipstream_jax.vocabulary.growth import Snapshot
from slipstream_jax.vocabulary.known import EMPTY, of_arrays
from slipstream_jax.vocabulary.raw_ids import Kind, raw_ids, RawIds, text_of

_MOST = (1 << 31) - 1  # batches and rows are numbered in i32


def settings_of(
  size: int, admit_after: int, candidates: int | None
) -> dict[str, Any]:
  """What a state must agree with, of the arguments of `GrowingVocabulary`.

  Raises:
    UserError: one is out of range.
  """
  where = 'GrowingVocabulary, '
  check_whole(size, 2, where + 'size', 'give row 0 and one more at least')
  hint = 'give 1 for a row at first sight'
  check_whole(admit_after, 1, where + 'admit_after', hint)
  if candidates is None:
    candidates = size - 1
  hint = 'leave it out for as many as rows'
  check_whole(candidates, 1, where + 'candidates', hint)
  if max(size, candidates) > _MOST:
    raise UserError(
      'size and candidates must be below 2**31',
      got=f'{size} and {candidates}',
      where=where + 'size',
      hint='use several tables',
    )
  return {
    'what': 'GrowingVocabulary',
    'size': int(size),
    'admit_after': int(admit_after),
    # Nobody waits where all get a row at once.
    'candidates': int(candidates) if admit_after > 1 else 0,
  }


class Then(NamedTuple):
  """A vocabulary after some batch."""

  kind: Kind
  batches: int
  """How many it has taken."""
  snapshot: Snapshot
  words: list[str | None]
  """Of the rows from 1 on, where ids are text."""

  @property
  def known(self) -> RawIds:
    """The ids of the rows from 1 on."""
    if self.words:
      words = pl.Series(self.words, dtype=pl.String)
      return raw_ids(words, 'GrowingVocabulary')
    bits = self.snapshot.ids
    return EMPTY._replace(kind=self.kind, bits=bits, shape=bits.shape)


def state_of(then: Then, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Numbers, words and arrays of a vocabulary with such settings."""
  words = pl.Series(then.words, dtype=pl.String)
  text = text_of(words)._asdict() if then.kind == 'text' else {}
  return {
    **settings,
    'kind': then.kind,
    'batches': then.batches,
    **then.snapshot._asdict(),
    **text,
  }


def then_of(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Then:
  """The inverse of `state_of`.

  Raises:
    UserError: it is of other settings, or no such state.
  """
  kind: Any = state.get('kind')
  batches: Any = state.get('batches')
  text = ('data', 'ends') if kind == 'text' else ()
  saved.check(state, settings, (*Snapshot._fields, *text))
  snapshot = Snapshot(*(state[name] for name in Snapshot._fields))
  words = of_arrays(state).words if text else None
  then = Then(
    kind,
    batches,
    snapshot,
    [] if words is None else words.to_list(),
  )
  if not _is_whole(then, settings['size'], settings['candidates']):
    refuse()
  return then


def refuse() -> NoReturn:
  """Says that a state cannot be one.

  Raises:
    UserError: always.
  """
  raise UserError(
    'a state must be whole',
    got='one that is damaged',
    where='set_state, state',
    hint='give what get_state returned',
  )


def _is_whole(then: Then, size: int, candidates: int) -> bool:
  """Whether a state from outside can be one."""
  snapshot = then.snapshot
  ids, last, waiting, sights, waiting_last = map(len, snapshot)
  return (
    then.kind in ('', 'int64', 'uint64', 'text')
    and is_whole(then.batches, 0, _MOST)
    and ids == last < size
    and waiting == sights == waiting_last <= candidates
    and all(array.dtype.kind in 'iu' for array in snapshot)
    and all(
      ((batch > 0) & (batch <= then.batches)).all()
      for batch in (snapshot.last, snapshot.waiting_last)
    )
    and len(then.words) == (ids if then.kind == 'text' else 0)
  )
