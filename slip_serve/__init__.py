"""Scores with an exported model: `slip_serve.load(folder)`.

It knows nothing of training: numpy and numba find and read rows, JAX runs the
program that was exported.
"""

from slip_serve.errors import ServeError
from slip_serve.fetching import Stats
from slip_serve.queries import Query
from slip_serve.scorer import Scorer

__all__ = ['Query', 'Scorer', 'ServeError', 'Stats', 'load']

load = Scorer
"""Opens an export: see `Scorer`."""
