"""Hashes, and the hash table of integers that the package shares.

Every random draw of the library uses splitmix64 (Steele et al., 2014), so any
draw can be computed by itself, and is the same on every machine.

A table maps 64-bit keys to numbers. It uses open addressing with linear probing
and has a power of two slots, more than it has keys. It comes in two layouts:

* Pairs, i64[slots, 2]: a key and its value side by side, so that a lookup reads
  one cache line. Value 0 marks a free slot. For large tables.
* Places, i32[slots]: places of keys in an array of keys, -1 for a free slot.
  The slots take a third of the cache. For the rows of one batch, whose keys are
  in an array anyway.
"""

import hashlib
from typing import Any, no_type_check

from llvmlite import ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
import numpy as np

# Kernels are marked no_type_check because numba cannot compile what jaxtyping's
# hook wraps. With numpy's error model, no test for division by 0 prevents SIMD.
kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio. Its multiples are far apart."""
_AHEAD = 64  # keys whose slots are prefetched together


@kernel
@no_type_check
def mix(x: np.uint64) -> np.uint64:
  """Applies splitmix64's finalizer, a bijection, to a u64 or to an array."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


@kernel
@no_type_check
def hashed(key: np.uint64, number: int) -> np.uint64:
  """Returns 64 bits that depend on the key and the number."""
  # splitmix64's state after `number` + 1 steps from the key. At least one step,
  # because number 0 must not give the key's own hash.
  return mix(key + np.uint64(number + 1) * GOLDEN)


@kernel
@no_type_check
def unit(bits: np.uint64) -> float:
  """Converts 64 random bits to a uniform float in [0, 1)."""
  # 53 bits, because 64 could be rounded up to 1.0 in a double.
  return np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53))


@kernel
@no_type_check
def hash_texts(data: np.ndarray, ends: np.ndarray, hashes: np.ndarray) -> None:
  """Hashes each text to 64 bits, u64[n], the same on every machine.

  Texts of the same length, at most 8 bytes, never collide.
  """
  start = 0
  for i in range(len(ends)):
    bits = mix(np.uint64(ends[i] - start + 1))
    while start < ends[i]:
      word, end = np.uint64(0), min(start + 8, ends[i])
      for at in range(end - 1, start - 1, -1):
        word = word << np.uint64(8) | np.uint64(data[at])
      bits = mix(bits ^ word)
      start = end
    hashes[i] = bits


def text_id(text: bytes) -> int:
  """Returns the id of a text in packed folders: 63 bits of BLAKE2."""
  # 63 bits are never negative, unlike the ids that stand for padding.
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


def salt(table: int) -> np.uint64:
  """Returns the salt of `bucket` for a table by its number, from 0 on."""
  # From 1 on, because `mix` maps 0 to 0. In an array, because for a scalar
  # numba returns an int.
  return mix(np.array([table + 1], np.uint64))[0]


@kernel
@no_type_check
def bucket(ids: np.uint64, salt: np.uint64, buckets: np.uint64) -> np.uint64:
  """Returns the bucket of a u64 id, or of each of an array, in [0, buckets).

  For one salt, distinct ids never collide before the modulus.
  """
  return mix(ids ^ salt) % buckets


def new_pairs(keys: int) -> np.ndarray:
  """Returns an empty table of pairs for a number of keys, at most 2/3 full."""
  return np.zeros((1 << (keys * 3 // 2).bit_length(), 2), np.int64)


@kernel
@no_type_check
def first_slot(key: int, mask: np.int64) -> np.int64:
  """Returns the slot at which the search for a key begins."""
  # The high half of a product, because its low bits depend on the key's low
  # bits only. Faster than `mix`, and spreads consecutive keys evenly.
  bits = np.uint64(key)
  bits = (bits ^ (bits >> np.uint64(32))) * GOLDEN
  return np.int64(bits >> np.uint64(32)) & mask


@kernel
@no_type_check
def slot_of(pairs: np.ndarray, key: int) -> np.int64:
  """Returns the slot in which a key is, or the free one where it would be."""
  mask = np.int64(len(pairs) - 1)
  slot = first_slot(key, mask)
  while pairs[slot, 1] != 0 and pairs[slot, 0] != key:
    slot = (slot + 1) & mask
  return slot


@kernel
@no_type_check
def insert(pairs: np.ndarray, keys: np.ndarray, values: np.ndarray) -> bool:
  """Adds i64 keys with their values, and returns whether all keys were new.

  Stops at the first key that is there.
  """
  for i in range(len(keys)):
    slot = slot_of(pairs, keys[i])
    if pairs[slot, 1] != 0:
      return False
    pairs[slot, 0], pairs[slot, 1] = keys[i], values[i]
  return True


@kernel
@no_type_check
def remove(pairs: np.ndarray, slot: np.int64) -> None:
  """Frees a slot, and moves later keys up so that they are found."""
  mask = np.int64(len(pairs) - 1)
  at = (slot + 1) & mask
  while pairs[at, 1] != 0:
    first = first_slot(pairs[at, 0], mask)
    # A key may not move in front of the start of its search.
    if ((at - first) & mask) >= ((at - slot) & mask):
      pairs[slot, 0], pairs[slot, 1] = pairs[at, 0], pairs[at, 1]
      slot = at
    at = (at + 1) & mask
  pairs[slot, 0], pairs[slot, 1] = 0, 0


@kernel
@no_type_check
def grown(pairs: np.ndarray) -> np.ndarray:
  """Returns a table of twice the size with the same keys and values."""
  larger = np.zeros((2 * len(pairs), 2), np.int64)
  for i in range(len(pairs)):
    if pairs[i, 1] != 0:
      slot = slot_of(larger, pairs[i, 0])
      larger[slot, 0], larger[slot, 1] = pairs[i, 0], pairs[i, 1]
  return larger


@kernel
@no_type_check
def touch(pairs: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> np.int64:
  """Computes the first slots of keys, i64[n], and reads them into the cache.

  A search in a large table misses every cache. One read for each of many keys
  lets the processor wait for all of them at once. Returns a sum of what was
  read. The caller must use it, or the compiler removes the reads.
  """
  mask, read = np.int64(len(pairs) - 1), 0
  for i in range(len(keys)):
    slots[i] = first_slot(keys[i], mask)
    read += pairs[slots[i], 0]
  return read


@kernel
@no_type_check
def find(pairs: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple:
  """Fills integer[n] with the values of keys, 0 for those not in the table.

  Returns how many keys are not in the table, and the result of `touch`.
  """
  mask, absent, read = np.int64(len(pairs) - 1), 0, 0
  slots = np.empty(_AHEAD, np.int64)
  for start in range(0, len(keys), _AHEAD):
    some = keys[start : start + _AHEAD]
    read += touch(pairs, some, slots)
    for i in range(len(some)):
      slot = slots[i]
      while pairs[slot, 1] != 0 and pairs[slot, 0] != some[i]:
        slot = (slot + 1) & mask
      values[start + i] = pairs[slot, 1]
      absent += pairs[slot, 1] == 0
  return absent, read


@kernel
@no_type_check
def place_slot(places: np.ndarray, keys: np.ndarray, key: int) -> np.int64:
  """Returns the slot of a key's place in `keys`, or the free one for it."""
  mask = np.int64(len(places) - 1)
  slot = first_slot(key, mask)
  while places[slot] >= 0 and keys[places[slot]] != key:
    slot = (slot + 1) & mask
  return slot


@intrinsic
@no_type_check
def prefetch(typing: Any, address: Any) -> Any:
  """Has the processor read an address into its caches."""

  def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    name = 'llvm.prefetch.p0i8'
    call = cgutils.get_or_insert_function(builder.module, kind, name)
    into_all_caches = (word(x) for x in (0, 3, 1))
    builder.call(call, [builder.inttoptr(args[0], byte), *into_all_caches])

  return types.void(types.int64), codegen
