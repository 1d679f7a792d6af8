"""Frames as people read them."""

import io

import pytest
from rich.console import Console

from experiments.common import report


@pytest.mark.parametrize(
  ('name', 'value', 'expected'),
  [
    ('auc', 0.76859, '0.7686'),
    ('auc', None, '-'),
    ('policy', 'random', 'random'),
    ('hit_rate', 0.9733, '97.3%'),
    ('hot_bytes_share', 0.5, '50.0%'),
    ('drop_missed_share', -0.0003, '0.0%'),
    ('bytes_loaded', 3_150_000, '3.15 MB'),
    ('bytes_loaded', 999, '999 B'),
    ('bytes_loaded', 999_999, '1 MB'),
    ('bytes_loaded', 2_295_000_000, '2.29 GB'),
    ('bytes_loaded', 1_234_500_000_000, '1,234 GB'),
    ('bytes_loaded', 0, '0 B'),
    ('seconds_choosing', 1234.56, '1,234.56 s'),
    ('examples_per_s', 103_512.7, '103,513'),
    ('rows', 33_762_577, '33,762,577'),
    ('ratio', 1.0, '1.00'),
  ],
)
def test_a_value_is_shown_in_the_unit_of_its_name(name, value, expected):
  assert report.text(name, value) == expected


FRAME = [
  {'policy': 'plain', 'rows_loaded': 1200, 'of random': None},
  {'policy': 'random', 'rows_loaded': 7, 'of random': 1.0},
]


def test_a_frame_is_shown_on_the_screen():
  screen = Console(file=io.StringIO(), width=80)
  screen.print(report.table('moved', FRAME, ['bold', None]))
  lines = screen.file.getvalue().splitlines()
  assert lines[0].strip() == 'moved'
  words = [line.replace('│', ' ').replace('┃', ' ').split() for line in lines]
  assert ['policy', 'rows', 'loaded', 'of', 'random'] in words
  assert ['plain', '1,200', '-'] in words
