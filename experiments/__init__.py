"""Programs: flags, one call, exit code."""

import signal
import sys

# `python -m experiments.run` imports for seconds before it can handle signals:
# until then a Ctrl-C ends it without a traceback. As a library it changes none.
if sys.argv[:1] == ['-m'] and signal.getsignal(signal.SIGINT) is (
  signal.default_int_handler
):
  signal.signal(signal.SIGINT, signal.SIG_DFL)
