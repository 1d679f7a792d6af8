"""Files of ratings as GroupLens publishes them, and a slow reader of each."""

import numpy as np

HEADER = 'userId,movieId,rating,timestamp'


def ratings(count=400, users=25, items=40, seed=0, halves=True):
  """Columns user, item, half-stars and time; times repeat, users interleave."""
  rng = np.random.default_rng(seed)
  stars = (
    rng.integers(1, 11, count) if halves else 2 * rng.integers(1, 6, count)
  )
  return (
    rng.integers(1, users + 1, count),
    rng.integers(1, items + 1, count) * 1000,
    stars,
    rng.integers(0, max(count // 4, 1), count) + 978_300_760,
  )


def as_csv(columns):
  """As ml-20m, ml-25m, ml-32m and ml-latest have them."""
  rows = zip(*columns, strict=True)
  lines = [f'{u},{i},{h / 2:.1f},{t}' for u, i, h, t in rows]
  return '\n'.join([HEADER, *lines]) + '\n'


def as_dat(columns):
  """As ml-1m and ml-10m have them: 4 and 4.5, and '::' between."""
  rows = zip(*columns, strict=True)
  return ''.join(f'{u}::{i}::{h / 2:g}::{t}\n' for u, i, h, t in rows)


def as_data(columns):
  """As ml-100k has them, u.data: whole stars between tabs."""
  rows = zip(*columns, strict=True)
  return ''.join(f'{u}\t{i}\t{h // 2}\t{t}\n' for u, i, h, t in rows)


def slow_examples(columns, history, threshold=4.0):
  """Examples in the order of time, by a dictionary of what each user did."""
  users, items, stars, times = (column.tolist() for column in columns)
  order = sorted(range(len(users)), key=lambda row: times[row])  # stable
  seen, of_item, examples = {}, {}, []
  for row in order:
    user, item = users[row], items[row]
    past = seen.setdefault(user, [])
    label = stars[row] >= 2 * threshold if threshold else stars[row] / 10
    dense = np.log1p(np.float32([len(past), of_item.get(item, 0)]))
    latest = past[-history:] if history else []
    examples.append((np.float32(label), dense, user, item, latest))
    past.append(item)
    of_item[item] = of_item.get(item, 0) + 1
  return examples
