"""The bench of disks, on few rows."""

import pytest

from experiments.bench import cold


@pytest.mark.slow
def test_every_figure_is_a_speed(tmp_path):
  frame = list(cold.speeds(1 << 16, 4, str(tmp_path)))
  assert len(frame) == len(cold.THREADS) + 2
  assert all(line['rows/s'] > 0 for line in frame)
  assert not list(tmp_path.iterdir())
