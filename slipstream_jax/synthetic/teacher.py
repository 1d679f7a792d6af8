"""The law of the synthetic click stream: what example number i is, and why.

Example i is a pure function of (seed, i): every draw is a splitmix64 hash of
both. An example draws a user, a context and an item from bounded Zipfs; each
field's row is a function of one of them, so that popular rows come together,
as in real logs. A planted teacher then says how likely a click is:

  logit = bias + dense effects + sum of row effects
    + dot products of row factors, one for each pair of neighbouring fields

Effects and factors are hashes of (teacher seed, global row), so nothing here
is as long as a table. The bounded Zipf of exponent s over [1, R] is the floor
of a power law on [1, R + 1), whose quantile function is a formula:

  x(u) = (1 - u (1 - (R + 1)^-a))^(-1/a),  a = s - 1

Where 1/a is a whole number, as for s = 1.05, it takes multiplications only.
x^p follows such a law too, on [1, (R + 1)^p): that is how a field of fewer
rows keeps its latent's rank. Far smaller ones draw u from the latent's hash.

Under drift a rank is not held for ever (`drift`), but whoever holds it looks
up the same rows, and has the same effects, at any time.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Float, Int, Real
import numpy as np

from slipstream_jax.hashing import hashed, kernel, mix, unit
from slipstream_jax.row_space import offsets
from slipstream_jax.synthetic.draws import log_rank_at, normal, quarter, rank_at
from slipstream_jax.synthetic.drift import holder, time_of
from slipstream_jax.synthetic.spec import SyntheticSpec

LATENTS = 3
"""Users, contexts and items; feature f belongs to number f mod 3."""

# Of the logs of dense counts; they give moments near those of Kaggle's I1-I13.
_LOCATIONS = (-0.8, 1.5, 1.5, 0.8, 6.8, 2, 0.9, 1.8, 3.3, -0.9, 0.5, -3, 1)
_SPREADS = (1.6, 2, 1.6, 1.3, 2.5, 2.5, 1.7, 1.3, 1.7, 1.2, 1.1, 1.9, 1.4)
# Middles of steps, fine beside the distances of the counts' logs up to e^7.
_COUNT_STEPS = (np.arange(1 << 13) + 0.5) * (7 / (1 << 13))
_KEEPS_RANK = 1 / 8  # least rows of a field, as a share of its latent's


class Law(NamedTuple):
  """A spec as the kernels read it."""

  examples: np.uint64
  """Key of the draws that differ from example to example."""
  population: np.uint64
  """Key of what users, contexts and items are."""
  teacher: np.uint64
  """Key of the planted effects."""
  own_share: float
  """As in the spec."""
  latent_zipf: Float[np.ndarray, 'G 4']
  """(a, 1 - (R + 1)^-a, 1/a, R) of each latent's power law, f64; 1/a is 0
  where it is not a whole number. Few arrays: more of them slow the kernels."""
  field_zipf: Float[np.ndarray, 'F 4']
  """The same of each field's, f64."""
  powers: Float[np.ndarray, ' F']
  """p where the field keeps its latent's rank, else 0; f64."""
  effects: Float[np.ndarray, ' F']
  """Standard deviation of the effects of each table's rows, f64."""
  offsets: Int[np.ndarray, ' F+1']
  """First global row of each table, and N at the end; i64."""
  dense: Float[np.ndarray, 'I 3']
  """Location and spread of each count's log, and its effect; f64."""
  saturation: float
  """As in the spec."""
  drift_examples: int
  """As in the spec."""
  drift: np.uint64
  """Key of who holds which rank."""
  counts: Float[np.ndarray, ' T']
  """log1p of the count whose log lies in each of T steps up to 7; f32."""


@functools.lru_cache(maxsize=64)
def law_of(spec: SyntheticSpec) -> Law:
  """The spec's law; its values must make sense."""
  rows = np.array(spec.rows, np.int64)
  latents = [max(spec.rows[g::LATENTS], default=1) for g in range(LATENTS)]
  largest = np.resize(latents, len(rows))
  powers = np.log1p(rows) / np.log1p(largest)
  teacher_seed = spec.population.seed
  return Law(
    # An old word: another one would change every stream there is.
    examples=key_of(spec.seed, 'inputs'),
    population=key_of(teacher_seed, 'population'),
    teacher=key_of(teacher_seed, 'rows'),
    own_share=spec.own_share,
    latent_zipf=zipf_of(spec.skews, np.array(latents)),
    field_zipf=zipf_of([spec.field_skew] * len(rows), rows),
    powers=np.where(rows >= largest * _KEEPS_RANK, powers, 0.0),
    # As the entropy of ids grows, so does the variance of their effects:
    # large tables matter, but the small ones carry most of the signal.
    effects=np.sqrt(np.log1p(rows)),
    offsets=offsets(spec.rows),
    dense=_dense_law(key_of(teacher_seed, 'dense'), spec.dense_features),
    saturation=spec.saturation,
    drift_examples=spec.drift_examples,
    drift=key_of(teacher_seed, 'drift'),
    counts=np.log1p(np.floor(np.exp(_COUNT_STEPS))).astype(np.float32),
  )


def key_of(seed: int, purpose: str) -> np.uint64:
  """Key of all draws of a purpose: its first 8 letters tell it apart."""
  salt = int.from_bytes(purpose.encode()[:8], 'little')
  return np.uint64(mix(np.uint64(mix(np.uint64(seed)) ^ salt)))


def zipf_of(
  exponents: Sequence[float], rows: Real[np.ndarray, ' n']
) -> Float[np.ndarray, 'n 4']:
  """Power laws as `Law.latent_zipf` has them, f64[n, 4]."""
  a = np.array(exponents, np.float64) - 1
  a[np.abs(a) < 1e-6] = 1e-6  # s = 1 is the limit: as near as doubles need
  # Where this is 0, and where it is negative, `rank_at` takes exp instead.
  whole = np.rint(1 / a)
  whole[(abs(1 / a - whole) > 1e-6) | (abs(whole) > 64)] = 0
  # Not 1 - (R + 1)^-a: near s = 1 the difference would keep few digits.
  return np.column_stack([a, -np.expm1(-a * np.log1p(rows)), whole, rows])


def _dense_law(key: np.uint64, features: int) -> np.ndarray:
  shapes = [np.resize(shape, features) for shape in (_LOCATIONS, _SPREADS)]
  effects = [normal(np.uint64(hashed(key, j))) for j in range(features)]
  return np.column_stack([*shapes, effects])


# Purposes of the draws that share a key: far apart, as fields are added.
_OWN, _FIELD, _SCORE, _NOISE, _LABEL = (i << 32 for i in range(1, 6))


@kernel
@no_type_check
def _draw_latents(
  law: Law,
  key: np.uint64,
  time: int,
  log_ranks: np.ndarray,
  latents: np.ndarray,
) -> None:
  """Fills an example's user, context and item: log rank, and hash of it."""
  zipf = law.latent_zipf
  for g in range(LATENTS):
    u = unit(hashed(key, g))
    rank = rank_at(u, zipf[g, 0], zipf[g, 1], zipf[g, 2])
    if law.drift_examples > 0:
      ranks, list_key = np.int64(zipf[g, 3]), hashed(law.drift, g)
      rank = holder(list_key, rank, ranks, time, law.drift_examples)
    log_ranks[g] = np.log(rank + 0.5)  # one value, so one row in each field
    latents[g] = hashed(law.population, LATENTS * rank + g)


@kernel
@no_type_check
def _draw_rows(
  law: Law,
  key: np.uint64,
  log_ranks: np.ndarray,
  latents: np.ndarray,
  lookups: np.ndarray,
) -> None:
  """Fills an example's global rows, integer[F], given its latents."""
  # Scalars only: a slice per field would cost more than the draw itself.
  latent_zipf, field_zipf = law.latent_zipf, law.field_zipf
  own_below, bits = np.int64(law.own_share * 65536), np.uint64(0)
  for f in range(len(lookups)):
    g = f % LATENTS
    if f % 4 == 0:  # 16 bits are enough for a field: a hash serves four
      bits = hashed(key, _OWN + f)
    own = np.int64(bits & np.uint64(0xFFFF)) < own_below
    bits >>= np.uint64(16)
    if law.powers[f] > 0.0:
      log_rank = log_ranks[g]
      if own:
        u = unit(hashed(key, _FIELD + f))
        log_rank = log_rank_at(u, latent_zipf[g, 0], latent_zipf[g, 1])
      rank = np.int64(np.exp(log_rank * law.powers[f]))
    else:
      u = unit(hashed(key if own else latents[g], _FIELD + f))
      rank = rank_at(u, field_zipf[f, 0], field_zipf[f, 1], field_zipf[f, 2])
    row = law.offsets[f] + rank - 1
    # Rounding may lead one past the end.
    lookups[f] = min(row, law.offsets[f + 1] - 1)


@kernel
@no_type_check
def _draw_dense(
  law: Law, key: np.uint64, latents: np.ndarray, dense: np.ndarray
) -> float:
  """Fills log1p of an example's counts, f32[I]; returns their effect."""
  effect, steps = 0.0, len(law.counts) / 7.0
  for j in range(len(dense)):
    score = normal(hashed(latents[j % LATENTS], _SCORE + j))
    noise = normal(hashed(key, _NOISE + j))
    location, spread = law.dense[j, 0], law.dense[j, 1]
    # 0.36 + 0.64 is 1: the variance stays, 36 % of it told by the latent.
    log = location + spread * (0.6 * score + 0.8 * noise)
    # Of large counts the log is as good as that of the whole number.
    small = law.counts[int(log * steps)] if 0.0 <= log < 7.0 else 0.0
    dense[j] = log if log >= 7.0 else small
    effect += law.dense[j, 2] * dense[j] / spread
  return effect


@kernel
@no_type_check
def _row_effects(law: Law, lookups: np.ndarray, parts: np.ndarray) -> None:
  """Sets the parts of the logit due to rows, and to pairs of fields."""
  parts[1] = parts[2] = 0.0
  # Field f of an odd number pairs with the one before, whose factors are kept.
  factors = np.uint64(0)
  for f in range(len(lookups)):
    bits = hashed(law.teacher, lookups[f])
    parts[1] += law.effects[f] * normal(bits)
    before, factors = factors, hashed(bits, 0)
    if f % 2 == 1:
      for d in range(4):
        parts[2] += quarter(before, d) * quarter(factors, d)


@kernel
@no_type_check
def _fading_effects(law: Law, lookups: np.ndarray, parts: np.ndarray) -> None:
  """`_row_effects` under saturation; apart, as it would slow that by half."""
  parts[1] = parts[2] = 0.0
  factors, loud = np.uint64(0), 1.0
  for f in range(len(lookups)):
    bits = hashed(law.teacher, lookups[f])
    rank = lookups[f] - law.offsets[f] + 1.0
    loud_before, loud = loud, np.exp(-0.5 * law.saturation * np.log(rank))
    parts[1] += loud * law.effects[f] * normal(bits)
    before, factors = factors, hashed(bits, 0)
    if f % 2 == 1:
      product = 0.0
      for d in range(4):
        product += quarter(before, d) * quarter(factors, d)
      parts[2] += loud_before * loud * product


@kernel
@no_type_check
def draw(
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
    key = hashed(law.examples, positions[i])
    time = time_of(positions[i])
    _draw_latents(law, key, time, log_ranks, latents)
    _draw_rows(law, key, log_ranks, latents, lookups[i])
    parts[i, 0] = _draw_dense(law, key, latents, dense[i])
    if law.saturation > 0.0:
      _fading_effects(law, lookups[i], parts[i])
    else:
      _row_effects(law, lookups[i], parts[i])


@kernel
@no_type_check
def click(
  key: np.uint64,
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
    u = unit(hashed(hashed(key, positions[i]), _LABEL))
    labels[i] = u < probabilities[i]
