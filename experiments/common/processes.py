"""Several processes that train one run together. The first writes and speaks.

`experiments.launch` starts them and says in the environment which one each is.
Under Slurm and Kubernetes, JAX finds that out by itself.
"""

import os

import jax
import ml_collections

from slipstream_jax.engine.mesh import devices_of
from slipstream_jax.errors import check_whole, UserError

NUMBER = 'JAX_PROCESS_ID'
"""Variable with the number of a process that `experiments.launch` started. JAX
itself reads JAX_COORDINATOR_ADDRESS."""
_HEARTBEAT_S, _SHUTDOWN_S = 10, 30


def join(config: ml_collections.ConfigDict) -> None:
  """Waits for the other processes of a run, if it has several.

  Call it before JAX looks for devices.

  Raises:
    UserError: an invalid combination of settings, or the others do not come.
  """
  count = config.processes
  check_whole(count, 1, 'config.processes', 'use 1, or experiments.launch')
  if count == 1:
    return
  _check(config)
  jax.config.update('jax_num_cpu_devices', config.devices // count)
  # It would hear SIGTERM in place of this program.
  jax.config.update('jax_enable_preemption_service', False)
  own = os.environ.get(NUMBER)
  given = (
    {} if own is None else {'num_processes': count, 'process_id': int(own)}
  )
  try:
    jax.distributed.initialize(
      **given,
      heartbeat_timeout_seconds=_HEARTBEAT_S,
      shutdown_timeout_seconds=_SHUTDOWN_S,
    )
  except (ValueError, RuntimeError) as error:
    raise UserError(
      f'the {count} processes of a run must find each other',
      got=' '.join(str(error).split())[:200],
      where='config.processes',
      hint='start them by experiments.launch, Slurm or Kubernetes',
    ) from error
  if jax.process_count() != count:
    raise UserError(
      f'a run of {count} processes must be started {count} times',
      got=jax.process_count(),
      where='config.processes',
      hint='set it to the number of processes that are started',
    )


def _check(config: ml_collections.ConfigDict) -> None:
  if config.devices % config.processes:
    raise UserError(
      f'the {config.processes} processes must divide the devices',
      got=config.devices,
      where='config.devices',
      hint='give the devices of all processes together',
    )
  if config.train.on_bad_loss == 'rollback':
    raise UserError(
      'several processes cannot go back to a checkpoint in the middle of a run',
      got='rollback',
      where='config.train.on_bad_loss',
      hint="use 'stop', and resume",
    )


def are_several() -> bool:
  """Whether this process has joined others."""
  return bool(jax.distributed.is_initialized())


def is_first() -> bool:
  """Whether this process writes and speaks."""
  return not are_several() or jax.process_index() == 0


def from_first(value: bool) -> bool:
  """Returns what the first process gives. All processes must call it."""
  if not are_several():
    return value
  own = int(value and is_first())
  return 1 in devices_of(jax.device_count()).agreed(own)
