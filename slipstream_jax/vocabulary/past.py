"""The state of a growing vocabulary, and its conversion to plain arrays."""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import polars as pl

from slipstream_jax.columns.ids import Kind, raw_ids, RawIds, text_of
from slipstream_jax.errors import check_whole, is_whole, UserError
from slipstream_jax.vocabulary import saved
from slipstream_jax.vocabulary.growth import Snapshot
from slipstream_jax.vocabulary.known import EMPTY, from_arrays

_MOST = (1 << 31) - 1  # batches and rows are numbered in i32


def settings_of(
  size: int, admit_after: int, candidates: int | None
) -> dict[str, Any]:
  """Returns the settings with which a state must agree.

  Raises:
    UserError: an argument of `GrowingVocabulary` is out of range.
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
    # No id waits if all get a row at once.
    'candidates': int(candidates) if admit_after > 1 else 0,
  }


class PastState(NamedTuple):
  """A vocabulary's state after some batch."""

  kind: Kind
  batches: int
  """Number of batches taken."""
  snapshot: Snapshot
  words: list[str | None]
  """Texts of the rows from 1 on, if ids are text."""

  @property
  def known(self) -> RawIds:
    """The ids of the rows from 1 on."""
    if self.words:
      words = pl.Series(self.words, dtype=pl.String)
      return raw_ids(words, 'GrowingVocabulary')
    bits = self.snapshot.ids
    return EMPTY._replace(kind=self.kind, bits=bits, shape=bits.shape)


def to_dict(past: PastState, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Converts a state to numbers, words and arrays, with the settings."""
  words = pl.Series(past.words, dtype=pl.String)
  text = text_of(words)._asdict() if past.kind == 'text' else {}
  return {
    **settings,
    'kind': past.kind,
    'batches': past.batches,
    **past.snapshot._asdict(),
    **text,
  }


def from_dict(
  state: Mapping[str, Any], settings: Mapping[str, Any]
) -> PastState:
  """Restores a state from the result of `to_dict`.

  Raises:
    UserError: it has other settings, or is not such a state.
  """
  kind: Any = state.get('kind')
  batches: Any = state.get('batches')
  text = ('data', 'ends') if kind == 'text' else ()
  saved.check(state, settings, (*Snapshot._fields, *text))
  snapshot = Snapshot(*(state[name] for name in Snapshot._fields))
  words = from_arrays(state).words if text else None
  past = PastState(
    kind,
    batches,
    snapshot,
    [] if words is None else words.to_list(),
  )
  if not _is_whole(past, settings['size'], settings['candidates']):
    raise_damaged()
  return past


def raise_damaged() -> NoReturn:
  """Raises the error for an invalid state.

  Raises:
    UserError: always.
  """
  raise UserError(
    'a state must be complete and consistent',
    got='a damaged state',
    where='set_state, state',
    hint='give what get_state returned',
  )


def _is_whole(past: PastState, size: int, candidates: int) -> bool:
  """Whether a state from outside is consistent."""
  snapshot = past.snapshot
  ids, last, waiting, sights, waiting_last = map(len, snapshot)
  return (
    past.kind in ('', 'int64', 'uint64', 'text')
    and is_whole(past.batches, 0, _MOST)
    and ids == last < size
    and waiting == sights == waiting_last <= candidates
    and all(array.dtype.kind in 'iu' for array in snapshot)
    and all(
      ((batch > 0) & (batch <= past.batches)).all()
      for batch in (snapshot.last, snapshot.waiting_last)
    )
    and len(past.words) == (ids if past.kind == 'text' else 0)
  )
