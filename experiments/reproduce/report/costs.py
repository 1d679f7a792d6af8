"""Tables of what a run costs beside time: bytes, choices, memory."""

from experiments.pages import words
from experiments.pages.blocks import Table
from experiments.pages.words import middle, NONE
from experiments.reproduce.report import paper
from experiments.reproduce.report.groups import (
  dense,
  dropped,
  dropped_of_hot,
  Group,
  groups,
  Key,
  loaded,
  moved,
  moved_in_all,
  OURS,
  Reproduction,
  stored,
  times,
)
from experiments.reproduce.report.tables import by_system, SURE
from experiments.reproduce.results import Cell


def traffic(results: Reproduction, model: str) -> Table:
  """Bytes per example across the link, beside the published gigabytes."""
  all_groups = groups(results, model)
  ours, fae = all_groups.get(OURS), all_groups.get(('fae', 'off'))
  published = paper.MODELS.get(model)

  def row(group: Group) -> dict[str, str]:
    line = {
      'to the device': middle(group.mean(loaded), words.amount),
      'to the host': middle(group.mean(stored), words.amount),
      'dense parameters': middle(group.mean(dense), words.amount),
      'in all': middle(group.mean(moved_in_all), words.amount),
    }
    if ours is not None:
      own = group.key == ours.key
      for title, value in (
        ("tables, times the default policy's", moved),
        ('with dense', moved_in_all),
      ):
        many = None if own else times(group, ours, value)
        line[title] = middle(many, words.times)
        if value is moved:
          line[SURE] = words.interval(many, words.times)
    if fae is not None:
      line["tables, times FAE's"] = middle(
        times(group, fae, moved), words.times
      )
    return line | (_published(published, group.key) if published else {})

  about = 'Bytes per example seen, exact counts; dense parameters apart.'
  if published:
    least = 8 * published.tables * published.dim
    about += (
      f" Paper: FAE's, GB in {paper.EPOCHS_OF_BYTES} epochs, and spread over "
      f"its {published.examples:,} examples; a single example's embeddings "
      f'and gradients take {least:,} bytes, so compare ratios.'
    )
  return by_system('Bytes moved', all_groups, row, about)


def _published(published: paper.Model, key: Key) -> dict[str, str]:
  whole = published.gigabytes.get(key[0]) if key[1] == 'off' else None
  names = ('paper, GB', 'paper, per example', "paper, times FAE's")
  if whole is None:
    return dict.fromkeys(names, NONE)
  passed = published.examples * paper.EPOCHS_OF_BYTES
  values = (
    f'{whole:g}',
    words.amount(whole * 1e9 / passed),
    words.times(whole / published.gigabytes['fae']),
  )
  return dict(zip(names, values, strict=True))


def skipped(results: Reproduction, model: str) -> Table:
  """What was dropped, and what choosing it took."""
  all_groups = groups(results, model)
  kept = {key: group for key, group in all_groups.items() if key[1] != 'off'}
  target = results.setting_of(model).get('drop_target')

  def row(group: Group) -> dict[str, str]:
    shares = [
      group.mean(value) for value in (dropped, dropped_of_hot, _hot, _chosen)
    ] + [group.mean(value) for value in (_window, _overhead)]
    names = (
      *('dropped, of all', 'dropped, of hot', 'hot examples'),
      *('choosing, of the time', 'windows, of the time', 'both'),
    )
    texts = [middle(share, words.share) for share in shares]
    return dict(zip(names, texts, strict=True))

  asked = f'{target:.0%} of hot examples, while skipping' if target else ''
  about = (
    'Of all and of hot examples that a run saw, warm-up and windows included.'
    + (f' The drop target is {asked}.' if asked else '')
    + f" The paper's is {paper.DROP_TARGET:.0%}, which dropped "
    f'{paper.DROPPED:.0%} of all examples on Criteo Kaggle. Choosing: scores, '
    'threshold and choice; windows: snapshots, and comparing rows.'
  )
  return by_system('What is skipped, and what that costs', kept, row, about)


def _hot(cell: Cell) -> float | None:
  return cell.examples_hot_share


def _of_time(cell: Cell, *parts: float | None) -> float | None:
  known = [part for part in parts if part is not None]
  if not cell.seconds or len(known) < len(parts):
    return None
  return sum(known) / cell.seconds


def _chosen(cell: Cell) -> float | None:
  return _of_time(cell, cell.choose_seconds)


def _window(cell: Cell) -> float | None:
  return _of_time(cell, cell.window_seconds)


def _overhead(cell: Cell) -> float | None:
  return _of_time(cell, cell.choose_seconds, cell.window_seconds)


def memory(results: Reproduction, model: str) -> Table:
  """Lists where each system keeps rows, and its rate of matrix products."""

  def row(group: Group) -> dict[str, str]:
    device, host, hot, rate = (
      group.mean(value)
      for value in (
        lambda cell: cell.device_bytes,
        lambda cell: cell.host_bytes,
        lambda cell: cell.lookups_hot_share,
        lambda cell: cell.matrix_share,
      )
    )
    return {
      'device': words.bytes_of(device and device.mean),
      'host': words.bytes_of(host and host.mean),
      'hot lookups': middle(hot, words.share),
      "of a plain product's rate": middle(rate, words.share),
    }

  return by_system(
    'Memory and matrix products',
    groups(results, model),
    row,
    'Bytes that are kept where; the share of lookups that hit a hot row; and '
    "the rate of a whole run's matrix products over that of a plain one of "
    '1024 x 1024, measured once beforehand. That is no limit: it may be above '
    '100 %.',
  )
