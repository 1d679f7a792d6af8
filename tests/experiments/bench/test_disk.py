"""What a disk gives is measured on rows that all are on it."""

from experiments.bench import disk


def test_every_figure_is_a_speed(tmp_path):
  frame = list(disk.figures(1 << 16, 4, str(tmp_path)))
  assert len(frame) == len(disk._THREADS) + 2
  assert all(line['rows/s'] > 0 for line in frame)
  assert not list(tmp_path.iterdir())
