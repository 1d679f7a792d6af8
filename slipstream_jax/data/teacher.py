"""The law of the synthetic click stream: what input number i is, and why.

Input i is a pure function of (seed, i): every random draw is a splitmix64
hash of both. An input draws a user, a context and an item from bounded
Zipfs; fields are functions of one of the three, so that popular rows come
together as in real logs. A planted teacher then says how likely a click is:

  logit = bias + dense effects + effect per row + <factors> per pair of fields

Effects and factors are hashes of (teacher seed, global row), so nothing here
is as long as a table. A bounded Zipf of exponent s over [1, R] is the floor
of a power law on [1, R + 1), whose quantile function has a closed form.
"""

import functools
from typing import NamedTuple, no_type_check

import numba
import numpy as np

from slipstream_jax.data.batches import Columns
from slipstream_jax.errors import UserError
from slipstream_jax.tables import offsets, row_dtype

KAGGLE_ROWS = (
  *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683),
  *(8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15),
  *(286181, 105, 142572),
)
"""Rows of C1 to C26 in Criteo's Kaggle set: 33,762,577 together."""

CALIBRATION_START = 1 << 42
"""First position of the inputs that fit the teacher's weights."""
CALIBRATION_INPUTS = 1 << 16

LATENTS = 3
"""Users, contexts and items; field and dense feature f follow f mod 3."""

# Location and spread of the log of each dense count; near Kaggle's I1 to I13.
_DENSE = np.array(
  [
    *((-0.8, 1.6), (1.5, 2.0), (1.5, 1.6), (0.8, 1.3), (6.8, 2.5)),
    *((2.0, 2.5), (0.9, 1.7), (1.8, 1.3), (3.3, 1.7), (-0.9, 1.2)),
    *((0.5, 1.1), (-3.0, 1.9), (1.0, 1.4)),
  ]
)
_FOLLOWS_RANK = 1 / 8  # least rows, as a share of the latent's, to keep rank


class SyntheticSpec(NamedTuple):
  """What the stream is; two equal specs give the same inputs."""

  rows: tuple[int, ...] = KAGGLE_ROWS
  """R of each table."""
  dense_features: int = 13
  """I."""
  seed: int = 0
  """Seed of the inputs."""
  teacher_seed: int | None = None
  """Seed of the planted effects; None is `seed`."""
  skews: tuple[float, float, float] = (1.1, 1.0, 1.08)
  """Zipf exponents of users, contexts and items."""
  field_skew: float = 1.05
  """Zipf exponent of the fields with far fewer rows than their latent."""
  own_share: float = 0.01
  """Chance that a field is drawn by itself and not from its latent."""
  signal: tuple[float, float, float] = (0.2, 0.5, 0.3)
  """Variance of the logit from dense features, rows and pairs of rows."""
  logit_std: float = 1.45
  """Standard deviation of the true logit; sets the Bayes AUC."""
  base_rate: float = 0.25
  """Share of clicks."""


class Law(NamedTuple):
  """A spec as the kernels read it; `F` fields, 3 latents."""

  seed: np.uint64
  teacher: np.uint64
  own_share: float
  latent_zipf: np.ndarray
  """(exponent - 1, mass) of each latent's power law, f64[3, 2]."""
  field_zipf: np.ndarray
  """The same of each field, f64[F, 2]."""
  powers: np.ndarray
  """What turns a latent's rank into the field's; 0 = by hash, f64[F]."""
  rows: np.ndarray
  """R of each table, i64[F]."""
  effects: np.ndarray
  """Standard deviation of the effects of each table's rows, f64[F]."""
  first_rows: np.ndarray
  """Global row of each table's row 0, i64[F]."""
  dense: np.ndarray
  """Location and spread of each count's log, and its effect, f64[I, 3]."""


class Inputs(NamedTuple):
  """Inputs with what the teacher knows of them."""

  columns: Columns
  """What a model sees."""
  probabilities: np.ndarray
  """True chance of a click, f64[n]."""


def inputs_at(spec: SyntheticSpec, positions: np.ndarray) -> Inputs:
  """The inputs at these positions of the stream, integer[n] from 0 on.

  Raises:
    UserError: the spec makes no sense.
  """
  seen, parts = _draw_at(spec, positions)
  probabilities = np.empty(len(positions))
  _click(_law(spec).seed, positions, parts, _weights(spec), probabilities,
         seen.labels)
  return Inputs(seen, probabilities)


def _draw_at(
  spec: SyntheticSpec, positions: np.ndarray
) -> tuple[Columns, np.ndarray]:
  """Inputs that have no labels yet, and the logit's three parts f64[n, 3]."""
  law, inputs = _law(spec), len(positions)
  columns = Columns(
    np.empty((inputs, spec.dense_features), np.float32),
    np.empty((inputs, len(spec.rows)), row_dtype(sum(spec.rows))),
    np.empty(inputs, np.float32),
  )
  parts = np.empty((inputs, 3))
  _draw(law, positions, columns.dense, columns.lookups, parts)
  return columns, parts


@functools.lru_cache(maxsize=16)
def _law(spec: SyntheticSpec) -> Law:
  _check(spec)
  tables = len(spec.rows)
  rows = np.array(spec.rows, np.int64)
  latents = np.array([max(spec.rows[g::LATENTS], default=1) for g in range(3)])
  latent = np.arange(tables) % LATENTS
  keeps_rank = rows >= latents[latent] * _FOLLOWS_RANK
  powers = np.log1p(rows) / np.log1p(latents[latent])
  teacher = spec.seed if spec.teacher_seed is None else spec.teacher_seed
  shapes = np.resize(_DENSE, (spec.dense_features, 2))
  effects = np.random.default_rng(teacher).standard_normal(spec.dense_features)
  return Law(
    seed=np.uint64(mix(np.uint64(spec.seed))),
    teacher=np.uint64(mix(~np.uint64(teacher))),
    own_share=spec.own_share,
    latent_zipf=_zipf(np.array(spec.skews), latents),
    field_zipf=_zipf(np.full(tables, spec.field_skew), rows),
    powers=np.where(keeps_rank, powers, 0.0),
    rows=rows,
    effects=np.sqrt(np.log1p(rows)),
    first_rows=offsets(spec.rows)[:-1],
    dense=np.column_stack([shapes, effects]),
  )


def _zipf(exponents: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """(a, 1 - (R + 1)^-a) with a = s - 1, kept from 0, its removable pole."""
  a = np.where(np.abs(exponents - 1) < 1e-6, 1e-6, exponents - 1)
  return np.column_stack([a, -np.expm1(-a * np.log1p(rows))])


@functools.lru_cache(maxsize=16)
def _weights(spec: SyntheticSpec) -> np.ndarray:
  """Bias and weights of the logit's parts, f64[4], equally hard per seed.

  Few rows take most lookups, so chance effects of a few would move base rate
  and AUC from seed to seed; fitting four numbers to a reserved part of the
  stream prevents it. Rounding hides what platforms differ in.
  """
  positions = CALIBRATION_START + np.arange(CALIBRATION_INPUTS)
  _, parts = _draw_at(spec, positions)
  spread = np.maximum(parts.std(axis=0), 1e-9)
  shares = np.array(spec.signal) / sum(spec.signal)
  weights = np.sqrt(shares) / spread
  logits = parts @ weights
  scale = spec.logit_std / max(logits.std(), 1e-9)
  low, high = -30.0, 30.0
  logits = scale * (logits - logits.mean())
  for _ in range(40):
    middle = (low + high) / 2
    rate = np.mean(1 / (1 + np.exp(-middle - logits)))
    low, high = (low, middle) if rate > spec.base_rate else (middle, high)
  weights = scale * weights
  bias = low - parts.mean(axis=0) @ weights
  return np.round(np.concatenate([[bias], weights]), 4)


def _check(spec: SyntheticSpec) -> None:
  for name, value, good in (
    ('rows', spec.rows, len(spec.rows) > 0 and min(spec.rows) >= 1),
  ):
    if not good:
      raise UserError(name, got=value, where=name, mend='')


# Marked no_type_check because numba cannot compile what jaxtyping's hook wraps.
# All kernels stand in this file: numba's cache sees no change in another one.
_kernel = numba.njit(cache=True, nogil=True)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_OWN, _FIELD, _SCORE, _NOISE, _LABEL = 1000, 2000, 3000, 4000, 5000


@_kernel
@no_type_check
def mix(x: np.uint64) -> np.uint64:
  """Finaliser of splitmix64 (Steele et al., 2014): 64 well mixed bits."""
  x = (x ^ (x >> np.uint64(30))) * _MIX_1
  x = (x ^ (x >> np.uint64(27))) * _MIX_2
  return x ^ (x >> np.uint64(31))


@_kernel
@no_type_check
def _hash(key: np.uint64, number: int) -> np.uint64:
  return mix(key + np.uint64(number + 1) * _GOLDEN)


@_kernel
@no_type_check
def _unit(bits: np.uint64) -> float:
  """Uniform in [0, 1)."""
  return np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53))


@_kernel
@no_type_check
def _quarter(bits: np.uint64, which: int) -> float:
  """Uniform of mean 0 and variance 1, from 16 of the bits."""
  part = (bits >> np.uint64(16 * which)) & np.uint64(0xFFFF)
  return (np.float64(part) * (1 / 65536) - 0.49999237) * 3.4641016


@_kernel
@no_type_check
def _normal(bits: np.uint64) -> float:
  """Near normal (a sum of four uniforms) of mean 0 and variance 1."""
  total = _quarter(bits, 0) + _quarter(bits, 1)
  return 0.5 * (total + _quarter(bits, 2) + _quarter(bits, 3))


@_kernel
@no_type_check
def _log_rank(u: float, a: float, mass: float) -> float:
  """Log of the u-quantile, in [0, log(R + 1)), of a bounded power law."""
  return -np.log(1.0 - u * mass) / a


@_kernel
@no_type_check
def _draw_latents(
  law: Law, key: np.uint64, log_ranks: np.ndarray, latents: np.ndarray
) -> None:
  """Fills an input's user, context and item: log rank, and hash of it."""
  zipf = law.latent_zipf
  for g in range(LATENTS):
    log_ranks[g] = _log_rank(_unit(_hash(key, g)), zipf[g, 0], zipf[g, 1])
    latents[g] = _hash(law.seed + np.uint64(g), np.int64(np.exp(log_ranks[g])))


@_kernel
@no_type_check
def _draw_rows(
  law: Law,
  key: np.uint64,
  log_ranks: np.ndarray,
  latents: np.ndarray,
  lookups: np.ndarray,
) -> None:
  """Fills an input's global rows, integer[F], given its latents."""
  # Scalars only: a slice per field would cost more than the draw itself.
  latent_zipf, field_zipf = law.latent_zipf, law.field_zipf
  for f in range(len(lookups)):
    g = f % LATENTS
    bits = _hash(key, _OWN + f)
    own = _unit(bits) < law.own_share
    if law.powers[f] > 0.0:
      log_rank = log_ranks[g]
      if own:
        u = _unit(mix(bits))
        log_rank = _log_rank(u, latent_zipf[g, 0], latent_zipf[g, 1])
      log_rank *= law.powers[f]
    else:
      u = _unit(mix(bits) if own else _hash(latents[g], _FIELD + f))
      log_rank = _log_rank(u, field_zipf[f, 0], field_zipf[f, 1])
    rank = min(np.int64(np.exp(log_rank)), law.rows[f])
    lookups[f] = law.first_rows[f] + rank - 1


@_kernel
@no_type_check
def _draw_dense(
  law: Law, key: np.uint64, latents: np.ndarray, dense: np.ndarray
) -> float:
  """Fills log1p of an input's counts, f32[I]; returns their effect."""
  effect = 0.0
  for j in range(len(dense)):
    score = _normal(_hash(latents[j % LATENTS], _SCORE + j))
    noise = _normal(_hash(key, _NOISE + j))
    location, spread = law.dense[j, 0], law.dense[j, 1]
    count = np.floor(np.exp(location + spread * (0.6 * score + 0.8 * noise)))
    dense[j] = np.log(1.0 + count)
    effect += law.dense[j, 2] * dense[j] / spread
  return effect


@_kernel
@no_type_check
def _row_effects(law: Law, lookups: np.ndarray, parts: np.ndarray) -> None:
  """Sets the parts of the logit due to rows, and to pairs of fields."""
  parts[1] = parts[2] = 0.0
  factors = np.uint64(0)
  for f in range(len(lookups)):
    bits = _hash(law.teacher, lookups[f])
    parts[1] += law.effects[f] * _normal(bits)
    before, factors = factors, mix(bits + _GOLDEN)
    if f % 2 == 1:
      for d in range(4):
        parts[2] += _quarter(before, d) * _quarter(factors, d)


@_kernel
@no_type_check
def _draw(
  law: Law,
  positions: np.ndarray,
  dense: np.ndarray,
  lookups: np.ndarray,
  parts: np.ndarray,
) -> None:
  """Fills f32[n, I], integer[n, F] and f64[n, 3] for n positions."""
  log_ranks = np.empty(LATENTS)
  latents = np.empty(LATENTS, np.uint64)
  for i in range(len(positions)):
    key = _hash(law.seed, positions[i])
    _draw_latents(law, key, log_ranks, latents)
    _draw_rows(law, key, log_ranks, latents, lookups[i])
    parts[i, 0] = _draw_dense(law, key, latents, dense[i])
    _row_effects(law, lookups[i], parts[i])


@_kernel
@no_type_check
def _click(
  seed: np.uint64,
  positions: np.ndarray,
  parts: np.ndarray,
  weights: np.ndarray,
  probabilities: np.ndarray,
  labels: np.ndarray,
) -> None:
  """Fills f64[n] true probabilities and f32[n] labels drawn from them."""
  for i in range(len(positions)):
    logit = weights[0]
    for part in range(3):
      logit += weights[part + 1] * parts[i, part]
    probabilities[i] = 1.0 / (1.0 + np.exp(-logit))
    u = _unit(_hash(_hash(seed, positions[i]), _LABEL))
    labels[i] = u < probabilities[i]
