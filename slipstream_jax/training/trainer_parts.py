"""The parts of a trainer, and the planned batches that it trains on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

import numpy as np

from slipstream_jax.data.admission import admit, CheckedSource, ExampleShape
from slipstream_jax.data.interrupts import TurnLock
from slipstream_jax.data.source import (
  BatchSource,
  bound_to,
  ColumnNames,
  Source,
  Widths,
)
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.drawing import draws_of
from slipstream_jax.engine.engine import Engine
from slipstream_jax.engine.mesh import devices_of
from slipstream_jax.engine.pipeline import (
  JudgementProbe,
  PlannedBatches,
  StepProbe,
)
from slipstream_jax.engine.planner import (
  FrozenRows,
  Planner,
  Slices,
  Start,
  Windows,
)
from slipstream_jax.errors import check_seed, check_whole, choose, UserError
from slipstream_jax.initializers import VectorsById
from slipstream_jax.placement import Placement
from slipstream_jax.placement.base import check_hot
from slipstream_jax.placement.fixed import (
  check_device_rows,
  placements_of,
  Placing,
)
from slipstream_jax.schedules import systems
from slipstream_jax.schedules.base import Regrouping, ScheduleSpec
from slipstream_jax.schedules.phases import phases_for
from slipstream_jax.schedules.settings import SHORT, Skip
from slipstream_jax.selection.base import Policy
from slipstream_jax.selection.policies import BLIND, SURPRISE, SURPRISE_OFFSET
from slipstream_jax.store.base import Storage
from slipstream_jax.store.host_table import UntrainedRows
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.tables import TableSet
from slipstream_jax.training import watch
from slipstream_jax.training.compiled import compiled_of, CompiledFunctions
from slipstream_jax.training.divided import (
  check_divided,
  check_one_process,
)
from slipstream_jax.training.loss_kinds import is_logistic, kinds_of, LossKind
from slipstream_jax.training.recipe import Recipe, TrainState, WATCHED
from slipstream_jax.types import Array, Batch, HotRows, RowChange, RowIds
from slipstream_jax.vocabulary.growing import Position

GivenVectors = tuple[RowIds, np.ndarray]
"""Unique rows of a table, i64[n], and their values [n, D] of its dtype."""


@dataclasses.dataclass
class TrainerParts:
  """The state, the rows and the compiled functions of a training run.

  Attributes:
    programs: compiled functions of the recipe.
    engine: owns the tables' rows.
    state: on the device; every step replaces it.
    shape: shape that every batch must have.
    update: `CompiledFunctions.update`, the jitted step.
    rows: what crosses the link in a step, a member of `ROWS`.
    names: of dense features and labels, in the trainer's order.
    windows: per group, when its chain judges hot rows. None where it does not.
    kinds: what the labels of each head mean, one if there are no heads.
    over: devices and parts that a step is divided into. None: it is not.
    hot_of_lanes: where what is known of hot rows is on several devices.
    probe: mailbox for the row changes of windows.
    judgements: mailbox for the stale rows that chains judged.
    rest: counts since the last step, of examples that the schedule read and
      dropped. A checkpoint, which is of the last step, leaves them out.
    seconds_watching: seconds spent on snapshots and comparisons.
    grown: by table, its growing vocabulary as trained.
    held_out: examples whose loss a schedule asks for.
    inconsistent: what was interrupted halfway, or None.
    turns: taken by each step and each read of the rows, by any thread.
  """

  programs: CompiledFunctions
  engine: Engine
  state: TrainState
  shape: ExampleShape
  update: Callable[..., Any]
  rows: str
  names: ColumnNames
  windows: tuple[Windows | None, ...]
  kinds: tuple[LossKind, ...]
  over: Slices | None = None
  hot_of_lanes: watch.HotOfLanes | None = None
  probe: StepProbe = dataclasses.field(default_factory=StepProbe)
  judgements: StepProbe = dataclasses.field(default_factory=StepProbe)
  rest: Counters = dataclasses.field(default_factory=Counters)
  seconds_watching: float = 0.0
  grown: Mapping[str, Position] = dataclasses.field(default_factory=dict)
  held_out: Batch | None = None
  inconsistent: str | None = None
  turns: TurnLock = dataclasses.field(default_factory=TurnLock)

  @property
  def recipe(self) -> Recipe:
    """Model, tables and optimizers."""
    return self.programs.recipe

  @property
  def whole_state(self) -> TrainState:
    """The state, with what is known of all hot rows in one order."""
    state, hot = self.state, self.hot_of_lanes
    if hot is None:
      return state
    return state._replace(
      watch=hot.collected(hot.spread(state.watch)),
      entries=hot.collected(hot.spread(state.entries)),
    )

  def settled(self) -> TrainState:
    """Returns the state where it is trained, on one device or on all.

    With several devices, a new or restored one is on the first.
    """
    devices, hot = self.engine.devices, self.hot_of_lanes
    if devices is None:
      return self.state
    if hot is not None:
      self.state = self.state._replace(
        watch=hot.spread(self.state.watch),
        entries=hot.spread(self.state.entries),
      )
    self.state = devices.settled(self.state)
    return self.state

  def set_rows(self, table: str, rows: RowIds, values: Array) -> None:
    """Sets unique rows of a table, between two steps. See `Engine.set_rows`.

    No open window will call them stale.
    """
    number, own = self.engine.set_rows(table, rows, values)
    hot = self.engine.hot_of_groups[number]
    if hot is None or not (self.state.watch or self.state.entries):
      return
    places = hot.places(own)
    places = places[places < len(hot.rows)]
    state, lanes = self.settled(), self.hot_of_lanes
    self.state = state._replace(
      watch=watch.set_by_hand(state.watch, number, places, lanes),
      entries=watch.set_by_hand(state.entries, number, places, lanes),
    )

  def moved(self) -> RowChange:
    """Returns the change of all hot rows in the last window that closed."""
    watches, hot = self.state.watch, self.hot_of_lanes
    assert watches is not None
    if hot is None:
      return watch.joined(tuple(one.moved for one in watches))
    moved = tuple(one.moved for one in hot.spread(watches))
    return watch.joined(hot.collected(moved))

  @property
  def counters_of_steps(self) -> Counters:
    """Counts up to the last step."""
    counts = zip(self.engine.counters, self.rest, strict=True)
    return Counters(*(total - rest for total, rest in counts))

  def arrange(self, batches: BatchSource) -> None:
    """Puts the columns in the trainer's order of names, or learns that order.

    Raises:
      UserError: names that the trainer does not know, or that are missing.
    """
    widths = Widths(self.shape.dense_features, self.shape.heads or 1)
    self.names = batches.arrange(self.names, widths)

  def check_consistent(self) -> None:
    """Raises UserError if a step or a restore was interrupted halfway."""
    if self.inconsistent is not None:
      raise UserError(
        'a trainer can continue only from a completed step',
        got=f'one that was interrupted in the middle of {self.inconsistent}',
        where='Trainer',
        hint='restore a checkpoint into it, or make another trainer',
      )

  @contextlib.contextmanager
  def changing(self, what: str) -> Iterator[None]:
    """Marks the trainer as inconsistent until the block has completed."""
    self.inconsistent = what
    yield  # without `finally`: after an error it stays inconsistent
    self.inconsistent = None


def make_parts(
  recipe: Recipe,
  placement: Placing,
  dense_features: int,
  seed: int = 0,
  hot: HotRows | None = None,
  rows: str = 'stream',
  storage: Storage = MEMORY,
  given: Mapping[str, GivenVectors] | None = None,
  over: Slices | None = None,
) -> TrainerParts:
  """Returns a trainer before its first step, with newly initialized tables.

  Args:
    recipe: model, tables and optimizers.
    placement: see `Placing`. It is equal within a group.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters and the rows' initial values, at least 0.
    hot: rows that may be watched and pinned, from `hot_rows`.
    rows: one of `ROWS`. If rows are updated on the host, the placement must
      keep all of them there.
    storage: stores the rows that are not on the device.
    given: by table, the rows of a mapping from ids, and their vectors. None:
      no table has one.
    over: devices and parts that a step is divided into. None: it is not.

  Raises:
    UserError: the model does not fit the tables' dim, the placement needs
      hot rows or does not exist, or an argument is out of range.
  """
  tables = recipe.tables
  placements = placements_of(placement, tables)
  check_seed(seed, 'Trainer, seed')
  hint = 'give the columns of Batch.dense'
  check_whole(dense_features, 0, 'Trainer, dense_features', hint)
  for group, chosen in zip(tables.groups, placements, strict=True):
    check_device_rows(chosen, group.num_rows, hot)
  choose(WATCHED, recipe.watched, 'Trainer, watched')
  if given is None:
    _check_no_mapping(tables)
  programs = compiled_of(recipe)
  state = programs.init_state(dense_features, seed)
  heads = programs.heads(state, dense_features)
  kinds = kinds_of(recipe.loss, heads)
  judges = any(programs.judges)
  _check_rows(rows, placements, recipe, judges)
  _check_watched(placements, recipe, programs)
  if judges:
    check_hot(hot, 'skip_stale in a chain watches hot rows')
  lanes = () if over is None else tuple(map(over.lanes_of, tables.groups))
  devices = None
  if over is not None:
    devices = devices_of(over.devices, over.replicas, over.hosts)
    check_divided(recipe, programs.layouts, state, rows)
  states, draws = programs.untrained_row_state, draws_of(tables)
  untrained = UntrainedRows(tables, states, seed, draws)
  engine = Engine(untrained, placements, hot, storage, devices, lanes)
  for name, (own_rows, vectors) in (given or {}).items():
    engine.set_rows(name, own_rows, vectors)
  own = [len(h.rows) for h in engine.hot_of_groups if h is not None]
  return TrainerParts(
    programs,
    engine,
    state._replace(entries=programs.entries(own)),
    ExampleShape(
      tables, dense_features, heads, tuple(kind == 'clicks' for kind in kinds)
    ),
    programs.update,
    rows,
    ColumnNames(recipe.dense_columns),
    programs.windows(state),
    kinds,
    over,
    watch.HotOfLanes(devices, lanes, engine.hot_of_groups)
    if devices is not None and judges
    else None,
  )


def _check_no_mapping(tables: TableSet) -> None:
  for name, table in tables.tables.items():
    if isinstance(table.initializer, VectorsById):
      raise UserError(
        'which rows the ids of a mapping have is known from a source alone',
        got=repr(table.initializer),
        where=f'Table {name!r}, initializer',
        hint='use slip.Trainer, or give an array [R, D]',
      )


def _check_rows(
  rows: str, placements: Sequence[Placement], recipe: Recipe, judges: bool
) -> None:
  """Checks that rows can cross the link in that way."""
  choose(dict.fromkeys(systems.ROWS), rows, 'make_parts, rows')
  if rows == 'stream':
    return
  if recipe.skips_bad_steps:
    raise UserError(
      'a bad step changes nothing only where rows are updated on the device',
      got=f'rows that cross as {rows}',
      where='Recipe.skips_bad_steps',
      hint='stop there, or go back to a checkpoint',
    )
  kept = [p.name for p in placements if p.name not in ('streamed', 'swapped')]
  if kept or judges:
    raise UserError(
      'rows that are updated on the host stay there',
      got=f'placement {kept[0]}' if kept else 'skip_stale, which watches them',
      where='make_parts, placement' if kept else 'make_parts, recipe',
      hint="take placement 'streamed'" if kept else "or watch 'all' rows",
    )
  if rows == 'pooled' and recipe.microbatches > 1:
    raise UserError(
      'embeddings of a batch cross the link at once',
      got=f'{recipe.microbatches} microbatches',
      where='Recipe.microbatches',
      hint='use 1, or another system',
    )


def _check_watched(
  placements: Sequence[Placement], recipe: Recipe, programs: CompiledFunctions
) -> None:
  """Checks that entries of all rows, if there are any, need not move."""
  for placement, layout in zip(placements, programs.layouts, strict=True):
    moves = placement.name != 'resident'
    if recipe.watched == 'all' and layout.skips and moves:
      raise UserError(
        "skip_stale watches 'all' rows only where none of them moves, as what"
        ' it knows of a row would move with it',
        got=f'placement {placement.name}',
        where='Trainer, watched',
        hint="watch 'hot' rows with enough hot_bytes, or place rows 'resident'",
      )


def planned(
  trainer: TrainerParts,
  source: Source,
  depth: int = 2,
  workers: int | None = None,
) -> PlannedBatches:
  """Returns all batches of `source`, planned for the trainer.

  Takes over the source, because batches are read ahead of training.

  Args:
    trainer: takes the steps.
    source: examples to train on.
    depth: batches prepared ahead. 0 prepares each when it is asked for.
    workers: threads that find unique rows. None: one per core, at most 8.

  Raises:
    UserError: no batch source, or a depth or workers out of range. A bad batch
      raises when it is reached.
  """
  spec = systems.SCHEDULES['plain']()
  return scheduled(trainer, source, spec, depth, workers)


def slipstream(
  trainer: TrainerParts,
  source: Source,
  settings: Skip,
  batches: int | None = None,
  depth: int = 2,
  workers: int | None = None,
  regrouping: Regrouping | None = None,
) -> PlannedBatches:
  """Returns planned batches without examples that no longer teach.

  The method is that of arXiv 2404.04270. The schedule starts anew, so restore a
  checkpoint after this call, not before.

  Args:
    trainer: takes the steps, and has hot rows. If the settings compare rows, it
      watches them from here on, and trains no batches planned earlier.
    source: as in `planned`, like `depth` and `workers`.
    settings: what to skip, and when.
    batches: the most batches of the source to read. None: all.
    regrouping: how another schedule reorders examples.

  Raises:
    UserError: an invalid combination of settings, or no hot rows.
  """
  multiple = trainer.recipe.microbatches
  if trainer.over is not None:
    multiple = trainer.over.parts
  drops = settings.chosen_mode.drops_examples
  if settings.policy is None and drops:
    settings = settings._replace(policy=best_policy(trainer))
  if settings.phases is None or settings.refill is None:
    source = bound = bound_to(source, trainer.shape.tables)
    length = bound.batches_per_epoch
    if settings.phases is None:
      settings = settings._replace(phases=phases_for(length))
    if settings.refill is None:
      cuts = regrouping is not None and regrouping.queue is not None
      short = length is not None and length < SHORT
      settings = settings._replace(refill=cuts or not (drops and short))
  how = settings, batches, regrouping, multiple
  spec = systems.SCHEDULES['slipstream'](*how)
  return scheduled(trainer, source, spec, depth, workers)


def best_policy(trainer: TrainerParts) -> Policy:
  """Returns the policy that costs least on most data, of those that fit."""
  alone = trainer.shape.heads is None and is_logistic(trainer.recipe.loss)
  return SURPRISE_OFFSET if alone else SURPRISE


def scheduled(
  trainer: TrainerParts,
  source: Source,
  spec: ScheduleSpec,
  depth: int,
  workers: int | None = None,
) -> PlannedBatches:
  """Returns planned batches of `source` by any schedule.

  A trainer with a schedule that compares rows, or asks for the losses of steps,
  follows only that one. It trains no batches planned earlier, and the next
  schedule ends it.

  Raises:
    UserError: no batch source, an iterator in several processes, a depth below
      0, no hot rows where they are needed, or a placement that looks too far
      ahead.
  """
  engine, watches = trainer.engine, spec.settle is not None
  _check_schedule(spec, trainer)
  # An earlier watch ends as well, or the rows that it froze would never thaw.
  follows = watches or spec.late is not None
  alone = follows or trainer.state.watch is not None
  probe = StepProbe() if alone else trainer.probe
  # Everything that may fail comes first. Until then the trainer follows its old
  # schedule.
  bound = bound_to(source, trainer.shape.tables)
  if bound.is_lent:
    check_one_process('an iterator in place of a function that makes one')
  trainer.arrange(bound)
  admitted = CheckedSource(bound, trainer.shape)
  marks = bound.set_vocabularies(trainer.grown)
  trainer.grown = {**trainer.grown, **marks}
  schedule = spec.make(admitted, engine.hot, probe)
  one = None if spec.regrouping is None else spec.regrouping.held_out
  trainer.held_out = None if one is None else admit(one, trainer.shape)
  if alone:
    trainer.probe.interrupt()  # ends the wait for a step of the old schedule
    trainer.probe = probe
    engine.freeze(None)
    trainer.state = trainer.state._replace(watch=None)
    if watches:
      start_watch(trainer)
  judged = None
  if any(trainer.programs.judges):
    judged = JudgementProbe(trainer.judgements)
  planner = Planner(
    schedule,
    engine.placements,
    engine.tables,
    engine.hot_of_groups,
    # The planner's thread calls it while the other waits for the first batch.
    lambda: _start(trainer, judged),
    engine.prefetch,
    trainer.over,
  )
  return PlannedBatches(planner, depth, probe, judged, workers)


def _start(trainer: TrainerParts, judged: JudgementProbe | None) -> Start:
  engine, step = trainer.engine, trainer.engine.step
  # Rows that no step has changed yet need not be stored when they are evicted.
  unchanged = (None,) * len(engine.groups)
  slot_maps = engine.slot_maps if engine.changed else unchanged
  frozen = tuple(group.frozen for group in engine.groups)
  if judged is None:
    return Start(slot_maps, step, frozen)
  entries = trainer.whole_state.entries
  masks = [one and one.own.stale for one in entries]
  taken, stale = to_host((trainer.state.step, masks))
  freezing = FrozenRows(
    trainer.windows,
    engine.hot_of_groups,
    int(taken),
    frozen,
    stale,
    lambda n: judged.stale(step + n),
  )
  return Start(slot_maps, step, frozen, freezing)


def start_watch(trainer: TrainerParts) -> None:
  """Watches the trainer's hot rows from here on; none of them is stale."""
  engine = trainer.engine
  if engine.devices is not None:
    trainer.hot_of_lanes = watch.HotOfLanes(
      engine.devices, engine.lanes, engine.hot_of_groups
    )
  watched = watch.start(engine.tables, engine.hot_of_groups)
  trainer.state = trainer.state._replace(watch=watched)


def _check_schedule(spec: ScheduleSpec, trainer: TrainerParts) -> None:
  """Checks that the trainer can follow the schedule."""
  if spec.needs_hot:
    check_hot(trainer.engine.hot, 'skipping and regrouping need hot rows')
  skips = any(layout.skips for layout in trainer.programs.layouts)
  if spec.settle is not None and skips:
    raise UserError(
      'rows are compared by one rule, that of skip or of skip_stale in a chain',
      got='both',
      where='Trainer.train, skip',
      hint="leave skip_stale out, or give Skip mode 'examples', no threshold"
      f' and a policy that compares no rows: {", ".join(BLIND)}',
    )
  # A decision waits for the end of a window. Planning must not wait for the
  # decision before it has planned that window.
  ahead = max(one.look_ahead for one in trainer.engine.placements)
  asks = spec.regrouping.settle if spec.regrouping is not None else None
  for where, settle in (
    ('Phases.settle', spec.settle),
    ('Phases.settle', spec.late),
    ('fae, settle', asks),
  ):
    if settle is not None and ahead and settle <= ahead:
      raise UserError(
        f'settle must be more than the {ahead} batches held to look ahead',
        got=settle,
        where=where,
        hint='lengthen it, or look less far ahead',
      )
  if spec.offsets or spec.late is not None:  # the latter compares or predicts
    _check_logistic(spec, trainer.shape.heads, trainer.recipe.loss)


def _check_logistic(
  spec: ScheduleSpec, heads: int | None, loss: object
) -> None:
  """Checks that an offset corrects for examples, or that losses compare."""
  rule = "a policy of correction 'offset' adds to the one logit of each example"
  hint = "take a policy whose correction is 'weight', such as surprise"
  where = 'Skip.policy'
  if spec.predicts:
    rule = "scorer 'model' takes an example's chance of a click from its logit"
    hint, where = 'take linear', 'Skip.scorer'
  elif not spec.offsets:
    rule = "drop 'auto' compares the loss of one logit with that of a scorer"
    hint, where = 'give a share', 'Skip.drop'
  if heads is not None:
    got = f'a model with {heads} heads'
    raise UserError(rule, got=got, where=where, hint=hint)
  if not is_logistic(loss):
    raise UserError(
      f'{rule}, which is right for the logistic loss alone',
      got='another loss',
      where='Trainer, loss',
      hint=hint,
    )
