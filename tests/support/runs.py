"""Runs of the main job in this process, and what is in their folders."""

import io
import json
import pathlib

import numpy as np
import pytest

from configs import criteo
from experiments.common import cli, datasets, record
from experiments.run import job
from slipstream_jax.checkpoint import manifest
from slipstream_jax.checkpoint.chain import merged_rows, read_chain
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import concatenate
from slipstream_jax.checkpoint.state import DENSE

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared' / 'data'


def smoke(**changes):
  return changed(criteo.get_config('smoke'), changes)


def changed(config, changes):
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return config


def run_job(workdir, config):
  return cli.guarded(job.run, config, str(workdir))


def summary_of(workdir):
  return json.loads((workdir / record.SUMMARY).read_text())


def lines_of(workdir):
  text = (workdir / record.METRICS).read_text()
  return [json.loads(line) for line in text.splitlines()]


def manifest_of(workdir, step):
  return workdir / 'checkpoints' / manifest.name_of(step)


def arrays_of(workdir, step):
  """All that the checkpoint of a run has: its rows, and all else."""
  place = open_place(workdir / 'checkpoints')
  chain = read_chain(place, step)
  rows = {
    group: concatenate([*merged_rows(place, chain, group)])
    for group in chain[-1].groups
  }
  file = chain[-1].files[DENSE]
  data = io.BytesIO(place.read(file.name, file.bytes))
  dense = dict(np.load(data, allow_pickle=False))
  return {
    'rows': {group: piece.rows for group, piece in rows.items()},
    'values': {group: piece.values for group, piece in rows.items()},
    'dense': dense,
  }


def snapshot(folder):
  """Every file of a folder: what it holds, and when it was written."""
  return {
    path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
    for path in folder.rglob('*')
  }


def no_work(monkeypatch):
  def work(config):
    pytest.fail('a run that cannot be built its data set')

  monkeypatch.setattr(datasets, 'dataset', work)


def assert_same_tree(one, other):
  assert type(one) is type(other)
  if isinstance(one, dict):
    assert one.keys() == other.keys()
    for key in one:
      assert_same_tree(one[key], other[key])
  elif isinstance(one, list | tuple):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
      assert_same_tree(a, b)
  elif one is not None:
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def assert_one_sentence(text, *parts):
  assert text.startswith('error: ')
  assert text.count('\n') == 1
  assert 'Traceback' not in text
  for part in parts:
    assert part in text, text
