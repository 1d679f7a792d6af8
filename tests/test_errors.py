"""The one error that users cause."""

import pickle

from slipstream_jax.errors import UserError


def test_it_is_a_value_error_and_survives_pickling():
  error = UserError('a must be 1', got=2, where='f, a', hint='set it')
  assert isinstance(error, ValueError)
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) == 'a must be 1, got 2 (f, a); set it.'
  assert (again.rule, again.got, again.where) == ('a must be 1', 2, 'f, a')
