r"""Plans a run on several devices, and tells its times, without the devices.

    python -m experiments.plan --config=configs/criteo.py --devices=1,8,64 \
        [--machine=h100] [--steps=20] [--device_bytes=N] [--batch_each] \
        [--output=FILE]

The plans of the first steps are made as in training, so the counts are those of
a run with `config.devices` of that number, and `config.replicas` of that number
of replicas. Times are modelled: bytes and messages are counted, and a machine's
rates are published, or measured by `experiments.bench.link`. No device is
needed.

The first table has the best plan for each number of devices. MB are those of
the busiest device: `kept` between steps, of a `step`, `loaded` from and
`stored` on the host, sent to devices of its host (`near`) and of other hosts
(`far`). `max over mean` compares its rows with the mean, `moved over mean` its
bytes.

The second table has the times of all plans. A step takes as long as the slowest
of the device, the host and the copies between them, and the exchange of rows
and the sums of the model's gradients in addition. `binds` is what takes most of
it. `efficiency` compares the examples/s of a device with those of the first
number of devices.

The third table has other ways to place tables, and the last one the rows of
each table on the most devices, of all devices together. Of the placement
'cached', a table before it compares capacities of the cache on each device.

`--measure=256,1024` takes steps of so many examples on one device here, and
models the time to compute from them.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('devices', '1,2,4,8', 'Numbers of devices to compare.')
flags.DEFINE_string(
  'machine', 'h100', 'h100, a100, gb200, or a file of experiments.bench.link.'
)
flags.DEFINE_integer('steps', 20, 'Steps to plan.', lower_bound=1)
flags.DEFINE_integer(
  'device_bytes',
  None,
  "Bytes that the rows must fit in on each device, in place of the machine's.",
)
flags.DEFINE_list('measure', [], 'Examples of steps that are timed here.')
flags.DEFINE_bool(
  'batch_each', False, 'Whether config.data.batch_size is of each device.'
)

if __name__ == '__main__':
  runner.run('experiments.plan.job:plan')
