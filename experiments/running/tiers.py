"""Where a run keeps the rows that the device does not."""

import os
import pathlib

import ml_collections
from rich.console import Console

from experiments.common import build
from slipstream_jax.files import Path


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


def in_memory(folder: Path) -> bool:
  """Whether a folder is on a memory file system such as tmpfs.

  False if the system does not say, or the folder does not exist.
  """
  try:
    device = os.stat(folder).st_dev
    mounts = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
  except OSError:
    return False
  number = f'{os.major(device)}:{os.minor(device)}'
  # Fields: number, parent, device, ..., a dash, and the file system's type.
  for mount in mounts:
    words = mount.split()
    if words[2] == number:
      return words[words.index('-') + 1] in {'tmpfs', 'ramfs'}
  return False
