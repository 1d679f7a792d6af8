"""Lists runs, or lays some side by side on a page.

    python -m experiments.report [FOLDER]
    python -m experiments.report RUN RUN [--output=report.html]

The first lists the runs in a folder, runs/ by default: name, date, steps, AUC
and log loss, or recall and NDCG of models that rank items, speed, the share of
examples dropped, and the bytes that needed no moving. The second also writes
one page of curves, settings and figures, which needs nothing beside itself.
"""

from absl import flags

from experiments.common import cli

flags.DEFINE_string('output', 'report.html', 'File of the page.')

if __name__ == '__main__':
  cli.run(
    'experiments.report.job:report_on',
    'none',
    '[FOLDER_OR_RUN ...]',
    'nothing was changed',
  )
