r"""Tells what several devices would hold, load and exchange, without them.

    python -m experiments.plan --config=configs/criteo.py --devices=1,8,64 \
        [--steps=20] [--device_bytes=N] [--output=FILE]

The rows of each table are spread over all devices, as in training. The plans of
the first steps are made as in training, too, so the counts are those of a run
with `config.devices` of that number. Nothing is timed, and no device is needed.

The first table is of the busiest device. It keeps so many MB of rows between
steps, and needs room for those of a step. Rows, and MB loaded from the host,
stored there and sent to other devices, are means of the steps. `max over mean`
compares its rows with the mean, and `moved over mean` its bytes. The second
table has rows of all devices together, for the largest number of devices.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('devices', '1,2,4,8', 'Numbers of devices to compare.')
flags.DEFINE_integer('steps', 20, 'Steps to plan.', lower_bound=1)
flags.DEFINE_integer(
  'device_bytes', None, 'Bytes that the rows must fit in on each device.'
)

if __name__ == '__main__':
  runner.run('experiments.plan.job:plan')
