"""Checks machine, config and data before a long run, and leaves nothing behind.

    python -m experiments.doctor --config=configs/criteo.py [--workdir=FOLDER]
    python -m experiments.doctor RUN

It checks versions, device, memory and disk, where sparse files count at their
full size. Then it reads examples, takes two real steps, saves everything on the
disk of FOLDER and restores it. FOLDER need not exist. RUN is the folder of a
run, which has its own config. The exit code is 0 if nothing is bad.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string('workdir', 'runs', 'Folder of the run to be.')
flags.DEFINE_bool(
  'verify', False, 'Compare packed data with their checksums: reads them all.'
)

if __name__ == '__main__':
  cli.run(
    'experiments.doctor.job:examine',
    'optional',
    '[RUN]',
    kept='nothing was written',
  )
