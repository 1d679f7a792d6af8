"""Footnotes: what failed, said where it is missing."""

from experiments.pages.words import joined
from experiments.reproduce.report.groups import Group, short


class Notes:
  """Footnotes of a table, numbered as they are asked for."""

  def __init__(self) -> None:
    self.texts: list[str] = []

  def mark(self, text: str) -> str:
    """The number of a note; the same for the same text."""
    if text not in self.texts:
      self.texts.append(text)
    return f'[{self.texts.index(text) + 1}]'

  @property
  def lines(self) -> list[str]:
    """The notes, each with its number."""
    return [f'{self.mark(text)} {text}' for text in list(self.texts)]

  def name(self, group: Group) -> str:
    """What a group is called, with a mark for what failed of it."""
    return ' '.join([group.name, *self.failures(group)])

  def failures(self, group: Group) -> list[str]:
    """Marks for what failed of a group, a note for each sentence."""
    by_sentence: dict[str, list[int]] = {}
    for seed, sentence in group.failures.items():
      by_sentence.setdefault(sentence, []).append(seed)
    return [
      self.mark(
        f'{short(group.model)}, {group.name}, seed{"s" * (len(seeds) > 1)} '
        f'{joined(seeds)}: {sentence}'
      )
      for sentence, seeds in by_sentence.items()
    ]

  def value(self, group: Group, text: str) -> str:
    """A cell: what failed says so where nothing else is known."""
    return 'failed' if group.failures and not group.cells else text
