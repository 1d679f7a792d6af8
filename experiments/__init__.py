"""Programs: flags, one call, exit code."""

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
