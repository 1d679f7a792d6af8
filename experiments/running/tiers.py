"""Where a run keeps the rows that the device does not."""

import ml_collections
from rich.console import Console

from experiments.common import build
from slipstream_jax.files import in_memory


def announce(config: ml_collections.ConfigDict, screen: Console) -> None:
  """Says where a disk for rows is none."""
  if (words := no_disk(config)) is not None:
    screen.print(words, style='bold red', highlight=False, markup=False)


def no_disk(config: ml_collections.ConfigDict) -> str | None:
  """Why rows on a disk save no memory; None: they do, or there are none."""
  if config.store.kind == 'memory':
    return None
  folder = build.store_folder(config)
  if not in_memory(folder):
    return None
  return (
    f'{folder} is memory (tmpfs): rows there save none. Name a folder of a '
    'disk: --config.store.path'
  )
