"""The report of a reproduction, as HTML and as markdown.

Every number of it is of the folder's files, or of `report/paper.py` and then
said to be a paper's. What has no file is not spoken of.
"""

import pathlib

from experiments.pages import html, markdown, svg
from experiments.pages.blocks import Block, Items, Section, Words
from experiments.reproduce import results as files
from experiments.reproduce.report import (
  costs,
  findings,
  paper,
  pictures,
  sentences,
  settings,
  tables,
)
from experiments.reproduce.report.groups import CONTENDERS, Reproduction
from slipstream_jax.files import replace

HTML, MARKDOWN = 'report.html', 'report.md'
_TITLE = 'Slipstream and the systems it is compared with, side by side'
_NOTES = (
  'Slipstream: hot rows pinned on the device, and examples left out. As '
  'published: examples whose rows are stale; a row that the window did not '
  "touch is stale, too. Default policy: that of the model's config, which its "
  'table Setting names. `surprise` leaves out examples by chance, those that '
  'surprise least most often, and weights the others for them. `stale` is the '
  'published policy, but a row that the window did not touch is not stale.',
  'Ratios of seconds and bytes are of runs of one seed, the system over '
  "Slipstream; their mean is geometric, their interval Student's t of their "
  'logs, at 95 %. '
  'A dash: not known, or one seed only.',
  'Without overhead: T_system / T_pinned x 1 / (1 - share dropped), with the '
  'seconds of the run that pins the same rows and skips nothing. It estimates '
  'the speed-up if choosing took no time. All seconds are measured, so it is '
  'no bound: a measured speed-up above it is noise.',
  'Bytes are exact counts of what tables make cross the link; times are of '
  'training alone, without compilation and evaluation.',
)


def write(folder: pathlib.Path) -> None:
  """Writes report.html, report.md and the pictures of it into a folder.

  Args:
    folder: of the reproduction; any part of its files may be there.

  Raises:
    UserError: a file is damaged.
  """
  results = read(folder)
  head, sections = content(results)
  drawings = markdown.pictures(sections)
  if drawings:
    (folder / markdown.PICTURES).mkdir(exist_ok=True)
  for picture in drawings:
    path = folder / markdown.PICTURES / f'{picture.name}.svg'
    replace(path, svg.as_file(picture.svg))
  replace(folder / HTML, html.document(_TITLE, sections, head))
  replace(folder / MARKDOWN, markdown.document(_TITLE, sections, head))


def read(folder: pathlib.Path) -> Reproduction:
  """All that a folder holds.

  Raises:
    UserError: a file is damaged.
  """
  return Reproduction(
    files.read_setting(folder),
    files.read(folder, files.Cell),
    files.read(folder, files.Point),
    files.read(folder, files.Phase),
    files.read(folder, files.Skew),
    files.read(folder, files.RowChange),
    files.read(folder, files.Naive),
    files.read(folder, files.Threshold),
    files.read(folder, files.Modelled),
  )


def content(results: Reproduction) -> tuple[list[Block], list[Section]]:
  """What the page says: what stands before all sections, and these."""
  loud = sentences.synthetic(results)
  head: list[Block] = [Words(loud, loud=True)] if loud else []
  facts = sentences.of_run(results)
  head.append(Words('; '.join(facts) if facts else 'Nothing was run yet.'))
  return head, [
    _summary(results),
    *(_model(results, model) for model in results.models),
    Section('Modelled, not measured', settings.modelled(results), 'modelled'),
    _notes(results),
  ]


def _summary(results: Reproduction) -> Section:
  blocks: list[Block] = [
    Items(f'Slipstream, {policy}', sentences.summary(results, contender))
    for contender, policy in CONTENDERS.items()
  ]
  blocks += [
    Items('Where pooling is better', sentences.pooling(results)),
    *(tables.overview(results, contender) for contender in CONTENDERS),
    settings.between(results),
  ]
  return Section('What wins and what loses', blocks, 'summary')


def _model(results: Reproduction, model: str) -> Section:
  blocks: list[Block] = [
    settings.setting(results, model),
    *pictures.of_systems(results, model),
    tables.time(results, model),
    tables.quality(results, model),
    costs.traffic(results, model),
    costs.skipped(results, model),
    costs.memory(results, model),
    findings.phases(results, model),
    findings.to_quality(results, model),
    *pictures.of_rows(results, model),
    findings.skew(results, model),
    findings.naive(results, model),
    findings.thresholds(results, model),
  ]
  return Section(results.title(model), blocks, model)


def _notes(results: Reproduction) -> Section:
  if not results.cells:
    return Section('', [])
  sources = '; '.join(f'{key}: {value}' for key, value in paper.SOURCES.items())
  words = [
    *_NOTES,
    "The papers' figures were taken on GPUs, with links and data of their own; "
    f'they are never ours. Sources: {sources}.',
  ]
  return Section('How to read this', [Items('', words)], 'notes')
