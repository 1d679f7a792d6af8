"""Programs: flags, one call, exit code. `python -m experiments.NAME --help`.

run: trains, evaluates and reports one experiment.
launch: trains one config in several processes of a machine.
doctor: checks machine, config and data before a long run.
prepare: packs raw files once, for many experiments.
compare: trains with and without skipping, side by side.
zoo: trains all models of a family, side by side.
search: searches widths, depths, an interaction and dims of a click model.
evaluate: evaluates a run's checkpoint on held-out examples or on a file.
checkpoints: lists a run's checkpoints, copies the newest, converts old ones.
export: writes a run's model and rows into a folder that `slip_serve` reads.
predict: scores new examples with a finished run, or writes rows of a table.
reproduce: trains the paper's models by every system, and reports.
report: lists runs, and lays them side by side on a page.
bench: times the parts of a step, this library against others.
plan: tells what several devices would hold and exchange, and how fast.
towers: finds features that belong together, from what a run learned.
profile: tells before training what each placement would move.
skew: measures the skew of the synthetic proxies against the papers.
make_text: writes synthetic clicks as Criteo's raw text.
"""

import os
import signal
import sys

# `python -m experiments.run` imports for seconds before it can handle signals:
# until then a Ctrl-C ends it without a traceback. As a library it changes none.
# Not by SIG_DFL: polars would take the signal for its own, and drop it.
if sys.argv[:1] == ['-m'] and signal.getsignal(signal.SIGINT) is (
  signal.default_int_handler
):
  signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
