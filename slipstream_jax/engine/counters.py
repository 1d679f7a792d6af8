"""Exact counts of what training moved and used, summed over steps."""

import operator
from typing import NamedTuple

from slipstream_jax.placement import Plan


class Counters(NamedTuple):
  """Counts of what training moved and used since its start."""

  examples_seen: int = 0
  """Examples that the data source delivered."""
  examples_trained: int = 0
  """Examples that steps trained on."""
  examples_dropped: int = 0
  """Examples that were dropped before planning."""
  lookups: int = 0
  """Lookups of the examples trained, without padding."""
  hits: int = 0
  """Lookups whose row was on the device before its step."""
  rows_used: int = 0
  """Unique rows of each step, summed: what streaming would load."""
  rows_loaded: int = 0
  """Rows moved host -> device."""
  rows_stored: int = 0
  """Rows, or their gradients, moved device -> host."""
  bytes_used: int = 0
  """Bytes of the rows used with their row state, without padding."""
  bytes_loaded: int = 0
  """Bytes moved host -> device without padding: rows with their row state.
  Where rows are updated on the host, rows alone, or embeddings."""
  bytes_stored: int = 0
  """Bytes moved device -> host without padding: rows with their row state, or
  gradients."""
  bytes_exchanged: int = 0
  """Bytes of rows and of their gradients that went from one of several devices
  to another, without padding."""
  bytes_between_hosts: int = 0
  """Bytes that went from one of a replica's `hosts` to another: of rows and
  their gradients, which `bytes_exchanged` has, too, or of vectors of towers and
  theirs. Without padding."""

  bytes_of_parameters: int = 0
  """Bytes of the model's parameters and their gradients that crossed, where a
  parameter server has them."""


def merge(a: Counters, b: Counters) -> Counters:
  """Adds two counts."""
  return Counters(*map(operator.add, a, b))


def moved(plan: Plan, row_bytes: int) -> Counters:
  """Counts what one step uses and moves under a group's plan."""
  loaded, stored = len(plan.load), len(plan.store) + len(plan.evict)
  return Counters(
    lookups=plan.lookups,
    hits=plan.hits,
    rows_used=len(plan.rows),
    rows_loaded=loaded,
    rows_stored=stored,
    bytes_used=len(plan.rows) * row_bytes,
    bytes_loaded=loaded * row_bytes,
    bytes_stored=stored * row_bytes,
  )
