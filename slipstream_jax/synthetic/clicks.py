"""A synthetic click stream in the shape of Criteo's Kaggle set. NOT real data.

Example i is a pure function of (seed, i): every draw is a splitmix64 hash of
both. An example draws a user, a context and an item from bounded Zipf
distributions. Each field's row is a function of one of them, so that popular
rows occur together, as in real logs. A planted teacher then gives the click
probability:

  logit = bias + dense effects + sum of row effects
    + dot products of row factors, one for each pair of neighbouring fields
    + sums of products of three fields' factors, one for each such triple

The last part is left out unless the spec has a share for it. Effects and
factors are hashes of (teacher seed, global row). The bounded Zipf of exponent s
over [1, R] is the floor of a power law on [1, R + 1), which has a closed
quantile function:

  x(u) = (1 - u (1 - (R + 1)^-a))^(-1/a),  a = s - 1

x^p follows such a law too, on [1, (R + 1)^p). A field with fewer rows keeps its
latent's rank that way. Fields with far fewer rows draw u from the latent's
hash. Under drift the holder of a rank changes (`draws`), but a holder always
looks up the same rows and has the same effects.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, no_type_check

from jaxtyping import Float, Int, Real
import numpy as np

from slipstream_jax.data.numbered import Columns
from slipstream_jax.hashing import hashed, kernel, mix, unit
from slipstream_jax.synthetic.draws import (
  holder,
  log_rank_at,
  normal,
  quarter,
  rank_at,
  time_of,
)
from slipstream_jax.synthetic.spec import check_spec, SyntheticSpec
from slipstream_jax.synthetic.stream import (
  CALIBRATION_START,
  Examples,
  over_time,
)
from slipstream_jax.tables import offsets, row_dtype

LATENTS = 3
"""Users, contexts and items. Feature f belongs to latent f mod 3."""

# For the logs of dense counts. Their moments are near those of Kaggle's I1-I13.
_LOCATIONS = (-0.8, 1.5, 1.5, 0.8, 6.8, 2, 0.9, 1.8, 3.3, -0.9, 0.5, -3, 1)
_SPREADS = (1.6, 2, 1.6, 1.3, 2.5, 2.5, 1.7, 1.3, 1.7, 1.2, 1.1, 1.9, 1.4)
# Middles of steps, finer than the distances of the counts' logs up to e^7.
_COUNT_STEPS = (np.arange(1 << 13) + 0.5) * (7 / (1 << 13))
_KEEPS_RANK = 1 / 8  # a field with this share of its latent's rows keeps ranks
_CALIBRATION_EXAMPLES = 1 << 16


class ClickModel(NamedTuple):
  """The generative model of a spec, as the kernels read it."""

  examples: np.uint64
  """Key of the draws that differ between examples."""
  population: np.uint64
  """Key of the properties of users, contexts and items."""
  teacher: np.uint64
  """Key of the planted effects."""
  latent_zipf: Float[np.ndarray, 'G 4']
  """(a, 1 - (R + 1)^-a, 1/a, R) of each latent's power law, f64. 1/a is 0 if it
  is not an integer. One array, because more arrays slow the kernels."""
  field_zipf: Float[np.ndarray, 'F 4']
  """The same for each field, f64."""
  powers: Float[np.ndarray, ' F']
  """p if the field keeps its latent's rank, else 0, f64."""
  effects: Float[np.ndarray, ' F']
  """Standard deviation of the effects of each table's rows, f64."""
  offsets: Int[np.ndarray, ' F+1']
  """First global row of each table, then N, i64."""
  dense: Float[np.ndarray, 'I 3']
  """Location and spread of each count's log, and the count's effect, f64."""
  counts: Float[np.ndarray, ' T']
  """log1p of the count whose log is in each of T steps up to 7, f32."""
  own_share: float
  """As in the spec, like the next two."""
  saturation: float
  drift_examples: int
  drift: np.uint64
  """Key of the holders of ranks."""


@functools.lru_cache(maxsize=64)
def click_model(spec: SyntheticSpec) -> ClickModel:
  """Returns the spec's model. The spec must be valid."""
  rows = np.array(spec.rows, np.int64)
  latents = [max(spec.rows[g::LATENTS], default=1) for g in range(LATENTS)]
  largest = np.resize(latents, len(rows))
  powers = np.log1p(rows) / np.log1p(largest)
  teacher_seed = spec.population.seed
  return ClickModel(
    # The word is part of the seed, so it must not change.
    examples=key_of(spec.seed, 'inputs'),
    population=key_of(teacher_seed, 'population'),
    teacher=key_of(teacher_seed, 'rows'),
    own_share=spec.own_share,
    latent_zipf=zipf_of(spec.skews, np.array(latents)),
    field_zipf=zipf_of([spec.field_skew] * len(rows), rows),
    powers=np.where(rows >= largest * _KEEPS_RANK, powers, 0.0),
    # The variance of effects grows with the entropy of ids: large tables
    # matter, but the small ones carry most of the signal.
    effects=np.sqrt(np.log1p(rows)),
    offsets=offsets(spec.rows),
    dense=_dense_parameters(key_of(teacher_seed, 'dense'), spec.dense_features),
    saturation=spec.saturation,
    drift_examples=spec.drift_examples,
    drift=key_of(teacher_seed, 'drift'),
    counts=np.log1p(np.floor(np.exp(_COUNT_STEPS))).astype(np.float32),
  )


def key_of(seed: int, purpose: str) -> np.uint64:
  """Returns the key of a purpose's draws. Its first 8 letters count."""
  salt = int.from_bytes(purpose.encode()[:8], 'little')
  return np.uint64(mix(np.uint64(mix(np.uint64(seed)) ^ salt)))


def zipf_of(
  exponents: Sequence[float], rows: Real[np.ndarray, ' n']
) -> Float[np.ndarray, 'n 4']:
  """Returns power laws as in `ClickModel.latent_zipf`, f64[n, 4]."""
  a = np.array(exponents, np.float64) - 1
  a[np.abs(a) < 1e-6] = 1e-6  # approximates the limit s = 1
  # If this is 0 or negative, `rank_at` uses exp.
  whole = np.rint(1 / a)
  whole[(abs(1 / a - whole) > 1e-6) | (abs(whole) > 64)] = 0
  # Not 1 - (R + 1)^-a, which loses precision near s = 1.
  return np.column_stack([a, -np.expm1(-a * np.log1p(rows)), whole, rows])


def _dense_parameters(key: np.uint64, features: int) -> np.ndarray:
  shapes = [np.resize(shape, features) for shape in (_LOCATIONS, _SPREADS)]
  effects = [normal(np.uint64(hashed(key, j))) for j in range(features)]
  return np.column_stack([*shapes, effects])


# Purposes of the draws that share a key. Far apart, because fields are added.
_OWN, _FIELD, _SCORE, _NOISE, _LABEL = (i << 32 for i in range(1, 6))


@kernel
@no_type_check
def _draw_latents(
  model: ClickModel,
  key: np.uint64,
  time: int,
  log_ranks: np.ndarray,
  latents: np.ndarray,
) -> None:
  """Fills an example's user, context and item: log rank, and its hash."""
  zipf = model.latent_zipf
  for g in range(LATENTS):
    u = unit(hashed(key, g))
    rank = rank_at(u, zipf[g, 0], zipf[g, 1], zipf[g, 2])
    if model.drift_examples > 0:
      ranks, list_key = np.int64(zipf[g, 3]), hashed(model.drift, g)
      rank = holder(list_key, rank, ranks, time, model.drift_examples)
    log_ranks[g] = np.log(rank + 0.5)  # one value, so one row per field
    latents[g] = hashed(model.population, LATENTS * rank + g)


@kernel
@no_type_check
def _draw_rows(
  model: ClickModel,
  key: np.uint64,
  log_ranks: np.ndarray,
  latents: np.ndarray,
  lookups: np.ndarray,
) -> None:
  """Fills an example's global rows, integer[F], given its latents."""
  # Scalars only, because a slice per field would cost more than the draw.
  latent_zipf, field_zipf = model.latent_zipf, model.field_zipf
  own_below, bits = np.int64(model.own_share * 65536), np.uint64(0)
  for f in range(len(lookups)):
    g = f % LATENTS
    if f % 4 == 0:  # a field needs 16 bits, so a hash serves four fields
      bits = hashed(key, _OWN + f)
    own = np.int64(bits & np.uint64(0xFFFF)) < own_below
    bits >>= np.uint64(16)
    if model.powers[f] > 0.0:
      log_rank = log_ranks[g]
      if own:
        u = unit(hashed(key, _FIELD + f))
        log_rank = log_rank_at(u, latent_zipf[g, 0], latent_zipf[g, 1])
      rank = np.int64(np.exp(log_rank * model.powers[f]))
    else:
      u = unit(hashed(key if own else latents[g], _FIELD + f))
      rank = rank_at(u, field_zipf[f, 0], field_zipf[f, 1], field_zipf[f, 2])
    row = model.offsets[f] + rank - 1
    # Rounding may exceed the end by one.
    lookups[f] = min(row, model.offsets[f + 1] - 1)


@kernel
@no_type_check
def _draw_dense(
  model: ClickModel, key: np.uint64, latents: np.ndarray, dense: np.ndarray
) -> float:
  """Fills log1p of an example's counts, f32[I]. Returns their effect."""
  effect, steps = 0.0, len(model.counts) / 7.0
  for j in range(len(dense)):
    score = normal(hashed(latents[j % LATENTS], _SCORE + j))
    noise = normal(hashed(key, _NOISE + j))
    location, spread = model.dense[j, 0], model.dense[j, 1]
    # 0.36 + 0.64 = 1 keeps the variance, 36 % of which is due to the latent.
    log = location + spread * (0.6 * score + 0.8 * noise)
    # For large counts the log need not be that of an integer.
    small = model.counts[int(log * steps)] if 0.0 <= log < 7.0 else 0.0
    dense[j] = log if log >= 7.0 else small
    effect += model.dense[j, 2] * dense[j] / spread
  return effect


@kernel
@no_type_check
def _row_effects(
  model: ClickModel, lookups: np.ndarray, parts: np.ndarray
) -> None:
  """Sets the parts of the logit due to rows, and to pairs of fields."""
  parts[1] = parts[2] = 0.0
  # An odd field pairs with the field before it.
  factors = np.uint64(0)
  for f in range(len(lookups)):
    bits = hashed(model.teacher, lookups[f])
    parts[1] += model.effects[f] * normal(bits)
    before, factors = factors, hashed(bits, 0)
    if f % 2 == 1:
      for d in range(4):
        parts[2] += quarter(before, d) * quarter(factors, d)


@kernel
@no_type_check
def _fading_effects(
  model: ClickModel, lookups: np.ndarray, parts: np.ndarray
) -> None:
  """Sets the parts of `_row_effects` with saturation.

  Separate, because it would slow `_row_effects` by half.
  """
  parts[1] = parts[2] = 0.0
  factors, loud = np.uint64(0), 1.0
  for f in range(len(lookups)):
    bits = hashed(model.teacher, lookups[f])
    rank = lookups[f] - model.offsets[f] + 1.0
    loud_before, loud = loud, np.exp(-0.5 * model.saturation * np.log(rank))
    parts[1] += loud * model.effects[f] * normal(bits)
    before, factors = factors, hashed(bits, 0)
    if f % 2 == 1:
      product = 0.0
      for d in range(4):
        product += quarter(before, d) * quarter(factors, d)
      parts[2] += loud_before * loud * product


@kernel
@no_type_check
def _triple_effects(
  model: ClickModel, lookups: np.ndarray, parts: np.ndarray
) -> None:
  """Sets the part of the logit due to triples of neighbouring fields.

  A triple is a user's, a context's and an item's field. Other factors than
  those of pairs keep the parts independent.
  """
  parts[3] = 0.0
  first, second = np.uint64(0), np.uint64(0)
  for f in range(len(lookups)):
    factors = hashed(hashed(model.teacher, lookups[f]), 1)
    if f % 3 == 2:
      for d in range(4):
        parts[3] += quarter(first, d) * quarter(second, d) * quarter(factors, d)
    first, second = second, factors


@kernel
@no_type_check
def draw(
  model: ClickModel,
  positions: np.ndarray,
  dense: np.ndarray,
  lookups: np.ndarray,
  parts: np.ndarray,
) -> None:
  """Fills f32[n, I], integer[n, F] and f64[n, 3 or 4] for n positions."""
  log_ranks = np.empty(LATENTS)
  latents = np.empty(LATENTS, np.uint64)
  for i in range(len(positions)):
    key = hashed(model.examples, positions[i])
    time = time_of(positions[i])
    _draw_latents(model, key, time, log_ranks, latents)
    _draw_rows(model, key, log_ranks, latents, lookups[i])
    parts[i, 0] = _draw_dense(model, key, latents, dense[i])
    if model.saturation > 0.0:
      _fading_effects(model, lookups[i], parts[i])
    else:
      _row_effects(model, lookups[i], parts[i])
    if parts.shape[1] == 4:
      _triple_effects(model, lookups[i], parts[i])


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
    for part in range(parts.shape[1]):
      logit += weights[part + 1] * parts[i, part]
    probabilities[i] = 1.0 / (1.0 + np.exp(-logit))
    u = unit(hashed(hashed(key, positions[i]), _LABEL))
    labels[i] = u < probabilities[i]


def examples_at(
  spec: SyntheticSpec, positions: Int[np.ndarray, ' n']
) -> Examples:
  """Returns the examples at some positions of the stream, i64[n], from 0 on.

  Raises:
    UserError: the spec has a value out of range.
  """
  check_spec(spec)
  positions = np.asarray(positions, np.int64)
  model, weights = click_model(spec), _weights(spec.population)
  columns, parts = _draw_at(spec, positions)
  probabilities = np.empty(len(positions))
  click(
    model.examples, positions, parts, weights, probabilities, columns.labels
  )
  return Examples(columns, probabilities)


def _draw_at(
  spec: SyntheticSpec, positions: np.ndarray
) -> tuple[Columns, np.ndarray]:
  """Returns examples without labels, and parts of their logits, f64[n, P]."""
  examples = len(positions)
  columns = Columns(
    np.empty((examples, spec.dense_features), np.float32),
    np.empty((examples, len(spec.rows)), row_dtype(sum(spec.rows))),
    np.empty(examples, np.float32),
  )
  parts = np.empty((examples, len(spec.signal)))
  draw(click_model(spec), positions, columns.dense, columns.lookups, parts)
  return columns, parts


@functools.lru_cache(maxsize=64)
def _weights(spec: SyntheticSpec) -> np.ndarray:
  """Fits the bias and the weight of each of P parts of the logit: f64[1 + P].

  Few rows take most lookups, so the random effects of these rows would change
  base rate and AUC from seed to seed. Numbers fitted to a reserved part of the
  stream prevent that. Rounding hides platform differences in the last bits.
  """
  positions = over_time(
    CALIBRATION_START, _CALIBRATION_EXAMPLES, spec.drift_examples
  )
  _, parts = _draw_at(spec, positions)
  spreads = parts.std(axis=0)
  spreads[spreads < 1e-6] = np.inf  # a constant part gets weight 0
  weights = np.sqrt(spec.signal) / spreads
  # The parts are correlated, so the sum is scaled too.
  weights *= spec.logit_std / max((parts @ weights).std(), 1e-6)
  bias = _bias(parts @ weights, spec.base_rate)
  return np.round([bias, *weights], 4)


def _bias(logits: np.ndarray, base_rate: float) -> float:
  """Finds the bias of logits for this mean probability, by bisection."""
  # The mean grows with the bias. 60 halvings leave 2e-15 of 2,000.
  low, high = -1e3, 1e3
  for _ in range(60):
    bias = (low + high) / 2
    with np.errstate(over='ignore'):  # to infinity: a probability of 0
      rate = (1 / (1 + np.exp(-(logits + bias)))).mean()
    low, high = (low, bias) if rate > base_rate else (bias, high)
  return low
