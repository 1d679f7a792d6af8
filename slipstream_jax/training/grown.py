"""Growing vocabularies where nobody trains: as they are, as they will be."""

from collections.abc import Mapping

from slipstream_jax.errors import UserError
from slipstream_jax.inputs.growing import Replace
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from slipstream_jax.vocabulary.history import frozen_at, Position


def still(grown: Mapping[str, Position]) -> Replace:
  """To score: the rows that training has given to ids so far, and no others.

  Args:
    grown: by table, its vocabulary as trained.
  """

  def frozen(table: str, vocabulary: GrowingVocabulary) -> Vocabulary:
    if table in grown:
      return frozen_at(grown[table])
    return vocabulary.frozen()

  return frozen


def rehearsed(grown: Mapping[str, Position]) -> Replace:
  """To look ahead: a vocabulary that grows as the one trained is going to."""

  def copied(table: str, vocabulary: GrowingVocabulary) -> GrowingVocabulary:
    return vocabulary.copy(grown.get(table))

  return copied


def as_trained(grown: Mapping[str, Position], table: str) -> Vocabulary:
  """The vocabulary of a table as trained.

  Raises:
    UserError: there is none.
  """
  if table not in grown:
    raise UserError(
      'only a table whose vocabulary grew while training has one',
      got=repr(table),
      where='Trainer.vocabulary, table',
      hint='give slip.batches(..., vocabularies={...: GrowingVocabulary(...)}),'
      ' or ask the one that was fitted',
    )
  return frozen_at(grown[table])
