"""Scores new examples with a run, or writes the rows of a table.

    python -m experiments.predict RUN --input=FILE [--output=predictions.csv]
    python -m experiments.predict RUN --rows=TABLE [--output=TABLE.npz]

RUN is the folder of a run, finished or not. The checkpoint is the newest, or
that of --step. A damaged one is refused. FILE has examples in the format of the
run's data, with labels or without. An id that training did not see gets the row
of unknown ids. The output has one line of probabilities per example, one for
each head: CSV or, if its name ends with .npy, an array f32[n] or f32[n, T].

The .npz of a table has `rows` [R, D] and their raw `ids` i64[R]. The row of
unknown ids is `unknown` [D].
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string('input', None, 'File of examples to score.')
flags.DEFINE_string('rows', None, 'Table whose rows are written.')
flags.DEFINE_string(
  'output',
  None,
  'File to write, .csv or .npy; predictions.csv by default. Of rows, .npz; '
  'TABLE.npz by default.',
)
flags.DEFINE_string(
  'data', None, "Where the run's data are now; by default where they were."
)
flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)

if __name__ == '__main__':
  cli.run(
    'experiments.predict.job:predict',
    'none',
    'RUN',
    kept='nothing was written',
  )
