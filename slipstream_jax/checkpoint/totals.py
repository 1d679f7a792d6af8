"""What saving has cost a run."""

from typing import NamedTuple

from slipstream_jax.checkpoint.manifest import file_name, Manifest


class Totals(NamedTuple):
  """What saving has cost so far."""

  saved: int = 0
  """Checkpoints that were written."""
  bases: int = 0
  """Of these, how many were no increments."""
  rows: int = 0
  """Written, those of all checkpoints summed."""
  row_bytes: int = 0
  """Of the row files."""
  other_bytes: int = 0
  """Of the files beside them that were written anew, manifests aside."""
  seconds_writing: float = 0.0
  """Of the thread that writes."""
  seconds_waiting: float = 0.0
  """That training waited: for what is copied, for the checkpoint before, and
  for room in `Saving.memory_bytes`."""

  def waited(self, seconds: float) -> 'Totals':
    """With some more seconds that training waited."""
    return self._replace(seconds_waiting=self.seconds_waiting + seconds)

  def wrote(self, seconds: float, newest: Manifest | None) -> 'Totals':
    """With one more that was written, or failed if it is None."""
    totals = self._replace(seconds_writing=self.seconds_writing + seconds)
    if newest is None:
      return totals
    rows = sum(facts.rows or 0 for facts in newest.rows.values())
    # Of the files of before, some are still true.
    own = file_name('file', newest.step, '')
    files = (
      file for file in newest.files.values() if file.name.startswith(own)
    )
    others = sum(file.bytes for file in files)
    return totals._replace(
      saved=self.saved + 1,
      bases=self.bases + (newest.parent is None),
      rows=self.rows + rows,
      row_bytes=self.row_bytes + newest.bytes,
      other_bytes=self.other_bytes + others,
    )
