"""Copies and updates of rows, and sums of bags, as XLA FFI targets on a CPU.

XLA copies every looked-up row before it sums, and adds gradients on one thread.
It takes up to four times as long to gather rows. These loops share bags and
rows among threads. One thread takes a sum, in the order of lookups. So no bit
depends on the number of threads.

A target is a C function that numba compiles, so the package needs no compiled
extension. It reads XLA's call frame (xla/ffi/api/c_api.h) by offsets. Its
threads are made by pthread_create: numba's own ones run one loop at a time, and
end the process if two threads ask.
"""

import ctypes
import functools
import os
import sys
import threading
from typing import Any, no_type_check

import jax
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
import numpy as np

from slipstream_jax.hashing import prefetch

POOL, SPREAD = 'slipstream_pool_bags', 'slipstream_spread_bags'
TAKE, UPDATE = 'slipstream_take_rows', 'slipstream_update_rows'
"""Names of the targets, which JAX's cache of compiled programs keeps."""
limits = (ctypes.c_int64 * 2)(1, 1 << 19)
"""Most threads of one call, and the bytes that are worth one. To start a thread
takes 20 us."""

_WORKER, _LIMITS = 'slipstream_row_worker', 'slipstream_row_limits'
_CHUNKS = 8  # parts of the work for each thread
_AHEAD = 12  # rows to prefetch
_lock = threading.Lock()
_kept: list[Any] = []  # compiled functions, which are freed with their object
_kernel = njit(cache=True, nogil=True, error_model='numpy')
_inline = njit(inline='always')


def register() -> bool:
  """Registers the targets, once. Returns whether this machine can have them."""
  with _lock:
    return _register()


@functools.cache
def _register() -> bool:
  if sys.platform != 'linux' or os.environ.get('NUMBA_DISABLE_JIT') == '1':
    return False
  limits[0] = len(os.sched_getaffinity(0))
  binding.add_symbol(_LIMITS, ctypes.addressof(limits))
  # Its address must be known before the targets are linked.
  binding.add_symbol(_WORKER, _compiled(_worker))
  new = ctypes.pythonapi.PyCapsule_New
  new.restype = ctypes.py_object
  new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
  targets = {POOL: _pool, SPREAD: _spread, TAKE: _take, UPDATE: _update}
  for name, target in targets.items():
    capsule = new(_compiled(target), None, None)
    jax.ffi.register_ffi_target(name, capsule, platform='cpu', api_version=1)
  return True


def _compiled(function: Any) -> int:
  """Returns the address of a function of one address."""
  kind = types.int64(types.int64)
  _kept.append(cfunc(kind, cache=True, error_model='numpy')(function))
  address: int = _kept[-1].address
  return address


# Memory by its address.


@intrinsic
@no_type_check
def _pointer(typing: Any, address: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

  return types.voidptr(types.int64), codegen


@_inline
@no_type_check
def _ints(address: int, count: int) -> np.ndarray:
  return carray(_pointer(address), count, np.int32)


@_inline
@no_type_check
def _longs(address: int, count: int) -> np.ndarray:
  return carray(_pointer(address), count, np.int64)


@_inline
@no_type_check
def _bytes(address: int, count: int) -> np.ndarray:
  return carray(_pointer(address), count, np.uint8)


@_inline
@no_type_check
def _floats(address: int, count: int) -> np.ndarray:
  return carray(_pointer(address), count, np.float32)


# Sums in registers.


class _Vector(types.Type):
  """Floats in registers."""

  def __init__(self, lanes: int) -> None:
    super().__init__(f'float32x{lanes}')
    self.ir: Any = ir.VectorType(ir.FloatType(), lanes)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
  def __init__(self, manager: Any, kind: Any) -> None:
    super().__init__(manager, kind, kind.ir)


@intrinsic(prefer_literal=True)
@no_type_check
def _filled(typing: Any, value: Any, lanes: Any) -> Any:
  """Returns a vector of a value."""
  kind = _Vector(lanes.literal_value)

  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    word, count = ir.IntType(32), kind.ir.count
    one = ir.Constant(kind.ir, ir.Undefined)
    one = builder.insert_element(one, args[0], word(0))
    places = ir.Constant(ir.VectorType(word, count), [0] * count)
    return builder.shuffle_vector(one, one, places)

  return kind(types.float32, lanes), codegen


@intrinsic(prefer_literal=True)
@no_type_check
def _load(typing: Any, address: Any, lanes: Any) -> Any:
  kind = _Vector(lanes.literal_value)

  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], kind.ir.as_pointer())
    return builder.load(pointer, align=4)

  return kind(types.int64, lanes), codegen


@intrinsic
@no_type_check
def _plus(typing: Any, a: Any, b: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fadd(*args)

  return a(a, b), codegen


@intrinsic
@no_type_check
def _times(typing: Any, a: Any, b: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fmul(*args)

  return a(a, b), codegen


@intrinsic
@no_type_check
def _plus_product(typing: Any, a: Any, b: Any, c: Any) -> Any:
  """Returns a + b * c, rounded once, as XLA does it."""

  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = args[0].type
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0
    name = f'llvm.fma.v{lanes}f32' if lanes else 'llvm.fma.f32'
    kind = ir.FunctionType(kind, [kind] * 3)
    call = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(call, [args[1], args[2], args[0]])

  return a(a, b, c), codegen


@intrinsic
@no_type_check
def _store(typing: Any, vector: Any, address: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[1], vector.ir.as_pointer())
    builder.store(args[0], pointer, align=4)

  return types.void(vector, types.int64), codegen


@_inline
@no_type_check
def _sum_lanes(
  source: int,
  dim: int,
  items: np.ndarray,
  factors: np.ndarray,
  first: int,
  end: int,
  start: float,
  out: int,
  lanes: int,
) -> None:
  """Runs `_sum` on some columns, from those of the addresses on."""
  last, total = len(items) - 1, _filled(start, lanes)
  for at in range(first, end):
    soon = source + 4 * dim * max(0, np.int64(items[min(at + _AHEAD, last)]))
    for line in range(0, 4 * lanes, 64):
      prefetch(soon + line)
    if items[at] >= 0:
      row = _load(source + 4 * dim * np.int64(items[at]), lanes)
      if len(factors):
        row = _times(row, _filled(factors[at], lanes))
      total = _plus(total, row)
    else:
      total = _plus(total, _filled(np.float32(0), lanes))
  _store(total, out)


@_kernel
@no_type_check
def _sum(
  source: int,
  dim: int,
  items: np.ndarray,
  factors: np.ndarray,
  first: int,
  end: int,
  start: float,
  out: int,
) -> None:
  """Adds products of factors and rows of floats [dim] to `start`, in order.

  Items are numbers of rows. A negative one adds 0. Without factors, all are 1.
  `source` and `out` are addresses.
  """
  none, d = factors[:0], 0
  while d + 128 <= dim and not len(factors):
    at, to = source + 4 * d, out + 4 * d
    _sum_lanes(at, dim, items, none, first, end, start, to, 128)
    d += 128
  while d + 64 <= dim:
    at, to = source + 4 * d, out + 4 * d
    if len(factors):
      _sum_lanes(at, dim, items, factors, first, end, start, to, 64)
    else:
      _sum_lanes(at, dim, items, none, first, end, start, to, 64)
    d += 64
  while d + 16 <= dim:
    at, to = source + 4 * d, out + 4 * d
    if len(factors):
      _sum_lanes(at, dim, items, factors, first, end, start, to, 16)
    else:
      _sum_lanes(at, dim, items, none, first, end, start, to, 16)
    d += 16
  while d < dim:
    at, to = source + 4 * d, out + 4 * d
    _sum_lanes(at, dim, items, factors, first, end, start, to, 1)
    d += 1


@_kernel
@no_type_check
def _copy(source: int, nbytes: int, out: int) -> None:
  """Copies bytes from an address to another."""
  at = 0
  while at + 64 <= nbytes:
    _store(_load(source + at, 16), out + at)
    at += 64
  while at + 4 <= nbytes:
    _store(_load(source + at, 1), out + at)
    at += 4
  if at < nbytes:
    here, there = _bytes(source + at, 4), _bytes(out + at, 4)
    for i in range(nbytes - at):
      there[i] = here[i]


# The work, as chunks of a job that threads take until none is left.

_JOB = np.dtype(
  [
    (name, np.int64)
    for name in (
      *('next', 'chunks', 'kind', 'source', 'inverse', 'starts', 'out'),
      *('ends', 'order', 'examples', 'columns', 'bags', 'rows', 'dim'),
      *('factors', 'ordered', 'frozen', 'touched', 'squares', 'numbers'),
      *('others', 'more', 'parts', 'count'),
    )
  ]
)
_POOLS, _SPREADS, _UPDATES, _TAKES, _SORTS = range(5)  # kinds of jobs


@_inline
@no_type_check
def _factors(job: Any, address: int) -> np.ndarray:
  """Returns the factor of each lookup, or none."""
  count = job.examples * job.columns if address != 0 else 0
  return _floats(address, count)


@_inline
@no_type_check
def _has_long_bags(job: Any) -> bool:
  """Whether bags are worth taking feature by feature.

  The rows of a table are near each other, so its most popular ones then stay in
  the processor's cache. Short bags are faster example by example.
  """
  return job.columns >= 4 * job.bags


@_kernel
@no_type_check
def _pool_chunk(job: Any, chunk: int) -> None:
  """Sums the rows of each of a chunk's bags."""
  examples, dim = job.examples, job.dim
  inverse = _ints(job.inverse, examples * job.columns)
  factors = _factors(job, job.factors)
  starts = _ints(job.starts, job.bags + 1)
  if not _has_long_bags(job):
    end = examples * (chunk + 1) // job.chunks
    for example in range(examples * chunk // job.chunks, end):
      for bag in range(job.bags):
        _pool_bag(job, inverse, starts, factors, dim, example, bag)
    return
  # An example of a bag costs as many units as it has lookups, and one more.
  total = examples * (job.columns + job.bags)
  first = total * chunk // job.chunks
  last = total * (chunk + 1) // job.chunks
  for bag in range(job.bags):
    begin, unit = starts[bag] + bag, starts[bag + 1] - starts[bag] + 1
    low = max(first - begin * examples, 0)
    high = min(last - begin * examples, unit * examples)
    for example in range(-(-low // unit), -(-high // unit)):
      _pool_bag(job, inverse, starts, factors, dim, example, bag)


@_inline
@no_type_check
def _pool_bag(
  job: Any,
  inverse: np.ndarray,
  starts: np.ndarray,
  factors: np.ndarray,
  dim: int,
  example: int,
  bag: int,
) -> None:
  at = example * job.columns + starts[bag]
  stop = example * job.columns + starts[bag + 1]
  to = job.out + 4 * dim * (example * job.bags + bag)
  # Keeps what is below 2**-126.
  if stop - at == 1 and inverse[at] >= 0 and job.factors == 0:
    _copy(job.source + 4 * dim * np.int64(inverse[at]), 4 * dim, to)
  else:
    # Minus zero, which changes nothing that is added to it.
    start = np.float32(-0.0)
    _sum(job.source, dim, inverse, factors, at, stop, start, to)


@_kernel
@no_type_check
def _parts(job: Any) -> np.ndarray:
  """Splits bags into parts that share no row, i64[parts, 3].

  A part is its first and last row and how many lookups it has, in the order of
  rows. As unique rows are ordered by table, features of different tables are
  in different parts.
  """
  if not _has_long_bags(job):  # one part of all rows
    whole = np.zeros((1, 3), np.int64)
    whole[0, 1] = job.rows - 1
    return whole
  columns, width = job.columns, job.examples * job.columns
  inverse, starts = _ints(job.inverse, width), _ints(job.starts, job.bags + 1)
  first = np.full(columns, job.rows, np.int32)
  last, count = np.full(columns, -1, np.int32), np.zeros(columns, np.int32)
  for example in range(job.examples):
    some = inverse[example * columns : (example + 1) * columns]
    for k in range(columns):  # in registers, many columns at a time
      row = some[k]
      first[k] = min(first[k], row if row >= 0 else first[k])
      last[k] = max(last[k], row)
      count[k] += row >= 0
  parts, number = np.empty((job.bags, 3), np.int64), 0
  for bag in range(job.bags):
    low, high, lookups = job.rows, -1, 0
    for k in range(starts[bag], starts[bag + 1]):
      low, high = min(low, first[k]), max(high, last[k])
      lookups += count[k]
    if high < 0:
      continue
    # Takes in all parts with rows in between, and goes before the next one.
    at = 0
    while at < number and parts[at, 1] < low:
      at += 1
    end = at
    while end < number and parts[end, 0] <= high:
      low, high = min(low, parts[end, 0]), max(high, parts[end, 1])
      lookups += parts[end, 2]
      end += 1
    rest = parts[end:number].copy()
    parts[at, 0], parts[at, 1], parts[at, 2] = low, high, lookups
    number = at + 1 + len(rest)
    parts[at + 1 : number] = rest
  return parts[:number]


@_kernel
@no_type_check
def _sort_chunk(job: Any, chunk: int) -> None:
  """Lists the bags that look up each row, and factors, by order of lookups.

  It does so for the rows of some parts. What it needs of a part fits the
  processor's cache.
  """
  parts = _longs(job.parts, 3 * job.count).reshape(-1, 3)
  inverse = _ints(job.inverse, job.examples * job.columns)
  starts, ends = _ints(job.starts, job.bags + 1), _ints(job.ends, job.rows)
  own = np.empty(job.bags, np.int64)
  total = 0
  for part in range(job.count):
    begin = 0 if part == 0 else parts[part, 0]
    end = job.rows if part + 1 == job.count else parts[part + 1, 0]
    if part % job.chunks == chunk:
      number = 0
      for bag in range(job.bags):
        if _is_within(job, inverse, starts, bag, begin, end):
          own[number] = bag
          number += 1
      _sort_part(job, own[:number], ends[begin:end], begin, total)
    total += parts[part, 2]


@_kernel
@no_type_check
def _is_within(
  job: Any,
  inverse: np.ndarray,
  starts: np.ndarray,
  bag: int,
  begin: int,
  end: int,
) -> bool:
  """Whether a bag looks up rows of this range, and so no others."""
  for example in range(job.examples):
    for k in range(starts[bag], starts[bag + 1]):
      row = inverse[example * job.columns + k]
      if row >= 0:
        return begin <= row < end
  return False


@_kernel
@no_type_check
def _sort_part(
  job: Any, bags: np.ndarray, ends: np.ndarray, begin: int, total: int
) -> None:
  """Runs `_sort_chunk` for the rows from `begin` on, which some bags look up.

  The rows before them have `total` lookups.
  """
  columns, width = job.columns, job.examples * job.columns
  inverse, starts = _ints(job.inverse, width), _ints(job.starts, job.bags + 1)
  order, ordered = _ints(job.order, width), _floats(job.ordered, width)
  factors = _floats(job.factors, width)
  own, numbers = np.empty(columns, np.uint64), np.empty(columns, np.int32)
  count = 0
  for bag in bags:
    for column in range(starts[bag], starts[bag + 1]):
      own[count], numbers[count] = column, bag
      count += 1
  # Unsigned, so that no index is taken from the end.
  base, all_bags = np.uint64(begin), job.bags
  weighted = job.factors != 0
  ends[:] = 0
  for example in range(job.examples):
    first = np.uint64(example * columns)
    for k in range(count):
      row = inverse[first + own[k]]
      if row >= 0:
        ends[np.uint64(row) - base] += np.int32(1)
  for row in range(len(ends)):  # first where each row's bags start
    total, ends[row] = total + ends[row], total
  for example in range(job.examples):
    first, number = np.uint64(example * columns), np.int32(example * all_bags)
    for k in range(count):
      row = inverse[first + own[k]]
      if row >= 0:
        at = ends[np.uint64(row) - base]
        order[np.uint64(at)] = number + numbers[k]
        if weighted:
          ordered[np.uint64(at)] = factors[first + own[k]]
        ends[np.uint64(row) - base] = at + np.int32(1)


@_kernel
@no_type_check
def _first_row(ends: np.ndarray, target: int) -> int:
  """Returns the first row whose bags end at `target` or later."""
  low, high = 0, len(ends)
  while low < high:
    middle = (low + high) // 2
    if ends[middle] < target:
      low = middle + 1
    else:
      high = middle
  return low


@_kernel
@no_type_check
def _spread_chunk(job: Any, chunk: int) -> None:
  """Sums the gradients of the bags that look up each row of a chunk.

  They are the result, or update the row.
  """
  ends = _ints(job.ends, job.rows)
  order = _ints(job.order, job.examples * job.columns)
  total = np.int64(ends[-1])  # chunks have about as many lookups each
  row = 0 if chunk == 0 else _first_row(ends, total * chunk // job.chunks + 1)
  end = job.rows
  if chunk + 1 < job.chunks:
    end = _first_row(ends, total * (chunk + 1) // job.chunks + 1)
  at = ends[row - 1] if row > 0 else 0
  factors = _factors(job, job.ordered)
  gradient, zero = np.empty(job.dim + 16, np.float32), np.float32(0)
  while row < end:
    to, stop = job.out + 4 * job.dim * row, ends[row]
    if job.kind == _UPDATES:
      to = gradient.ctypes.data
    if job.kind == _SPREADS or at < stop:
      _sum(job.source, job.dim, order, factors, at, stop, zero, to)
    if job.kind == _UPDATES:
      _update_row(job, row, gradient, at < stop)
    at = stop
    row += 1


@_kernel
@no_type_check
def _update_row(
  job: Any, row: int, gradient: np.ndarray, is_used: bool
) -> None:
  """Updates a row by its gradient, which is overwritten."""
  if not is_used:
    _bytes(job.touched, job.rows)[row] = 0
    return
  factor, eps = _floats(job.numbers, 2)
  frozen = _bytes(job.frozen, job.rows)[row] != 0
  if job.squares != 0:
    sums = _floats(job.squares, job.rows)
    total = sums[row] + _mean_square(gradient, job.dim)
    root = np.sqrt(total) + eps
    for d in range(job.dim):
      gradient[d] /= root
    if not frozen:
      sums[row] = total
  touched = False
  for d in range(job.dim):
    touched |= gradient[d] * factor != 0
  _bytes(job.touched, job.rows)[row] = touched
  if not frozen:
    values = _floats(job.out + 4 * job.dim * row, job.dim)
    for d in range(job.dim):
      values[d] = _plus_product(values[d], gradient[d], factor)


@_kernel
@no_type_check
def _mean_square(x: np.ndarray, dim: int) -> float:
  """Returns the mean square of `dim` elements. 16 sums run side by side."""
  x[dim:] = 0
  at, end = x.ctypes.data, x.ctypes.data + 4 * dim
  sums = _filled(np.float32(0), 16)
  while at < end:
    some = _load(at, 16)
    sums = _plus_product(sums, some, some)
    at += 64
  rest = x[dim:]
  _store(sums, rest.ctypes.data)
  half = 8
  while half:
    for i in range(half):
      rest[i] += rest[half + i]
    half //= 2
  return rest[0] / np.float32(dim)


@_kernel
@no_type_check
def _take_chunk(job: Any, first: int, end: int) -> None:
  """Copies rows of `dim` bytes from their places. 0 where there is none."""
  places, nbytes = _ints(job.inverse, job.examples), job.dim
  for i in range(first, end):
    soon = _place(job, places[min(i + _AHEAD, end - 1)])
    for line in range(0, nbytes, 64):
      prefetch(soon + line)
    row, out = _place(job, places[i]), job.out + nbytes * i
    if row != 0:
      _copy(row, nbytes, out)
    else:
      _bytes(out, nbytes)[:] = 0


@_inline
@no_type_check
def _place(job: Any, place: int) -> int:
  """Returns the address of a row, or of one of the others after it, or 0."""
  place = np.int64(place)
  address = 0
  if 0 <= place < job.rows:
    address = job.source + job.dim * place
  elif 0 <= place - job.rows < job.more:
    address = job.others + job.dim * (place - job.rows)
  return address


@intrinsic
@no_type_check
def _take_number(typing: Any, address: Any) -> Any:
  """Returns an i64 and increments it, as one operation for all threads."""

  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
    return builder.atomic_rmw('add', pointer, ir.IntType(64)(1), 'monotonic')

  return types.int64(types.int64), codegen


@_kernel
@no_type_check
def _take_part(address: int) -> None:
  job = carray(_pointer(address), 1, _JOB)[0]
  while True:
    chunk = _take_number(address)  # of `next`, the first field
    if chunk >= job.chunks:
      return
    first = job.examples * chunk // job.chunks
    end = job.examples * (chunk + 1) // job.chunks
    if job.kind == _POOLS:
      _pool_chunk(job, chunk)
    elif job.kind == _SORTS:
      _sort_chunk(job, chunk)
    elif job.kind == _TAKES:
      _take_chunk(job, first, end)
    else:
      _spread_chunk(job, chunk)


@no_type_check
def _worker(address: int) -> int:
  _take_part(address)
  return 0


# Threads.

_address = types.int64
_create = types.ExternalFunction(
  'pthread_create', types.intc(_address, _address, _address, _address)
)
_join = types.ExternalFunction('pthread_join', types.intc(_address, _address))


def _address_of(name: str) -> Any:
  """Returns a compiled function of the address of a symbol."""

  @intrinsic
  @no_type_check
  def address(typing: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
      value = cgutils.add_global_variable(builder.module, ir.IntType(8), name)
      return builder.ptrtoint(value, ir.IntType(64))

    return types.int64(), codegen

  return address


_worker_address, _limits_address = map(_address_of, (_WORKER, _LIMITS))


@_kernel
@no_type_check
def _run(job: Any, nbytes: int) -> None:
  """Runs a job that reads some bytes."""
  most, enough = _longs(_limits_address(), 2)
  count = max(1, min(most, nbytes // max(1, enough)))
  job[0].chunks = 1 if count == 1 else _CHUNKS * count
  address, ids = job.ctypes.data, np.zeros(count, np.int64)
  for i in range(1, count):
    # A thread that cannot start has its chunks taken by the others.
    at = ids.ctypes.data + 8 * i
    if _create(at, 0, _worker_address(), address) != 0:
      ids[i] = 0
  _take_part(address)
  for i in range(1, count):
    if ids[i] != 0:
      _join(ids[i], 0)


@_kernel
@no_type_check
def _sort(jobs: np.ndarray) -> None:
  """Sorts the bags of a job by rows, which the sums of gradients read."""
  parts, sorting = _parts(jobs[0]), jobs.copy()
  job = sorting[0]
  job.kind, job.parts, job.count = _SORTS, parts.ctypes.data, len(parts)
  if len(parts) == 0:
    _ints(job.ends, job.rows)[:] = 0
    return
  _run(sorting, 16 * job.examples * job.columns)


# What XLA calls. An operand's address is at 24 of its buffer, its shape at 40.


@_inline
@no_type_check
def _only_asks(frame: int) -> bool:
  """Whether XLA only asks for the version of its API, which is then told."""
  extension = _longs(frame + 8, 1)[0]
  if extension == 0 or _ints(extension + 8, 1)[0] != 1:
    return False
  version = _ints(_longs(extension + 24, 1)[0] + 24, 2)
  version[0], version[1] = 0, 1
  return True


@_inline
@no_type_check
def _operands(frame: int) -> int:
  return _longs(frame + 56, 1)[0]


@_inline
@no_type_check
def _operand(frame: int, number: int) -> int:
  return _longs(_longs(frame + 72, 1)[0], 7)[number]


@_inline
@no_type_check
def _result(frame: int, number: int) -> int:
  return _longs(_longs(frame + 112, 1)[0], 4)[number]


@_inline
@no_type_check
def _data(buffer: int) -> int:
  return _longs(buffer + 24, 1)[0]


@_inline
@no_type_check
def _shape(buffer: int) -> np.ndarray:
  return _longs(_longs(buffer + 40, 1)[0], 3)


@_kernel
@no_type_check
def _bags_job(frame: int, rows: int) -> np.ndarray:
  """Returns a job with the fields that all targets of bags have, [1]."""
  inverse, starts = _operand(frame, 1), _operand(frame, 2)
  jobs = np.zeros(1, _JOB)
  job = jobs[0]
  job.source, job.out = _data(_operand(frame, 0)), _data(_result(frame, 0))
  job.inverse, job.starts = _data(inverse), _data(starts)
  job.examples, job.columns = _shape(inverse)[0], _shape(inverse)[1]
  job.bags = _shape(starts)[0] - 1
  job.rows, job.dim = _shape(rows)[0], _shape(rows)[1]
  return jobs


@no_type_check
def _pool(frame: int) -> int:
  """Maps f32[P, D], i32[B, K] and i32[G + 1] to f32[B, G, D].

  A fourth operand, f32[B, K], has the factor of each lookup.
  """
  if _only_asks(frame):
    return 0
  job = _bags_job(frame, _operand(frame, 0))
  if _operands(frame) == 4:
    job[0].factors = _data(_operand(frame, 3))
  _run(job, 4 * job[0].dim * job[0].examples * job[0].columns)
  return 0


@no_type_check
def _spread(frame: int) -> int:
  """Maps f32[B, G, D], i32[B, K] and i32[G + 1] to f32[P, D].

  Its other results are memory to work in: i32[P] and i32[B * K]. With factors,
  as in `_pool`, there is also f32[B * K].
  """
  if _only_asks(frame):
    return 0
  job = _bags_job(frame, _result(frame, 0))
  job[0].kind = _SPREADS
  job[0].ends, job[0].order = _data(_result(frame, 1)), _data(_result(frame, 2))
  if _operands(frame) == 4:
    job[0].factors = _data(_operand(frame, 3))
    job[0].ordered = _data(_result(frame, 3))
  _sort(job)
  _run(job, 4 * job[0].dim * job[0].examples * job[0].columns)
  return 0


@no_type_check
def _update(frame: int) -> int:
  """Updates f32[P, D], result 0, by the gradient of their bags, in place.

  Operands 0 to 2 are those of `_spread`. The others are the rows, which of them
  are frozen, bool[P], minus the learning rate and a number that is added to
  roots, f32[2], and, for row-wise Adagrad, the sums of squares f32[P], which
  are the last result. Results 1 to 3 are which rows were touched, bool[P], and
  memory as in `_spread`.
  """
  if _only_asks(frame):
    return 0
  jobs = _bags_job(frame, _result(frame, 0))
  job = jobs[0]
  job.kind, job.touched = _UPDATES, _data(_result(frame, 1))
  job.ends, job.order = _data(_result(frame, 2)), _data(_result(frame, 3))
  job.frozen, job.numbers = _data(_operand(frame, 4)), _data(_operand(frame, 5))
  if _operands(frame) == 7:
    job.squares = _data(_operand(frame, 6))
  _sort(jobs)
  _run(jobs, 4 * job.dim * job.examples * job.columns)
  return 0


@no_type_check
def _take(frame: int) -> int:
  """Maps rows [C, ...], places i32[P] and i32[1], bytes of a row, to [P, ...].

  A fourth operand has rows [S, ...] that follow on those. A place outside of
  them gives 0.
  """
  if _only_asks(frame):
    return 0
  rows, places = _operand(frame, 0), _operand(frame, 1)
  jobs = np.zeros(1, _JOB)
  job = jobs[0]
  job.kind, job.source, job.rows = _TAKES, _data(rows), _shape(rows)[0]
  job.inverse, job.examples = _data(places), _shape(places)[0]
  job.out = _data(_result(frame, 0))
  job.dim = _ints(_data(_operand(frame, 2)), 1)[0]
  if _operands(frame) == 4:
    others = _operand(frame, 3)
    job.others, job.more = _data(others), _shape(others)[0]
  _run(jobs, job.dim * job.examples)
  return 0
