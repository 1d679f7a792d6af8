"""The growing vocabulary's rule on plain dictionaries: slow and evident."""


class Dictionary:
  """What `GrowingVocabulary` must do, id by id."""

  def __init__(self, size, admit_after, candidates):
    self.size, self.admit_after = size, admit_after
    self.candidates = candidates
    self.now = 0
    self.row_of, self.last_use = {}, {}  # by id; by row
    self.waiting = {}  # id to (lookups, batch of the last)

  def take(self, ids):
    """Rows of the ids of a batch, and the fresh rows in order."""
    self.now += 1
    for wanted in ids:
      if wanted in self.row_of:
        self.last_use[self.row_of[wanted]] = self.now
    fresh = []
    return [self._row(wanted, fresh) for wanted in ids], fresh

  def _row(self, wanted, fresh):
    if wanted is None:
      return 0
    if wanted not in self.row_of and self._is_due(wanted):
      row = self._free_row()
      if row:
        self.row_of[wanted], self.last_use[row] = row, self.now
        self.waiting.pop(wanted, None)
        fresh.append(row)
    return self.row_of.get(wanted, 0)

  def _is_due(self, wanted):
    if self.admit_after == 1:
      return True
    if wanted not in self.waiting and len(self.waiting) == self.candidates:
      oldest = min(self.waiting, key=lambda i: (self.waiting[i][1], i))
      if self.waiting[oldest][1] == self.now:
        return False
      del self.waiting[oldest]
    lookups = self.waiting.get(wanted, (0, 0))[0] + 1
    self.waiting[wanted] = lookups, self.now
    return lookups >= self.admit_after

  def _free_row(self):
    if len(self.row_of) < self.size - 1:
      return len(self.row_of) + 1
    row = min(self.last_use, key=lambda r: (self.last_use[r], r))
    if self.last_use[row] == self.now:
      return 0
    self.row_of = {i: r for i, r in self.row_of.items() if r != row}
    return row
