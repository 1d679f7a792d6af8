"""Places: files whole or not at all, by path and by URL."""

import os
import uuid

import fsspec
import pytest

from slipstream_jax.checkpoint import places
from slipstream_jax.checkpoint.chain import (
  consolidate,
  copy_as_base,
  find_chains,
  prune,
)
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.checkpoint.row_file import facts_in
from slipstream_jax.errors import UserError
from tests.checkpoint import small


@pytest.fixture(scope='module')
def s3():
  """URL of a bucket of a server of our own."""
  pytest.importorskip('s3fs', reason='the extra s3 is not installed')
  server = pytest.importorskip(
    'moto.server', reason='the extra s3 is not installed'
  ).ThreadedMotoServer(port=0)
  keys = {
    'AWS_ACCESS_KEY_ID': 'a',
    'AWS_SECRET_ACCESS_KEY': 'b',
    'AWS_DEFAULT_REGION': 'us-east-1',
  }
  server.start()
  with pytest.MonkeyPatch.context() as patch:
    for name, value in keys.items():
      patch.setenv(name, value)
    host, port = server.get_host_and_port()
    patch.setenv('AWS_ENDPOINT_URL', f'http://{host}:{port}')
    fsspec.filesystem('s3').mkdir('bucket')
    yield 's3://bucket'
    fsspec.filesystem('s3').clear_instance_cache()
  server.stop()


@pytest.fixture(params=['folder', 'file', 'memory', 's3'])
def place(request, tmp_path):
  if request.param == 's3':
    return open_place(f'{request.getfixturevalue("s3")}/{uuid.uuid4().hex}')
  urls = {
    'folder': tmp_path / 'new' / 'folder',
    'file': f'file://{tmp_path}/new/folder',
    'memory': f'memory://{uuid.uuid4().hex}',
  }
  return open_place(urls[request.param])


def test_a_file_is_what_was_written(place):
  assert place.names() == []
  assert place.write('a', [b'one', bytearray(b''), memoryview(b'two')]) == 6
  assert place.write('b', []) == 0
  assert (place.size('a'), place.size('b')) == (6, 0)
  assert place.read('a', 100) == b'onetwo'
  assert place.read('a', 2) == b'one'
  assert place.read('b', 5) == b''
  with place.open('a') as file:
    assert (file.read(2), file.tell(), file.read(9)) == (b'on', 2, b'etwo')
  assert place.names() == ['a', 'b']
  assert place.names('b') == ['b']
  place.write('a', [b'anew'])
  assert place.read('a', 100) == b'anew'
  place.delete('a')
  place.delete('a')
  place.sweep()
  assert place.names() == ['b']


def test_what_is_not_there_is_an_os_error(place):
  for ask in (place.size, place.open, lambda name: place.read(name, 1)):
    with pytest.raises(FileNotFoundError):
      ask('none')
  place.write('a', [b'a'])
  with pytest.raises(FileNotFoundError):
    place.size('none')


def test_what_fails_while_it_is_written_leaves_what_was_there(place):
  place.write('a', [b'first'])

  def pieces():
    yield b'second' * 10_000
    raise ZeroDivisionError

  for name in ('a', 'b'):
    with pytest.raises(ZeroDivisionError):
      place.write(name, pieces())
  assert place.names() == ['a']
  assert place.read('a', 100) == b'first'


def test_a_chain_lives_anywhere(place, tmp_path):
  first = small.save(place, (), None, 1, range(0, 200, 2))
  chain = small.save(place, first, 1, 2, range(50, 60))
  meant = small.expected('lazy_adam', range(0, 200, 2), 1)
  meant |= small.expected('lazy_adam', range(50, 60), 2)
  assert find_chains(place).chains == [chain]
  assert small.restored(place, chain) == meant
  for facts in chain[-1].rows.values():
    assert facts_in(place, facts.name) == facts
  copy = open_place(tmp_path / 'copy')
  assert small.restored(copy, (copy_as_base(place, chain, copy),)) == meant
  base = consolidate(place, chain)
  prune(place, keep=1)
  assert len(place.names()) == 3
  assert find_chains(place).chains == [(base,)]
  assert small.restored(place, (base,)) == meant


def test_a_folder_is_left_clean_and_synced(tmp_path, monkeypatch):
  synced = []
  real = os.fsync
  monkeypatch.setattr(os, 'fsync', lambda file: synced.append(real(file)))
  place = open_place(tmp_path)
  place.write('a', [b'1'])
  assert len(synced) == 2  # the file, and then the folder
  (tmp_path / 'b.slipstream-tmp').write_bytes(b'what a killed writer left')
  (tmp_path / 'inner').mkdir()
  assert place.names() == ['a', 'inner']
  place.sweep()
  place.delete('inner')
  assert {path.name for path in tmp_path.iterdir()} == {'a', 'inner'}


def test_a_remote_file_is_read_by_ranges(monkeypatch):
  monkeypatch.setattr(places, '_AHEAD', 10)
  place = open_place(f'memory://{uuid.uuid4().hex}')
  data = bytes(range(256))
  place.write('a', [data])
  with place.open('a') as file:
    assert b''.join(iter(lambda: file.read(7), b'')) == data


def test_what_a_file_system_raises_is_an_os_error(monkeypatch):
  place = open_place(f'memory://{uuid.uuid4().hex}')
  place.write('a', [b'1'])

  def refuse(*args, **kwargs):
    raise RuntimeError('no such token')

  for method in ('put_file', 'cat_file', 'size', 'ls', 'rm_file'):
    monkeypatch.setattr(type(fsspec.filesystem('memory')), method, refuse)
  for ask in (
    lambda: place.write('b', [b'1']),
    lambda: place.size('a'),
    lambda: place.read('a', 1),
    place.names,
    lambda: place.delete('a'),
  ):
    with pytest.raises(OSError, match='RuntimeError: no such token'):
      ask()


@pytest.mark.parametrize('url', ['nonsense://a/b', ''])
def test_what_nothing_opens_is_refused(url):
  with pytest.raises(UserError, match='must be a path'):
    open_place(url)
