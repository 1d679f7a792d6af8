r"""Evaluates a run's checkpoint on the CPU and changes nothing in the run.

    python -m experiments.evaluate RUN
    python -m experiments.evaluate RUN --input=FILE
    python -m experiments.evaluate RUN --config=configs/criteo.py \
        --config.eval.split=validation
    python -m experiments.evaluate RUN --step=120

RUN is the folder of a run, finished or not. The run's config is used; if one is
given, its sections `data` and `eval` replace those of the run. The checkpoint
is the newest, or that of --step. A damaged one is refused. Without --input the
examples are the held-out ones. FILE has others, with labels, in the format of
the data trained on. --output keeps the metrics.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string('input', None, 'File of examples with labels.')
flags.DEFINE_string('output', None, 'JSON file for the metrics.')
flags.DEFINE_string(
  'data', None, "Where the run's data are now; by default where they were."
)
flags.DEFINE_integer(
  'step', None, 'Step of the checkpoint; the newest by default.', lower_bound=0
)

if __name__ == '__main__':
  cli.run(
    'experiments.evaluate.job:write_metrics',
    'optional',
    'RUN',
    kept='nothing was written',
    on_cpu=True,
  )
