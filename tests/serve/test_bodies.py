"""Bodies are read exactly: the scores of scoring in process, or a 4xx."""

import json
import random

import numpy as np
import pytest

from slip_serve.vocabulary import END, raw_id
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.state import integers
from tests.serve import exported
from tests.serve.raw import answered, posted
from tests.serve.test_scores import uneven
from tests.support import small
from tests.support.texts.mutations import check_sentence, mutated
from tests.support.watchdog import watchdog

BAD = ('true', '"1"', '[1]', '{}', '1e999', 'NaN', '-Infinity', '9' * 500)
JUNK = ('null', '5', '"x"', '{}', '[]', 'true', '[[]]', '[null]')


@pytest.fixture(scope='module')
def servers(tmp_path_factory):
  """A model whose ids are rows, and one with bags, weights and a vocabulary."""
  folder = tmp_path_factory.mktemp('bodies')
  counted = exported.trained(uneven(), steps=0)
  known = tuple(
    Vocabulary(integers(np.arange(-40, 40, 10 + i))) for i in range(3)
  )
  data = counted.data._replace(vocabulary=lambda: known)
  with (
    exported.served(
      exported.trained(small.recipe(), steps=2), folder / 'x'
    ) as rows,
    exported.served(counted._replace(data=data), folder / 'y') as words,
  ):
    yield rows, words


def texts_of(rng, layout, count):
  """Valid lines, each value as the text that JSON has, and as numbers."""

  def number():
    return rng.choice(
      (repr(rng.gauss(0, 1)), str(rng.randrange(-9, 9)), '1e-50', '0.5E1')
    )

  def one_id(column):
    table = layout.tables[layout.features[column].table]
    if layout.vocabulary[layout.features[column].table].kind == 'none':
      return str(rng.choice((rng.randrange(table.rows), END)))
    word = rng.choice(('', '7', '-7', '007', 'é', '\x00"', '[[', '9' * 30))
    return rng.choice(
      (str(rng.randrange(-40, 40)), 'null', json.dumps(word), str(2**63 - 1))
    )

  columns = [
    i for i, one in enumerate(layout.features) for _ in range(one.length)
  ]
  parts = {
    'dense': [
      [number() for _ in range(layout.dense_features)] for _ in range(count)
    ],
    'ids': [[one_id(column) for column in columns] for _ in range(count)],
  }
  if layout.weighted and rng.random() < 0.5:
    parts['weights'] = [[number() for _ in columns] for _ in range(count)]
  return parts


def joined(lines):
  return '[' + ', '.join(f'[{",".join(line)}]' for line in lines) + ']'


def body_of(parts):
  items = [f'"{key}": {joined(lines)}' for key, lines in parts.items()]
  return '{' + ', '.join(items) + '}'


def scores_of(scorer, parts):
  """Of scoring in process."""
  values = {
    key: [[json.loads(one) for one in line] for line in lines]
    for key, lines in parts.items()
  }
  ids = [
    [one if isinstance(one, int) else raw_id(one) for one in line]
    for line in values['ids']
  ]
  weights = values.get('weights')
  return scorer.probabilities(
    np.array(values['dense']),
    np.array(ids, np.int64),
    None if weights is None else np.array(weights),
  )


def replaced(parts, key, example, line):
  lines = [*parts[key]]
  lines[example] = line
  return parts | {key: lines}


def changed(rng, layout, parts):
  """A body of another meaning, or of none."""
  text, count = body_of(parts), len(parts['ids'])
  key = rng.choice([*parts])
  example = rng.randrange(count)
  lines, line = parts[key], parts[key][example]
  place = rng.randrange(len(line))
  wrong = [*BAD]
  if key == 'ids':
    kind = layout.vocabulary[0].kind
    wrong = ['1.0', '0.5', 'false', str(2**63), str(-(2**63) - 1), *BAD[2:]]
    wrong += ['"1"', 'null', '-1', '99999'] if kind == 'none' else ['"\\ud800"']
  one_wrong = [*line[:place], rng.choice(wrong), *line[place + 1 :]]
  flat = [one for some in lines for one in some]
  transposed = [list(some) for some in zip(*lines, strict=True)]
  other = {one: joined(some) for one, some in parts.items() if one != key}
  rest = ''.join(f', "{one}": {some}' for one, some in other.items())
  named = ', '.join(f'"{i}": {one}' for i, one in enumerate(line))
  long = line[place] if len(line) > 1 else '1'
  odd = rng.choice(
    [f'"{"1" * len(line)}"', f'{{{named}}}', *JUNK, f'[{joined([line])}]']
  )
  ways = [
    lambda: body_of(replaced(parts, key, example, one_wrong)),
    lambda: f'{{"{key}": [{",".join(flat)}]{rest}}}',
    lambda: body_of(replaced(parts, key, example, [*line, long])),
    lambda: body_of(replaced(parts, key, example, line[:-1])),
    lambda: body_of(parts | {key: [*lines, line]}),
    lambda: body_of(parts | {key: lines[:-1]}),
    lambda: body_of({one: [] for one in parts}),
    lambda: f'{{"{key}": {rng.choice(JUNK)}{rest}}}',
    lambda: f'{{{rest[2:]}}}' if key != 'weights' else '{}',
    lambda: f'{{"{key.title()}": {joined(lines)}{rest}}}',
    lambda: f'{text[:-1]}, "{key}": {joined(lines)}}}',
    lambda: f'{text[:-1]}, "more": 1}}',
    lambda: text[: rng.randrange(len(text))],
    lambda: text + rng.choice(('x', '{}', ',', '\x00')),
    lambda: text.replace('"', "'", 1),
    lambda: rng.choice((*JUNK, '', ' ', '[' * 9999, '{"a":' * 9999)),
    lambda: text.encode('utf-16'),
    lambda: b'\xef\xbb\xbf' + text.encode(),
    lambda: text.encode().replace(b'[', b'[\xff', 1),
    lambda: (
      '{"'
      + f'{key}": ['
      + ', '.join(
        odd if i == example else f'[{",".join(some)}]'
        for i, some in enumerate(lines)
      )
      + f']{rest}}}'
    ),
  ]
  if transposed != lines and len(line) != count:
    ways.append(lambda: body_of(parts | {key: transposed}))
  if not layout.weighted:
    ways.append(lambda: body_of(parts | {'weights': parts['ids']}))
  body = rng.choice(ways)()
  return body if isinstance(body, bytes) else body.encode()


def test_valid_bodies_have_the_scores_of_scoring_in_process(servers):
  rng = random.Random(0)
  with watchdog():
    for number in range(80):
      scorer, address = servers[number % 2]
      parts = texts_of(rng, scorer.layout, rng.randrange(1, 7))
      expected = scores_of(scorer, parts)
      code, values = answered(address, posted(body_of(parts).encode()))
      assert code == 200, (values, parts)
      scores = np.array(values['probabilities'])
      np.testing.assert_array_equal(scores, expected.astype(np.float64))


@pytest.mark.parametrize(
  'tries', [400, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_bodies_of_another_meaning_are_refused(servers, tries, capfd):
  rng = random.Random(1)
  with watchdog(busy_s=600):
    for number in range(tries):
      scorer, address = servers[number % 2]
      parts = texts_of(rng, scorer.layout, rng.randrange(1, 4))
      body = changed(rng, scorer.layout, parts)
      code, values = answered(address, posted(body))
      assert (code, [*values]) == (400, ['error']), (body, values)
      check_sentence(values['error'])
  assert capfd.readouterr().err == ''


def test_bodies_with_changed_bytes_are_refused_or_scored_as_they_say(servers):
  rng = random.Random(2)
  scored = 0
  with watchdog():
    for number in range(300):
      scorer, address = servers[number % 2]
      parts = texts_of(rng, scorer.layout, 2)
      body = mutated(body_of(parts).encode(), rng)
      code, values = answered(address, posted(body))
      assert code in (200, 400), values
      if code == 200:
        scored += 1
        said = json.loads(body.decode())
        again = {
          key: [[json.dumps(one) for one in line] for line in lines]
          for key, lines in said.items()
        }
        expected = scores_of(scorer, again)
        assert values['probabilities'] == expected.tolist()
  assert scored < 100


def test_the_sentence_names_feature_and_example(servers):
  (_, rows), (_, words) = servers
  dense, ids = [[0.0] * small.DENSE] * 2, [[0, 0, 0, 0]] * 2
  for address, values, words_of_it in (
    (rows, {'dense': dense, 'ids': [ids[0], [0, 9, 0, 0]]}, ('1', "'t1'", '9')),
    (rows, {'dense': [dense[0], [0, True, 0, 0]], 'ids': ids}, ('example 1',)),
    (words, {'dense': dense, 'ids': [[0] * 7 + [1.5]] * 2}, ('0', "'w'")),
    (words, {'dense': dense, 'ids': ids}, ('8', 'list of 4')),
  ):
    code, answer = answered(address, posted(json.dumps(values).encode()))
    assert code == 400
    check_sentence(answer['error'], *words_of_it)
