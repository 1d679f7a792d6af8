"""Lists a run's checkpoints, or copies one.

    python -m experiments.checkpoints RUN
    python -m experiments.checkpoints RUN --copy=s3://bucket/old --codec=int4

RUN is the folder of a run, which may be training, or a folder or URL of
checkpoints. The list shows which of them are whole, after every byte was
compared with its checksum, and what is wrong with the others. A copy is a base
of the newest checkpoint, or of that of --step. A damaged one is refused. A copy
in fewer bits can be scored, evaluated and served, but not trained further.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string(
  'copy', None, 'Folder or URL for a copy of the newest, or that of --step.'
)
flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)
flags.DEFINE_string(
  'codec', None, "Of the copy's rows: raw, int8, int4, int3 or int2."
)
flags.DEFINE_bool(
  'verify', True, 'Read every byte for the list; otherwise compare sizes.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.checkpoints.job:list_or_copy',
    'none',
    'RUN_OR_PLACE',
    kept='nothing was changed',
    on_cpu=True,
  )
