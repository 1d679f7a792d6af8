"""Members of lists by the names that configs give them."""

from typing import TypeVar

from slipstream_jax.errors import UserError

T = TypeVar('T')


def choose(members: dict[str, T], name: str, where: str) -> T:
  """The member of that name.

  Raises:
    UserError: there is none.
  """
  if name not in members:
    raise UserError(
      f'{where} must be one of {", ".join(members)}',
      got=repr(name),
      where=where,
      mend='pick one of them',
    )
  return members[name]
