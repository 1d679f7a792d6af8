"""Layers that models share: the MLP, and what it reads."""

from collections.abc import Mapping, Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.errors import UserError
from slipstream_jax.types import DenseFeatures

summed_in_f32 = functools.partial(
  jax.lax.dot_general, preferred_element_type=jnp.float32
)
"""Matrix product whose factors may be in half precision, with sums in f32."""


def side_by_side(dense: DenseFeatures) -> Float[jax.Array, 'B I']:
  """Returns dense features as one array. Named ones keep their order."""
  if not isinstance(dense, Mapping):
    return dense
  columns = [x[:, None] if x.ndim == 1 else x for x in dense.values()]
  return jnp.concatenate(columns, axis=1)


def split_off(
  dense: DenseFeatures, key: str | int | None, width: int, where: str
) -> tuple[Float[jax.Array, 'B _I'], Float[jax.Array, 'B _W'] | None]:
  """Splits one dense feature off from the others, which it returns first.

  Args:
    dense: f32[B, I], or by name.
    key: its name, or the number of its first column in one array. None: there
      is no such feature.
    width: number of its columns.
    where: the argument that has the key, for errors.

  Raises:
    UserError: there is no such feature, or it has another width.
  """
  if key is None:
    return side_by_side(dense), None
  rest, one = dense, None
  if isinstance(dense, Mapping):
    rest = {name: x for name, x in dense.items() if name != key}
    if key in dense:
      one = side_by_side({'': dense[str(key)]})
  elif isinstance(key, int) and 0 <= key <= dense.shape[1] - width:
    one = dense[:, key : key + width]
    rest = jnp.concatenate([dense[:, :key], dense[:, key + width :]], axis=1)
  if one is None or one.shape[1] != width:
    raise UserError(
      f'it must be a dense feature [B, {width}]: its name if it has one, else'
      ' the number of its first column',
      got=repr(key),
      where=where,
      hint="give dense features by name, such as {'when': times}",
    )
  return (side_by_side(rest) if len(rest) else one[:, :0]), one


def widths_to_logit(sizes: Sequence[int], where: str) -> tuple[int, ...]:
  """Returns the layer widths of an MLP that ends in one logit.

  A last width of 1 is the logit's, as in the DLRM reference and TorchRec.
  `where` names the argument.

  Raises:
    UserError: a width below 1, or a hidden layer of width 1.
  """
  sizes = tuple(sizes)
  hidden = sizes[:-1] if sizes[-1:] == (1,) else sizes
  if any(size < 2 for size in hidden):
    raise UserError(
      'hidden layers before the logit must have a width of at least 2, as one'
      ' of 1 passes on one number at most',
      got=list(sizes),
      where=where,
      hint='leave it out',
    )
  return (*hidden, 1)


class MLP(nn.Module):
  """Dense layers with ReLU between them, initialised as DLRM does.

  Attributes:
    sizes: width of each layer.
    activate_last: whether the last layer has a ReLU as well.
    dtype: dtype of matrix products. Sums and parameters are f32.
  """

  sizes: Sequence[int]
  activate_last: bool = True
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x: Float[jax.Array, 'B I']) -> Float[jax.Array, 'B O']:
    """Maps features f32[B, I] to f32[B, sizes[-1]]."""
    for i, size in enumerate(self.sizes):
      x = nn.Dense(
        size,
        kernel_init=nn.initializers.glorot_normal(),
        bias_init=nn.initializers.normal(size**-0.5),
        dtype=self.dtype,
        dot_general=summed_in_f32,
      )(x)
      if self.activate_last or i + 1 < len(self.sizes):
        x = nn.relu(x)
    return x
