"""Positions of schedules as what a checkpoint can hold: JSON and bytes."""

import io
from typing import Any

import numpy as np

from slipstream_jax.data.scheduled import State

_ARRAY = '__array__'


def pack(state: State) -> tuple[State, np.ndarray]:
  """The state with arrays replaced by their numbers, and them as u8[n]."""
  arrays: list[np.ndarray] = []

  def walk(value: Any) -> Any:
    if isinstance(value, dict):
      return {key: walk(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
      arrays.append(value)
      return {_ARRAY: len(arrays) - 1}
    return value.item() if isinstance(value, np.generic) else value

  packed = walk(state)
  file = io.BytesIO()
  np.savez(file, *arrays)
  return packed, np.frombuffer(file.getvalue(), np.uint8)


def unpack(packed: State, data: np.ndarray) -> State:
  """The inverse of `pack`."""
  arrays = np.load(io.BytesIO(data.tobytes()), allow_pickle=False)

  def walk(value: Any) -> Any:
    if not isinstance(value, dict):
      return value
    if _ARRAY in value:
      return arrays[f'arr_{value[_ARRAY]}']
    return {key: walk(inner) for key, inner in value.items()}

  return {key: walk(value) for key, value in packed.items()}
