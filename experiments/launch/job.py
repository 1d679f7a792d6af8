"""Supervises the processes of a run, for `experiments.launch`."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import ml_collections

from experiments.common import cli, interrupts, report
from experiments.common import processes as several
from experiments.common import workdir as workdirs
from slipstream_jax.errors import UserError

_OWN = re.compile(r'--?(processes|restarts|workdir|config\.resume)(=.*)?')
_POLL_S, _SETTLE_S = 0.1, 1.0
_MOST_BACKOFF_S = 30.0


def launch(
  config: ml_collections.ConfigDict,
  processes: int,
  restarts: int,
  workdir: str | None,
) -> None:
  """Runs the processes until all have ended well.

  Raises:
    UserError: one died too often, or before there was a checkpoint.
    SystemExit: one refused to train, and said why.
    KeyboardInterrupt: a signal came. The first process has saved.
  """
  where, screen = workdirs.folder(workdir), report.console()
  checkpoints = workdirs.checkpoints_at(where, config)
  devices = max(config.devices, processes)
  # Fewer devices must train the same program.
  parts = max(8, devices) if config.parts is None else config.parts
  command = [sys.executable, '-m', 'experiments.run', *cli.without(_OWN)]
  command += [f'--config.parts={parts}', f'--workdir={where}']
  resume, saved = config.resume, workdirs.newest_step(checkpoints)
  for restart in range(restarts + 1):
    replicas = min(config.replicas, devices)
    hosts = config.hosts if replicas * config.hosts <= devices else 1
    of_start = [
      f'--config.resume={resume}',
      f'--config.processes={processes}',
      f'--config.devices={devices}',
      f'--config.replicas={replicas}',
      f'--config.hosts={hosts}',
    ]
    with interrupts.gently():
      codes = _codes([*command, *of_start], processes, devices)
    if not any(codes):
      return
    died = _died(codes)
    if died is None:  # one has said why, and would say so again
      raise SystemExit(max(codes))
    got = f'process {died} ended by signal {-codes[died]}'
    if restart == restarts:
      break
    before, saved = saved, workdirs.newest_step(checkpoints)
    if saved is None:
      got += ', before the first checkpoint'
      break
    left = 'all'
    if restart and saved == before and processes > 1:
      processes, devices = processes // 2, devices // 2
      left = f'only {processes}, as the last start saved nothing,'
    seconds = min(2.0**restart, _MOST_BACKOFF_S)
    report.warn(screen, f'{got}: {left} start again in {seconds:g} s')
    time.sleep(seconds)
    resume = True
  raise UserError(
    f'a run needs all of its {processes} processes',
    got=got,
    where=str(where),
    hint='look above for the reason, and add --config.resume=True if there is'
    ' a checkpoint',
  )


def _died(codes: list[int]) -> int | None:
  """Returns a process that ended by a signal and not because others did."""
  by_signal = [number for number, code in enumerate(codes) if code < 0]
  # JAX aborts a process that has lost the others.
  first = [n for n in by_signal if codes[n] != -signal.SIGABRT]
  if not first and max(codes) <= 0:
    first = by_signal
  return first[0] if first else None


def _codes(command: list[str], processes: int, devices: int) -> list[int]:
  """Runs processes, and returns their exit codes. Ends all if one fails."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  children: list[subprocess.Popen[bytes]] = []
  with contextlib.ExitStack() as ended:
    # Errors of the others, which are most often those of the first.
    errors = ended.enter_context(tempfile.TemporaryFile())
    for number in range(processes):
      environment = {
        'JAX_COORDINATOR_ADDRESS': address,
        'JAX_NUM_CPU_DEVICES': str(devices // processes),
        several.NUMBER: str(number),
      }
      # Of another session, because a terminal sends Ctrl-C to all of one.
      child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL if number else None,
        stderr=errors if number else None,
        env=os.environ | environment,
        start_new_session=True,
      )
      ended.callback(_end, child)
      children.append(child)
    try:
      _wait(children)
    except KeyboardInterrupt:
      for child in children:
        child.send_signal(signal.SIGTERM)
      for child in children:
        child.wait()
      raise
    codes = [child.poll() or 0 for child in children]
    if any(codes) and codes[0] <= 0:
      errors.seek(0)
      sys.stderr.write(errors.read().decode(errors='replace'))
    return codes


def _wait(children: list[subprocess.Popen[bytes]]) -> None:
  """Waits until all have ended, or one has failed."""
  while None in (codes := [child.poll() for child in children]):
    interrupts.check()
    if any(codes):
      # Others fail when one dies. By then it is known which one did.
      time.sleep(_SETTLE_S)
      return
    time.sleep(_POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
  if child.poll() is None:
    child.kill()
  child.wait()
