"""Scores with an exported model: `slip_serve.load(folder)`.

It does not need the training code: numpy and numba find and read rows, and JAX
runs the exported program.
"""

from slip_serve.errors import ServeError
from slip_serve.queries import Query
from slip_serve.scorer import Scorer, Stats

__all__ = ['Query', 'Scorer', 'ServeError', 'Stats', 'load']

load = Scorer
"""Opens an export: see `Scorer`."""
