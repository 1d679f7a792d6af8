"""Times servers of exports: requests/s and latency, at some numbers of clients.

    python -m slip_serve EXPORT --port=8080
    python -m experiments.bench.service localhost:8080 [OTHER]

Each client sends a request of --examples examples, waits for the answer, and
sends the next. It keeps its connection if the server does. Two servers take
turns, and each measures --turns times for --seconds. The figures are medians
over the turns. The clients run in one process beside the servers, on the same
cores, so all figures include their work.
"""

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('clients', ['1', '8', '64'], 'Numbers of clients.')
flags.DEFINE_integer('examples', 1, 'Examples of a request.', lower_bound=1)
flags.DEFINE_bool('by_name', False, 'Whether requests name their features.')
flags.DEFINE_float('seconds', 5.0, 'Seconds of a turn.', lower_bound=0.1)
flags.DEFINE_integer('turns', 5, 'Turns of each server.', lower_bound=1)

if __name__ == '__main__':
  runner.run('experiments.bench.clients:measure', 'none', 'SERVER [OTHER]')
