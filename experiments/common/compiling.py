"""Old name of `meter`, for modules that still import it."""

from experiments.common.meter import compiled as compiled
