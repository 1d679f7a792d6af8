"""A trace of some steps of a run, once it is under way.

What the library does for a step has names there, in whichever thread it is
done: data, unique, plan, gather, put, step, get, scatter; `train` is all that
the thread of a step does for it, and `loss` its wait for the step before. A
name costs half a millionth of a second while nobody traces.
"""

from collections.abc import Callable, Iterator
import contextlib
import pathlib

import jax

from slipstream_jax.training.loop import StepRecord

FOLDER = 'trace'
"""In that of the run."""
BEFORE = 30
"""Steps that come first: programs are compiled, and queues filled."""
STEPS = 20
"""Steps that a trace is of: of more, nobody would look at one."""


def traced(
  records: Iterator[StepRecord],
  folder: pathlib.Path,
  begin: int,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[StepRecord]:
  """The same records, with a trace of up to `STEPS` steps behind one of them.

  Args:
    records: of steps, as they are taken.
    folder: of the run; the trace is in `FOLDER` there.
    begin: the step after which it begins.
    untimed: what surrounds what is done for the trace alone.
  """
  with contextlib.ExitStack() as opened:
    for at in records:
      yield at
      if at.step == begin:
        opened.enter_context(_trace(folder / FOLDER, untimed))
      elif at.step == begin + STEPS:
        opened.close()


def begin_of(first: int, last: int) -> int:
  """The step after which to begin, of a run from one step to another."""
  return first + min(BEFORE, (last - first) // 2)


@contextlib.contextmanager
def _trace(
  folder: pathlib.Path,
  untimed: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # names, not every call of a function
  with untimed():
    jax.profiler.start_trace(folder, profiler_options=options)
  try:
    yield
  finally:
    with untimed():
      jax.profiler.stop_trace()
