"""Measures how fast vocabularies give rows, on one thread.

    python -m experiments.bench.vocabulary [--rows=N]

Ids are 64-bit hashes. They follow Zipf's law (exponent 1.05), or are spread
evenly, so that no cache helps, or are all new, in a growing vocabulary that is
full. In a learned hash half of the ids share a hundredth of the rows. Seconds
are those of the thread on the processor, so other work on the machine matters
only through the caches it shares.
"""

from collections.abc import Callable, Iterator
import time
from typing import Any

from absl import flags
import numpy as np

from experiments.bench import runner

flags.DEFINE_multi_integer(
  'rows',
  [1_000_000, 10_000_000],
  'Rows of the tables; may be given again.',
  lower_bound=1,
)
_BATCH = 1 << 16
_TURNS = 40
_EXPONENT = 1.05


def bench(bar: Any, rows: list[int]) -> Iterator[runner.Item]:
  """Yields the lookups/s of tables, and the seconds that a state takes."""
  for name, measure in {
    'fitted, and learned: lookups/s, median': fixed_speeds,
    'growing: lookups/s, median and best, seconds of a saved state': speeds,
  }.items():
    bar.begin(name.partition(':')[0], len(rows), 'table')
    frame = []
    for size in rows:
      frame.append(measure(size))
      bar.show(len(frame))
    yield name, frame


def fixed_speeds(rows: int) -> dict[str, Any]:
  """Returns the lookups/s of a fitted vocabulary, and of a learned hash."""
  from slipstream_jax.columns.ids import raw_ids
  from slipstream_jax.vocabulary.counted import Vocabulary

  rng = np.random.default_rng(0)
  ids = rng.integers(0, 1 << 64, rows, np.uint64)
  known, shared = raw_ids(ids, 'ids'), max(rows // 100, 1)
  clusters = rng.integers(1, 1 + shared, rows // 2).astype(np.int32)
  figures: dict[str, Any] = {'rows': rows}
  for name, words in {
    'fitted': Vocabulary(known),
    'learned': Vocabulary(known, shared, shared=clusters),
  }.items():
    for kind, draw in {
      'zipf': lambda: zipf(rng, rows, _BATCH),
      'even': lambda: rng.integers(0, rows, _BATCH),
    }.items():
      seconds = [_seconds(words.rows, ids[draw()]) for _ in range(_TURNS)]
      figures[f'{name} {kind}'] = _BATCH / float(np.median(seconds[2:]))
  return figures


def speeds(rows: int) -> dict[str, Any]:
  """Returns the lookups/s of each kind of ids in a table."""
  from slipstream_jax.vocabulary.growing import GrowingVocabulary

  def assign(batches: Iterator[np.ndarray]) -> np.ndarray:
    seconds = [_seconds(words.assign, batch) for batch in batches]
    return _BATCH / np.array(seconds[2:])

  rng = np.random.default_rng(0)
  ids = rng.integers(0, 1 << 64, rows, np.uint64)
  new = rng.integers(0, 1 << 64, (_TURNS, _BATCH), np.uint64)
  words = GrowingVocabulary(rows + 1)
  for start in range(0, rows, _BATCH):
    words.assign(ids[start : start + _BATCH])
  batches = {
    'zipf': (ids[zipf(rng, rows, _BATCH)] for _ in range(_TURNS)),
    'even': (ids[rng.integers(0, rows, _BATCH)] for _ in range(_TURNS)),
  }
  figures: dict[str, Any] = {'rows': rows}
  for name, of in batches.items():
    speed = assign(of)
    figures[name] = float(np.median(speed))
    figures[f'{name} best'] = float(np.max(speed))
  seconds = _seconds(words.get_state, words.batches - 10)
  # A mean, as only some batches look for the rows that leave next.
  figures['all new'] = float(1 / np.mean(1 / assign(iter(new))))
  return figures | {'seconds': seconds}


def zipf(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
  """Draws ids in [0, size) by a bounded Zipf law, i64[count].

  Inverts the law's continuous version. Popular ids are scattered.
  """
  power = 1 - _EXPONENT
  uniform = rng.random(count)
  ranks = (1 + uniform * ((size + 1.0) ** power - 1)) ** (1 / power)
  # Popular rows of real tables are not side by side.
  scattered = (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> 11
  return (scattered % np.uint64(size)).astype(np.int64)


def _seconds(call: Callable[..., object], *args: Any) -> float:
  started = time.thread_time()
  call(*args)
  return time.thread_time() - started


if __name__ == '__main__':
  runner.run(bench, 'none')
