"""Tables of runs: time, quality, bytes, what was dropped, and what it costs."""

from collections.abc import Callable

from experiments.pages import words
from experiments.pages.blocks import Table
from experiments.pages.estimates import (
  Estimate,
  mean,
  of_test_set,
)
from experiments.pages.words import middle, NONE
from experiments.reproduce.report import paper
from experiments.reproduce.report.groups import (
  auc,
  BASELINES,
  CONTENDERS,
  Group,
  groups,
  Key,
  less,
  moved,
  moved_in_all,
  pace,
  Reproduction,
  short,
  times,
  without_overhead,
)
from experiments.reproduce.report.notes import Notes
from experiments.reproduce.results import Cell

SURE = '95 % interval'
Row = Callable[[Group], dict[str, str]]


def overview(results: Reproduction, contender: Key) -> Table:
  """Slipstream against the paper's baselines, all models: the paper's table."""
  notes, frame = Notes(), []
  for model in results.models:
    all_groups = groups(results, model)
    ours = all_groups.get(contender)
    if ours is None:
      continue
    for key in [(system, 'off') for system in BASELINES]:
      if key not in all_groups:
        continue
      against = all_groups[key]
      ratio = times(against, ours, pace)
      ideal = without_overhead(all_groups, against, contender)
      lead = less(ours, against, auc)
      row = {
        'model': short(model),
        'against': notes.name(against),
        'times as fast': middle(ratio, words.times),
        SURE: words.interval(ratio, words.times),
        "paper's claim": _claim(model, key),
        'without overhead': middle(ideal, words.times),
        'bytes, times as many': middle(
          times(against, ours, moved), words.times
        ),
        'with dense ones': middle(
          times(against, ours, moved_in_all), words.times
        ),
        'AUC, ours less its': middle(lead, words.change),
        f'{SURE} ': words.interval(lead, words.change),
      }
      if ours.failures:
        row['times as fast'] += ' ' + ' '.join(notes.failures(ours))
      if not against.cells or not ours.cells:
        row['times as fast'] = row['times as fast'].replace(NONE, 'failed', 1)
      frame.append(row)
  return Table(
    f"Slipstream, {CONTENDERS[contender]}, against the paper's baselines",
    frame,
    'Times as fast: the seconds of the system over ours; above 1, ours is '
    'faster. Without overhead: an estimate of the same if choosing took no '
    'time. Both are of measured seconds: where the first is larger, that is '
    'noise. Bytes are of tables; dense ones are the parameters that XDL moves '
    'as well.',
    notes.lines,
  )


def _claim(model: str, key: Key) -> str:
  system, skip = key
  known = model in paper.MODELS and skip == 'off'
  return words.number(paper.CLAIMS.get(system) if known else None, '{:.4g}')


def time(results: Reproduction, model: str) -> Table:
  """Seconds of each system, and how many times as fast Slipstream is."""
  all_groups = groups(results, model)

  def row(group: Group) -> dict[str, str]:
    spent = group.mean(lambda cell: cell.seconds)
    rate = group.mean(_rate)
    line = {
      'seeds': str(len(group.cells)),
      'seconds': middle(spent, '{:,.2f}'.format),
      'examples/s': middle(rate, '{:,.0f}'.format),
    }
    for key, policy in CONTENDERS.items():
      if key in all_groups:
        others = (
          None if group.key == key else times(group, all_groups[key], pace)
        )
        ideal = without_overhead(all_groups, group, key)
        figures = {
          f'{policy}: times as fast': middle(others, words.times),
          SURE: words.interval(others, words.times),
          'without overhead': middle(ideal, words.times) if others else NONE,
        }
        add(line, figures)
    return line | {"paper's claim": _claim(model, group.key)}

  return by_system(
    'Time',
    all_groups,
    row,
    'Training alone, for the same examples. Without overhead: T_system / '
    'T_pinned x 1 / (1 - share dropped), an estimate.',
  )


def _rate(cell: Cell) -> float | None:
  if not cell.seconds or not cell.examples_seen:
    return None
  return cell.examples_seen / cell.seconds


def quality(results: Reproduction, model: str) -> Table:
  """AUC, log loss and accuracy on the test set."""
  all_groups = groups(results, model)
  plain = all_groups.get(('plain', 'off'))
  tested = any(
    cell.test_positives is not None
    for group in all_groups.values()
    for cell in group.cells.values()
  )

  def row(group: Group) -> dict[str, str]:
    curve, lead = group.mean(auc), less(group, plain, auc)
    line = {
      'AUC': middle(curve, words.quality),
      '95 %, over seeds': words.interval(curve, words.quality),
    }
    if tested:
      bounds = words.interval(_of_test_set(group), words.quality)
      line['95 %, of one test set'] = bounds
    if plain is not None:
      own = group.key == plain.key
      line |= {
        "AUC less streamed's": NONE if own else middle(lead, words.change),
        SURE: NONE if own else words.interval(lead, words.change),
      }
    for title, figure, form in (
      ('log loss', group.mean(lambda cell: cell.log_loss), words.quality),
      ('accuracy', group.mean(lambda cell: cell.accuracy), words.share),
    ):
      add(
        line,
        {title: middle(figure, form), SURE: words.interval(figure, form)},
      )
    return line

  published = paper.MODELS.get(model)
  about = 'On held-out examples.'
  if published:
    figure = f'{published.auc:.3f}' if published.auc else 'not given'
    about += (
      f" The papers' full run on the real {published.data}: AUC {figure}, log "
      f'loss {published.log_loss:.3f}, accuracy {published.accuracy:.2%}.'
    )
  if tested:
    about += (
      ' The interval of one test set is of a single run, after Hanley and '
      'McNeil; the one over seeds is of the mean, after Student.'
    )
  return by_system('Quality', all_groups, row, about)


def _of_test_set(group: Group) -> Estimate | None:
  known = [
    (cell.auc, cell.test_positives, cell.test_examples)
    for cell in group.cells.values()
    if None not in (cell.auc, cell.test_positives, cell.test_examples)
  ]
  if not known:
    return None
  curve, positives, examples = (
    mean(list(values)) for values in zip(*known, strict=True)
  )
  if curve is None or positives is None or examples is None:
    return None
  return of_test_set(curve.mean, round(positives.mean), round(examples.mean))


def add(line: dict[str, str], figures: dict[str, str]) -> None:
  """Adds columns to a row; one of a name that is there stands again."""
  for title, text in figures.items():
    while title in line:
      title += ' '
    line[title] = text


def by_system(
  title: str, all_groups: dict[Key, Group], row: Row, about: str
) -> Table:
  """A row for each system; columns of which nothing is known are left out."""
  notes = Notes()
  frame = [
    {'system': notes.name(group)}
    | {name: notes.value(group, text) for name, text in row(group).items()}
    for group in all_groups.values()
  ]
  dull = {NONE, 'failed', '0'}
  names = [
    name
    for name in (frame[0] if frame else {})
    if name == 'system' or any(line[name] not in dull for line in frame)
  ]
  known = len(names) > 1 or notes.lines
  strong = [n for n, key in enumerate(all_groups) if key in CONTENDERS]
  return Table(
    title,
    [{name: line[name] for name in names} for line in frame] if known else [],
    about,
    notes.lines,
    strong,
  )
