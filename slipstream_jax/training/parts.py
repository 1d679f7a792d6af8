"""A trainer, and the batches it trains: made from a recipe and a source."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any

from slipstream_jax.data.admission import admit, Admitted, ExampleShape
from slipstream_jax.data.interrupts import Turns
from slipstream_jax.data.source import (
  BatchSource,
  bound_to,
  Known,
  Source,
  Widths,
)
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.engine import Engine
from slipstream_jax.engine.frozen import Windows
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.engine.planner import Start
from slipstream_jax.engine.probe import JudgementProbe, Judgements, StepProbe
from slipstream_jax.errors import check_seed, check_whole, UserError
from slipstream_jax.placement.base import check_hot
from slipstream_jax.placement.groups import (
  check_device_rows,
  placements_of,
  Placing,
)
from slipstream_jax.schedules import systems
from slipstream_jax.schedules.base import Regrouping, ScheduleSpec
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.store.base import Storage
from slipstream_jax.store.host_table import Untrained
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.training import checks, watch
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.host_rows import HostRows
from slipstream_jax.training.judging import frozen_rows_of, Judge
from slipstream_jax.training.recipe import check_watched, Recipe, TrainState
from slipstream_jax.types import Batch, HotRows
from slipstream_jax.vocabulary.history import Position


@dataclasses.dataclass
class TrainerParts:
  """A recipe under way: its state, its rows, and its compiled functions.

  Attributes:
    recipe: model, tables and optimizers.
    engine: owns the tables' rows.
    state: on the device; replaced by every step.
    update: `Compiled.update`, the jitted step; it goes with its last trainer.
    predict: `Compiled.predict`, the jitted forward pass.
    score: `Compiled.score`, the jitted loss outside of training.
    shape: what every batch must fit.
    probe: where windows leave what rows did in them.
    judges: per group what judges its hot rows; None where its chain does not.
    windows: when they do.
    judgements: where they leave which rows stand still.
    rest: counted since the last step, for examples that the schedule read and
      nobody will train; a checkpoint, which is of that step, leaves it out.
    seconds_watching: spent on snapshots and comparisons so far.
    grown: by table, its growing vocabulary as trained, where it has one: the
      ids whose rows the engine has.
    rows: what crosses the link in a step, a member of `ROWS`.
    host: the programs of steps whose rows are updated on the host.
    held_out: examples that are scored where a schedule asks for their loss.
    torn: what was cut off half-done, so that the state is that of no step;
      None if the trainer is whole.
    turns: taken by each step and each look at the rows, by any thread.
    names: of dense features and labels, in the order that it takes them.
  """

  recipe: Recipe
  engine: Engine
  state: TrainState
  update: Callable[..., Any]
  predict: Callable[..., Any]
  shape: ExampleShape
  probe: StepProbe
  score: Callable[..., Any]
  judges: tuple[Judge | None, ...] = ()
  windows: tuple[Windows | None, ...] = ()
  judgements: Judgements = dataclasses.field(default_factory=Judgements)
  rest: Counters = dataclasses.field(default_factory=Counters)
  seconds_watching: float = 0.0
  grown: Mapping[str, Position] = dataclasses.field(default_factory=dict)
  rows: str = 'stream'
  host: HostRows | None = None
  held_out: Batch | None = None
  torn: str | None = None
  turns: Turns = dataclasses.field(default_factory=Turns)
  names: Known = dataclasses.field(default_factory=Known)

  @property
  def counters_of_steps(self) -> Counters:
    """What was counted up to the last step."""
    counts = zip(self.engine.counters, self.rest, strict=True)
    return Counters(*(total - rest for total, rest in counts))

  def arrange(self, batches: BatchSource) -> None:
    """Puts the columns of the batches in the trainer's order of names.

    The trainer learns the names from the first that have some.

    Raises:
      UserError: names that it does not know, or that are missing.
    """
    widths = Widths(self.shape.dense_features, self.shape.heads or 1)
    self.names = batches.arrange(self.names, widths)

  def check_whole(self) -> None:
    """Looks whether the state is one that training was in.

    Raises:
      UserError: a step or a restore was cut off in its midst.
    """
    if self.torn is not None:
      raise UserError(
        'a trainer can go on only from a whole step',
        got=f'one cut off in the midst of {self.torn}',
        where='Trainer',
        hint='restore a checkpoint into it, or make another trainer',
      )

  @contextlib.contextmanager
  def changing(self, what: str) -> Iterator[None]:
    """Leaves the trainer torn if the block does not come to its end."""
    self.torn = what
    yield  # without `finally`: an error is to leave it torn
    self.torn = None


def make_parts(
  recipe: Recipe,
  placement: Placing,
  dense_features: int,
  seed: int = 0,
  hot: HotRows | None = None,
  rows: str = 'stream',
  storage: Storage = MEMORY,
) -> TrainerParts:
  """A trainer before its first step, with freshly initialised tables.

  Args:
    recipe: model, tables and optimizers.
    placement: of `PLACEMENTS`, its name, or made by `cached`; or a sequence of
      these, one per group; or one by table name, the same for all of a group.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters and the rows' initial values; at least 0.
    hot: rows that may be watched and pinned, from `hot_rows`.
    rows: of `ROWS`; updated on the host, the placement keeps none elsewhere.
    storage: what keeps the rows that the device does not.

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
  check_watched(recipe.watched, 'Trainer, watched')
  programs = compiled_of(recipe)
  state = programs.init_state(dense_features, seed)
  heads = programs.heads(state, dense_features)
  checks.check_rows(rows, placements, recipe, any(programs.judges))
  if any(programs.judges):
    check_hot(hot, 'skip_stale in a chain watches hot rows')
  untrained = Untrained(tables, programs.untrained_row_state, seed)
  engine = Engine(untrained, placements, hot, storage)
  own = [len(h.rows) for h in engine.hot_of_groups if h is not None]
  return TrainerParts(
    recipe,
    engine,
    state._replace(entries=programs.entries(own)),
    programs.update,
    programs.predict,
    ExampleShape(tables, dense_features, heads),
    StepProbe(),
    programs.score,
    programs.judges,
    programs.windows(state),
    rows=rows,
    host=programs.host_rows(rows),
    names=Known(recipe.dense_columns),
  )


def planned(
  trainer: TrainerParts,
  source: Source,
  depth: int = 2,
  workers: int | None = None,
) -> PlannedBatches:
  """Batches of `source`, planned for the trainer `depth` of them ahead.

  The source is taken over: what was read ahead would be missing elsewhere.

  Args:
    trainer: whose steps they are for.
    source: what to train on.
    depth: batches prepared ahead; 0 prepares each when it is asked for.
    workers: threads that find unique rows; None: one per core, at most 8.

  Raises:
    UserError: no batch source, depth or worker; a bad batch when it comes.
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
  """The same, but skipping what no longer learns (arXiv 2404.04270).

  It starts anew: restore a checkpoint after this call, not before.

  Args:
    trainer: with hot rows; watches them from here on if settings need it, and
      then trains no batches that were planned for it before.
    source: what to train on; taken over, it is not for another iterator.
    settings: what to skip, and when.
    batches: of the source to read at most; None: all.
    depth: batches prepared ahead.
    workers: as of `planned`.
    regrouping: how examples change places, of another schedule.

  Raises:
    UserError: settings that cannot be, or no hot rows.
  """
  how = settings, batches, regrouping, trainer.recipe.microbatches
  spec = systems.SCHEDULES['slipstream'](*how)
  return scheduled(trainer, source, spec, depth, workers)


def scheduled(
  trainer: TrainerParts,
  source: Source,
  spec: ScheduleSpec,
  depth: int,
  workers: int | None = None,
) -> PlannedBatches:
  """Batches of `source` by any schedule.

  One that compares rows is alone: the trainer follows it, and none made
  before; the next one made ends it.

  Raises:
    UserError: no batch source, a depth below 0, no hot rows where they are
      needed, or a placement that looks too far ahead.
  """
  engine, watches = trainer.engine, spec.settle is not None
  layouts = compiled_of(trainer.recipe).layouts
  checks.check_schedule(spec, engine.hot, layouts, engine.placements)
  if spec.offsets:
    checks.check_offsets(trainer.shape.heads, trainer.recipe.loss)
  # A watch of before ends as well: what it let stand still would never thaw.
  alone = watches or trainer.state.watch is not None
  probe = StepProbe() if alone else trainer.probe
  # First what may fail; until then the trainer follows its old schedule.
  bound = bound_to(source, trainer.shape.tables)
  trainer.arrange(bound)
  admitted = Admitted(bound, trainer.shape)
  marks = bound.set_vocabularies(trainer.grown)
  trainer.grown = {**trainer.grown, **marks}
  schedule = spec.make(admitted, engine.hot, probe)
  one = None if spec.regrouping is None else spec.regrouping.held_out
  trainer.held_out = None if one is None else admit(one, trainer.shape)
  if alone:
    trainer.probe.interrupt()  # who waits for a step waits no longer
    trainer.probe = probe
    engine.freeze(None)  # what stood still moves again
    trainer.state = trainer.state._replace(watch=None)
    if watches:
      start_watch(trainer)
  judged = JudgementProbe(trainer.judgements) if any(trainer.judges) else None
  return PlannedBatches(
    schedule,
    engine.placements,
    engine.tables,
    depth,
    engine.hot_of_groups,
    probe,
    # The planner's thread asks, while the other waits for the first batch.
    lambda: _start(trainer, judged),
    judged,
    workers,
    engine.prefetch,
  )


def _start(trainer: TrainerParts, judged: JudgementProbe | None) -> Start:
  engine, step = trainer.engine, trainer.engine.step
  # Rows that no step has changed yet need not be stored when they leave.
  unchanged = (None,) * len(engine.groups)
  slot_maps = engine.slot_maps if engine.changed else unchanged
  frozen = tuple(group.frozen for group in engine.groups)
  if judged is None:
    return Start(slot_maps, step, frozen)
  of_groups = trainer.windows, engine.hot_of_groups, trainer.state, frozen
  freezing = frozen_rows_of(*of_groups, lambda n: judged.stale(step + n))
  return Start(slot_maps, step, frozen, freezing)


def start_watch(trainer: TrainerParts) -> None:
  """Watches the trainer's hot rows from here on; none of them is stale."""
  engine = trainer.engine
  if trainer.torn is None:
    watched = watch.start(engine.hot_rows_now())
  else:  # a restore comes before the next step
    watched = watch.of_nothing(engine.tables, engine.hot_of_groups)
  trainer.state = trainer.state._replace(watch=watched)
