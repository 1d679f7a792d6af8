"""Curves as files, and the bar: as a user would ask for them."""

import csv
import io
import re
import sys

import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from tests.api import shop


class Terminal(io.StringIO):
  def isatty(self):
    return True


def run(trainer, steps=8, **arguments):
  arguments = {'validation': shop.held_out(), 'every': 4} | arguments
  return trainer.train(
    arguments.pop('source', shop.source()), steps, **arguments
  )


def rows_of(path):
  return [*csv.DictReader(io.StringIO(path.read_text()))]


def test_logs_as_csv_are_those_of_the_history(tmp_path):
  log = slip.CSVLog(tmp_path / 'run.csv')
  source = shop.source()
  with shop.trainer() as trainer:
    one = run(trainer, callbacks=[log], source=source)
    other = run(trainer, callbacks=[log], source=source)
    rows = rows_of(tmp_path / 'run.csv')
    assert [int(row['step']) for row in rows] == [*range(1, 17)]
    losses = [np.float32(row['loss']) for row in rows]
    np.testing.assert_array_equal(losses, [*one.losses, *other.losses])
    assert rows[-1]['examples'] == str(16 * shop.BATCH)
    rows = rows_of(tmp_path / 'run_validation.csv')
    assert [int(row['step']) for row in rows] == [4, 8, 12, 16]
    aucs = [float(row['auc']) for row in rows]
    assert aucs == [*one.curve('auc'), *other.curve('auc')]
    run(trainer, callbacks=[slip.CSVLog(tmp_path / 'run.csv')], source=source)
  assert int(rows_of(tmp_path / 'run.csv')[0]['step']) == 17


def test_tensorboard_reads_the_curves_also_after_an_early_stop(tmp_path):
  events = pytest.importorskip('tensorboard.backend.event_processing')
  from tensorboard.backend.event_processing import event_accumulator

  del events
  board, source = slip.TensorBoard(tmp_path / 'runs' / 'one'), shop.source()
  worse = shop.held_out(1 - shop.CLICKS)
  with shop.trainer() as trainer:
    history = run(
      trainer,
      50,
      validation=worse,
      patience=1,
      callbacks=[board],
      source=source,
    )
    assert len(history.losses) == 8
    again = run(trainer, 2, every=1, callbacks=[board], source=source)
  read = event_accumulator.EventAccumulator(str(tmp_path / 'runs' / 'one'))
  read.Reload()
  losses = read.Scalars('train/loss')
  assert [one.step for one in losses] == [1, 2, 3, 4, 5, 6]
  wanted = [*history.losses[:4], *again.losses]
  np.testing.assert_array_equal([np.float32(o.value) for o in losses], wanted)
  seen = read.Scalars('validation/log_loss')
  assert [one.step for one in seen] == [4, 5, 6]


@pytest.mark.usefixtures('as_users_run_it')
def test_logs_that_cannot_be_written_say_so_before_training(tmp_path):
  (tmp_path / 'file').write_text('')
  for make, path in (
    (slip.CSVLog, tmp_path / 'none' / 'run.csv'),
    (slip.CSVLog, tmp_path),
    (slip.CSVLog, 3),
    (slip.TensorBoard, tmp_path / 'file'),
    (slip.TensorBoard, tmp_path / 'file' / 'runs'),
    (slip.TensorBoard, None),
  ):
    with pytest.raises(UserError, match=r'path|writable|can be made'):
      make(path)


@pytest.mark.parametrize('name', ['rich', 'tensorboardX', 'matplotlib'])
def test_what_is_not_installed_is_named_with_its_command(
  name, tmp_path, monkeypatch
):
  with shop.trainer() as trainer:
    history = run(trainer)
    for module in [*sys.modules]:
      if module.split('.')[0] == name:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    needs = {
      'rich': lambda: run(trainer, progress=True),
      'tensorboardX': lambda: slip.TensorBoard(tmp_path),
      'matplotlib': history.plot,
    }
    with pytest.raises(UserError, match=r"pip install 'slipstream_jax\[fit\]'"):
      needs[name]()
    monkeypatch.setattr(sys, 'stderr', Terminal())
    run(trainer)  # without a bar where there is no rich


def text_of(screen):
  return re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', screen.getvalue())


@pytest.mark.parametrize(
  'asked', [{'steps': 8}, {'epochs': 2}, {'steps': 8, 'epochs': 9}]
)
def test_a_terminal_shows_a_bar_and_a_table(asked, monkeypatch):
  monkeypatch.setattr(sys, 'stderr', Terminal())
  monkeypatch.setenv('COLUMNS', '120')
  with shop.trainer() as trainer:
    history = run(trainer, **({'steps': None} | asked))
  text = text_of(sys.stderr)
  count = len(history.losses)
  assert f'training  batch {count}/{count}' in text
  assert re.search(r'loss 0\.\d{4}  ', text)
  assert re.search(rf'{count} steps in 0:\d\d, loss 0\.\d{{4}}\n', text)
  header, *rows = text[text.index('step  ') :].splitlines()
  assert header.split() == [
    *('step', 'auc', 'log', 'loss', 'normalized', 'entropy'),
    *('accuracy', 'calibration'),
  ]
  assert len(rows) == min(8, len(history.validations))
  assert [row.endswith('best') for row in rows].count(True) == 1


@pytest.mark.parametrize('progress', [None, True, False])
@pytest.mark.parametrize('terminal', [io.StringIO, Terminal])
def test_it_is_silent_where_it_should_be(progress, terminal, monkeypatch):
  monkeypatch.setattr(sys, 'stderr', terminal())
  with shop.trainer() as trainer:
    run(trainer, progress=progress)
    silent = progress is False or terminal is io.StringIO
    assert (text_of(sys.stderr) == '') == silent


@pytest.mark.parametrize('progress', [None, False])
def test_a_notebook_shows_the_bar_and_the_table(progress, monkeypatch):
  shown, cells = [], []

  class Cell:
    """What the display of a cell returns, to change it later."""

    def __init__(self, content, **_):
      cells.append(self)
      self.update(content)

    def update(self, content):
      shown.append(content._repr_mimebundle_([], [])['text/plain'])

  monkeypatch.setattr('IPython.display.display', Cell)
  monkeypatch.setattr('rich.console._is_jupyter', lambda: True)
  monkeypatch.setattr(sys, 'stderr', io.StringIO())
  with shop.trainer() as trainer:
    history = run(trainer, progress=progress)
  assert sys.stderr.getvalue() == ''
  if progress is False:
    assert not shown
    return
  count = len(history.losses)
  assert len(cells) == 3  # the bar, a line, and the table
  assert f'training  batch {count}/{count}' in shown[-3]
  assert re.match(rf'{count} steps in 0:\d\d, loss 0\.\d{{4}}\n', shown[-2])
  assert 'best' in shown[-1]


@pytest.mark.usefixtures('as_users_run_it')
def test_progress_is_yes_or_no():
  with (
    shop.trainer() as trainer,
    pytest.raises(UserError, match='progress must'),
  ):
    run(trainer, progress='yes')


def test_the_picture_of_a_history(tmp_path):
  with shop.trainer() as trainer:
    history = run(trainer, 40)
    figure = history.plot(tmp_path / 'run.png')
    assert (tmp_path / 'run.png').stat().st_size > 10_000
    names = [axes.get_ylabel() for axes in figure.axes]
    assert names == ['loss', 'auc', 'normalized\nentropy', 'accuracy']
    training, seen = figure.axes[0].lines[:2]
    np.testing.assert_array_equal(training.get_ydata(), history.losses)
    np.testing.assert_array_equal(seen.get_ydata(), history.curve('log_loss'))
    alone = trainer.train(shop.source(), 3).plot()
    assert len(alone.axes) == 1
    assert len(trainer.train(shop.source(), 0).plot().axes) == 1
