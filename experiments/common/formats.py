"""Old name of `datasets`, for modules that still import it."""

from experiments.common.datasets import (
  new_examples as new_examples,
)
from experiments.common.datasets import (
  raw_data as raw_data,
)
from experiments.common.datasets import (
  RAW_FORMATS as RAW_FORMATS,
)
