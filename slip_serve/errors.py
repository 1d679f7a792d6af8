"""The one error that a user of `slip_serve` can cause, in one sentence."""

from slipstream_jax.errors import UserError


class ServeError(UserError):
  """Bad input or a damaged export: rule, got, where and hint."""
