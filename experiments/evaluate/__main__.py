r"""Evaluates a run's checkpoint on the CPU and changes nothing in the run.

    python -m experiments.evaluate RUN
    python -m experiments.evaluate RUN --input=FILE
    python -m experiments.evaluate RUN --config=configs/criteo.py \
        --config.eval.split=validation
    python -m experiments.evaluate RUN --step=120
    python -m experiments.evaluate RUN --ensemble=logits

RUN is the folder of a run, finished or not. The run's config is used; if one is
given, its sections `data` and `eval` replace those of the run. The checkpoint
is the newest, or that of --step. A damaged one is refused. Without --input the
examples are the held-out ones. FILE has others, with labels, in the format of
the data trained on. --output keeps the metrics. --ensemble evaluates the
checkpoints at the ends of cycles together, or the newest ones of several RUNs,
as docs/how-to/ensembles.md says.
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

flags.DEFINE_string(
  'ensemble', None, "Mean that members predict: of 'logits' or 'probabilities'."
)
flags.DEFINE_integer('members', 3, 'Most members that are selected.')
flags.DEFINE_float(
  'gamma', 0.1, 'Weight of disagreement in the diversity-aware selection.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.evaluate.job:write_metrics',
    'optional',
    'RUN [RUN ...]',
    kept='nothing was written',
    on_cpu=True,
  )
