"""Draws phases, settings, streams and schedules, for the laws of schedules."""

from hypothesis import strategies as st
import numpy as np

from slipstream_jax.schedules.fae import Rate
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.selection.policies import POLICIES
from tests.support.schedule_bench import cut, examples, run, same, Stream

MODES_AND_POLICIES = [
  ('rows', 'stale'),
  *(('examples', name) for name in POLICIES),
]


@st.composite
def all_phases(draw, settle=1):
  """Phases that fit one another, with at least `settle` batches to settle."""
  warm_up, window = draw(st.integers(0, 4)), draw(st.integers(1, 4))
  settle = draw(st.integers(settle, settle + 4))
  again = draw(st.booleans())
  least = window + settle + (warm_up if again else 0)
  more = draw(st.one_of(st.none(), st.integers(1, 12)))
  period = 0 if more is None else least + more
  return Phases(warm_up, window, settle, period, again)


@st.composite
def all_settings(draw, settle=1):
  mode, policy = draw(st.sampled_from(MODES_AND_POLICIES))
  if draw(st.booleans()):
    policy = POLICIES[policy]._replace(uniform=0.25)
  return Skip(
    draw(st.sampled_from([0, 0.3, 0.7, 1])),
    policy,
    mode,
    draw(all_phases(settle)),
    draw(st.sampled_from([None, 1, 2, (1, 1, 1)])),
    draw(st.integers(0, 1)),
    draw(st.sampled_from([None, None, None, 0.05])),
    draw(st.integers(0, 99)),
    draw(st.sampled_from(['all', 'hot'])),
    draw(st.sampled_from([0, 1, 2, 3, 10])),
    draw(st.booleans()),
    draw(st.sampled_from([None, 0, 0.25, 1])),
    draw(st.sampled_from([None, None, 0, 9, 30])) if mode != 'rows' else None,
    draw(st.sampled_from(['linear', 'model'])),
  )


@st.composite
def all_rates(draw):
  floor = draw(st.sampled_from([1, 10, 60]))
  percent = draw(st.sampled_from([60, 100, 100 / 3 + 60]))
  return Rate(percent, draw(st.integers(1, 3)), floor)


HELD_OUT = cut(examples(np.ones(4)), 4)[0]
most = st.one_of(st.none(), st.integers(0, 90))
# What each schedule is made with, where at least `settle` batches settle.
ARGUMENTS = {
  'plain': lambda settle: st.tuples(),
  'slipstream': lambda settle: st.tuples(
    all_settings(settle), most, all_regroupings(settle)
  ).map(_that_go_together),
  'fae': lambda settle: st.tuples(
    st.integers(1, 30),
    st.sampled_from([None, HELD_OUT]),
    all_rates(),
    st.integers(settle, settle + 4),
  ),
  'hotline': lambda settle: st.tuples(
    st.integers(1, 5), most, st.sampled_from([0, 0, 1, 6])
  ),
  'hotline_micro': lambda settle: st.tuples(most),
}
SOME = {
  'plain': (),
  'slipstream': (Skip(0.6, 'stale', 'examples', Phases(2, 4, 3, 13)),),
  'fae': (20, HELD_OUT, Rate(), 2),
  'hotline': (),
  'hotline_micro': (),
}
IN_ORDER = ('plain', 'slipstream')


def _that_go_together(given):
  settings, batches, regrouping = given
  regroups = regrouping is not None and regrouping.queue is not None
  settings = settings._replace(refill=settings.refill or regroups)
  if regrouping is not None:
    settings = settings._replace(scorer='linear')
  return settings, batches, regrouping


@st.composite
def all_regroupings(draw, settle=1):
  name = draw(st.sampled_from(['plain', 'fae', 'hotline', 'hotline_micro']))
  return draw(any_spec(name, settle)).regrouping


def any_spec(name, settle=1, in_order=False):
  """A strategy for specs of the schedule of that name."""

  def spec(given):
    if in_order and name == 'slipstream':
      given = given[:2]  # without its regrouping
    return SCHEDULES[name](*given)

  return ARGUMENTS[name](settle).map(spec)


@st.composite
def all_streams(draw):
  """A function that makes the same stream again and again."""
  n, size = draw(st.integers(1, 40)), draw(st.integers(1, 6))
  rng = np.random.default_rng(draw(st.integers(0, 10**6)))
  idle = draw(st.sampled_from([0, 0, 0.2, 0.6, 0.9]))
  weights = np.where(rng.random(n) < idle, 0, rng.choice([1, 1, 0.5, 2], n))
  whole = examples(
    weights, draw(st.integers(0, 99)), offset=draw(st.booleans())
  )
  batches = cut(whole, size, fresh=draw(st.booleans()))
  epochs = draw(st.sampled_from([None, 1, 2, 5]))
  return lambda: Stream(batches, epochs)


def assert_resumes(stream, schedule, whole, positions, **how):
  for position in positions:
    rest = run(stream(), schedule, position=position, **how)
    assert same(rest.emitted, whole.emitted[position.emitted :])
    assert rest.rows.tobytes() == whole.rows.tobytes()
    assert (rest.unreported, rest.error) == (whole.unreported, whole.error)
