r"""Measures what the host does for a step, and how fast it can feed a device.

    python -m experiments.bench.host --config=configs/criteo.py \
        [--batches=2048,16384] [--device_steps_ms=0.5] [--drop=0.3]

The real step is timed by itself. Then a wait of --device_steps_ms that takes no
processor replaces it. What is left is the work of the host, and the work of the
device to gather a step's rows and to put them back.

With --drop, the wait also replaces the step of a run that leaves out a share of
all examples. Its time per batch of the source is compared with that of a run
which leaves out none, in turns.

With --hotline, the wait also replaces the step of Hotline's order where rows
are pinned. In every other turn, rows are not gathered behind popular batches.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('batches', '2048,16384', 'Batch sizes.')
flags.DEFINE_list('device_steps_ms', '0,0.5', 'What a step takes; 0: nothing.')
flags.DEFINE_list(
  'placements', 'resident,pinned,cached,streamed', 'Placements to compare.'
)
flags.DEFINE_float(
  'drop', 0, 'Share to leave out; 0: none.', lower_bound=0, upper_bound=0.9
)
flags.DEFINE_bool('hotline', False, 'Whether to time Hotline, too.')
flags.DEFINE_list('workers', '1,2', 'Threads to compare.')
flags.DEFINE_integer('steps', 60, 'Steps of a figure.', lower_bound=9)

if __name__ == '__main__':
  runner.run('experiments.bench.budget:measure')
