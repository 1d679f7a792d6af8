"""Folders of results that a stopped program continues: settings and tables.

A table is a CSV file with a line for each finished run or point. An empty field
is a value that is not known. A file is replaced as a whole, so it is complete
at any time.
"""

from collections.abc import Collection, Iterable, Mapping
import csv
import io
import json
import pathlib
from typing import Any

import ml_collections

from experiments.common.record import CONFIG, read_json, write_json
from experiments.common.usage import keys_of
from slipstream_jax.errors import UserError
from slipstream_jax.files import replace

Row = dict[str, Any]
"""Column to value. Unknown values are absent."""
_FREE = {'seed', 'resume'}  # runs of other seeds may be added


def settings_in(folder: pathlib.Path, name: str) -> dict[str, Any]:
  """Returns the settings that a folder was started with; {} if it is empty.

  Args:
    folder: an existing folder.
    name: the JSON file of the settings.

  Raises:
    UserError: the file is damaged, or the folder holds something else.
  """
  if not (folder / name).exists() and any(folder.iterdir()):
    raise UserError(
      'results need a new or empty folder, or one to continue with',
      got=folder,
      where='--workdir',
      hint='name another one',
    )
  return read_json(folder / name)


def keep_config(
  folder: pathlib.Path,
  config: ml_collections.ConfigDict,
  **flags: Any,
) -> None:
  """Writes the config into a folder, or checks that it is the one there.

  Args:
    folder: an existing folder.
    config: what all results share, but for the seed.
    flags: flags of the program that must not change either.

  Raises:
    UserError: the folder holds results with other settings, something else, or
      damaged files.
  """
  new = {**json.loads(config.to_json_best_effort()), **flags}
  if old := settings_in(folder, CONFIG):
    olds, news = map(_by_key, (old, new))
    keys = sorted((olds.keys() | news.keys()) - _FREE)
    names = {k: f'--{k}' if k in flags else f'config.{k}' for k in keys}
    check_same(olds, news, names)
  write_json(folder / CONFIG, new)


def _by_key(config: dict[str, Any]) -> dict[str, Any]:
  return dict(keys_of(ml_collections.ConfigDict(config, convert_dict=True)))


def check_same(
  old: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str]
) -> None:
  """Checks that settings are those that the results were started with.

  Args:
    old: the settings of the folder.
    new: the settings of this program.
    names: what users call each setting that must not change, by key.

  Raises:
    UserError: a setting is another one.
  """
  for key, name in names.items():
    if old.get(key) != new.get(key):
      raise UserError(
        f'results to continue must keep {name}, which was {old.get(key)}',
        got=new.get(key),
        where=name,
        hint='use the settings they were started with, or another --workdir',
      )


def read(
  path: pathlib.Path,
  columns: Collection[str],
  words: Collection[str],
  renamed: Mapping[str, str] | None = None,
) -> list[Row]:
  """Returns the rows of a table, without a last line that was cut off.

  Args:
    path: the CSV file. One that does not exist has no rows.
    columns: the known columns. The file may lack some.
    words: columns of text. All others are numbers.
    renamed: columns of older versions, with their names today.

  Raises:
    UserError: the file is damaged.
  """
  # A line that was cut off may end within a character.
  data = path.read_bytes() if path.exists() else b''
  text = data[: data.rfind(b'\n') + 1].decode()
  header, *lines = csv.reader(io.StringIO(text, newline='')) if text else [[]]
  names = [(renamed or {}).get(name, name) for name in header]
  if unknown := set(names) - set(columns):
    raise damaged(path, 'columns must be known', sorted(unknown))
  rows = []
  for number, fields in enumerate(lines, 2):
    try:
      pairs = zip(names, fields, strict=True)
      rows.append(
        {
          name: field if name in words else _number(field)
          for name, field in pairs
          if field
        }
      )
    except ValueError as error:
      rule = f'line {number} must hold a value, or nothing, for each column'
      raise damaged(path, rule, fields) from error
  return rows


def _number(text: str) -> int | float:
  return int(text) if text.lstrip('-').isdigit() else float(text)


def damaged(path: pathlib.Path, rule: str, got: Iterable[object]) -> UserError:
  """Returns the error of a table that cannot be read."""
  return UserError(
    rule,
    got=','.join(map(str, got)),
    where=str(path),
    hint='it is of another version, or damaged: use another --workdir',
  )


def write(
  path: pathlib.Path, columns: Collection[str], rows: Iterable[Row]
) -> None:
  """Writes a table. None and NaN are unknown."""
  file = io.StringIO(newline='')
  writer = csv.DictWriter(file, columns)
  writer.writeheader()
  writer.writerows(map(known, rows))
  replace(path, file.getvalue())


def known(row: Mapping[str, Any]) -> Row:
  """Returns the values of a row that are neither None nor NaN."""
  return {
    name: value
    for name, value in row.items()
    if value is not None and value == value
  }
