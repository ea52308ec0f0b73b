"""Settings of every run: directory, model, layout, training, and writing, checking and keeping checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from aligner.cluster.component import Placement
from aligner.cluster.run_directory import POLICY, REWARD_MODEL
from aligner.cluster.slurm.spec import ContainerConfig, SlurmConfig
from aligner.data.order import EpochSampler
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AT_LEAST_1, FINITE, NOT_NEGATIVE, ConfigError, check_numbers, check_range
from aligner.models.architecture.divisible import check_divisible, check_together
from aligner.models.config import Architecture, ModelConfig
from aligner.models.modules.scalar_head import PolicyHead, Pooling
from aligner.models.training.guard import GuardConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig, PlanConfig
from aligner.planner.workload import Head, Phase, Work
from aligner.reporting.config import LoggingConfig
from aligner.rollout.config import RolloutConfig
from aligner.run import lengths
from aligner.servers.config import ServerConfig

if TYPE_CHECKING:
    from typing_extensions import Self


class Kind(str, Enum):
    """What a run does; `aligner.jobs.start` has the job of each."""

    trains = "trains"  # on existing data
    samples = "samples"  # and learns from its own samples
    writes = "writes"  # a data set, instead of training


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """A model that a component loads."""

    component: str
    key: str  # of its settings
    config: ModelConfig
    is_scalar: bool = False  # has one number per token instead of logits
    needs_head: bool = False  # a scalar head that is not in the files would be random, and never be trained
    reads_text: bool = False  # it is sent texts, not token ids: its tokenizer may be another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A component that serves the trainer, from an allocation of its own."""

    name: str
    num_ranks: int
    parallel: ParallelConfig
    settings: ServerConfig
    work: Work | None  # None: a function, which needs no model
    model: ModelConfig
    optimizer: OptimizerConfig | None = None  # None: frozen
    check: Callable[[ModelConfig, Any, int], None] | None = None  # (model, architecture, ranks): raises ConfigError for what it refuses
    guest: Server | None = None  # another one, in its processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Properties of a run with these settings, for code that does not run it."""

    role: str  # of the component that trains or writes: actor, trainer, writer
    work: Work  # of one of its steps
    head: Head = Head.language
    value_head: PolicyHead | None = None  # beside the output layer
    has_reference: bool = False  # a frozen copy of what is trained
    has_engine: bool = False  # it samples, as `rollout` says
    checkpoints: Sequence[str] = (POLICY,)  # folders of a run directory's checkpoints that have to agree


class BestMode(str, Enum):
    """Which values of the best metric are better."""

    max = "max"
    min = "min"


class DamagedCheckpoint(str, Enum):
    """What a run does whose newest checkpoint is damaged."""

    fall_back = "fall_back"
    stop = "stop"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Applies to the actor and the critic alike; what is kept of one is kept of the other."""

    asynchronous: bool = True  # continue training while a thread writes the files; costs host memory for one copy of the saved state
    verify: bool = True  # compare every file with its SHA-256 before a checkpoint is loaded
    read_back: bool = False  # read a checkpoint back before it becomes `latest`; costs host memory for one copy of what a rank writes
    keep: int = 0  # newest checkpoints to keep; 0: all, and the newest two of the ones saved for loop.save_minutes alone
    best_metric: str = ""  # of validation, e.g. validation/accuracy: the best checkpoints stay, `best` names the first; empty: off
    best_mode: BestMode = BestMode.max  # which values of best_metric are better: the largest or the smallest
    keep_best: int = 1  # how many stay for their best_metric
    write_timeout_seconds: float = 1200.0  # for writing the files of one checkpoint

    def __post_init__(self) -> None:
        check_range(self, "checkpoint", NOT_NEGATIVE, "keep", note=" (0 keeps all)")
        check_numbers(self, "checkpoint", at_least_1=("keep_best",), above_0=("write_timeout_seconds",))


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Where a run lives and how its processes meet."""

    directory: str = "runs/default"  # checkpoints, logs, metrics and registrations; the same directory again resumes the run
    seed: int = 1  # from 0 to 2^63 - 1
    export_hf: bool = True  # write the final policy as a Hugging Face model to <directory>/export
    damaged_checkpoint: DamagedCheckpoint = DamagedCheckpoint.fall_back  # on the newest intact one, the other set aside; or the run ends
    allow_changes: bool = False  # resume with settings that make it another experiment than the checkpoint's
    start_timeout_seconds: float = 300.0  # until all ranks of a component have met
    download_timeout_seconds: float = 3600.0  # for another process that downloads what a setting names on the Hugging Face Hub
    collective_timeout_seconds: float = 1800.0  # until a collective that not all ranks enter ends the ranks that wait in it
    stall_timeout_seconds: float = 1200.0  # without any progress for this long, a component writes its stacks and exits; 0: never
    trace_mib: float = 8.0  # of spans for `aligner trace` that each process keeps, the newest ones; 0: none
    num_threads: int = 0  # of each process; 0: OMP_NUM_THREADS, else what torch chooses
    numa_binding: bool = True  # each rank stays on those of its processors that are beside its GPU, on machines with several NUMA nodes
    server_tls: bool = False  # its servers and their clients speak TLS and show each other certificates, which the run makes itself
    ranks_per_gpu: int = 1  # of one component; above 1 they share it, and their collectives go over the host

    def __post_init__(self) -> None:
        if not self.directory:
            raise ConfigError("run.directory='': name a directory")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"run.seed={self.seed}: must be from 0 to {2**63 - 1}")
        check_numbers(self, "run", above_0=("start_timeout_seconds", "download_timeout_seconds", "collective_timeout_seconds"))
        check_range(self, "run", FINITE, "trace_mib", note=" (0: no trace)")
        check_range(self, "run", AT_LEAST_1, "ranks_per_gpu")
        if not 0 <= self.stall_timeout_seconds < self.collective_timeout_seconds:
            raise ConfigError(
                f"run.stall_timeout_seconds={self.stall_timeout_seconds}: must be below "
                f"run.collective_timeout_seconds={self.collective_timeout_seconds}, which ends ranks without naming the slow one (0: off)"
            )


DEFAULT_STEPS = 100


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """How long to train and what to do on the way."""

    max_steps: int = 0  # training steps of the whole run, those before a resume included; 0: as many as epochs take, else 100
    epochs: float = 0.0  # passes over data.train (its prompts, if the run samples) after which the run ends; 0: max_steps alone counts
    save_every: int = 0  # steps between checkpoints, all of which stay unless checkpoint.keep says otherwise; 0: off
    save_minutes: float = 30.0  # minutes after which another one is saved, of which the newest two stay; 0: off
    validate_every: int = 0  # steps between validations; 0: never
    validate_first: bool = False  # validate before the first step too
    table_every: int = 10  # steps between tables of sample rollouts; 0: never

    def __post_init__(self) -> None:
        if self.max_steps < 0:
            raise ConfigError(f"loop.max_steps={self.max_steps}: must be at least 1 (0: as many as loop.epochs take, else {DEFAULT_STEPS})")
        check_range(self, "loop", FINITE, "epochs", note=" (0: loop.max_steps alone counts)")
        self.max_steps = self.max_steps or (0 if self.epochs else DEFAULT_STEPS)
        check_range(self, "loop", FINITE, "save_every", "save_minutes", "validate_every", "table_every", note=" (0 is off)")

    def over(self, order: EpochSampler) -> LoopConfig:
        """With the number of steps that `epochs` take in this order of the examples; without `epochs` if `max_steps` are fewer."""
        steps = order.steps_of(self.epochs) if self.epochs else 0
        return replace(self, epochs=0.0) if 0 < self.max_steps < steps else replace(self, max_steps=steps or self.max_steps)


def reading(load: Callable[..., tuple[Sequence[Any], LoadReport]]) -> Callable[..., tuple[Sequence[Any], LoadReport]]:
    """The method `JobRun.read` of a recipe whose data `load(location, config.data, tokenizer, first=first)` reads."""

    def read(self: JobRun, location: str, tokenizer: Tokenizer, *, first: int | None = None) -> tuple[Sequence[Any], LoadReport]:
        return load(location, self.data, tokenizer, first=first)

    return read


@dataclass(kw_only=True, slots=True)
class JobRun(ABC):
    """What every job has, and what it can be asked. Each recipe adds its `data` and its `algorithm`, and says `traits` and `read`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)  # its files, precision, micro-batches and adapters
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how the model is split over ranks
    logging: LoggingConfig = field(default_factory=LoggingConfig)  # loggers beside metrics.jsonl, and what the terminal shows
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # read by `aligner plan` and `aligner launch slurm`
    plan: PlanConfig = field(default_factory=PlanConfig)  # what `aligner plan` assumes of lengths, waits and failures
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)  # read where ALIGNER_CONTAINER names one
    kind: ClassVar[Kind]
    num_processes: int = 1  # ranks (of an online run: of the actor), however they are started

    def __post_init__(self) -> None:
        check_range(self, "", AT_LEAST_1, "num_processes")

    @property
    def examples_per_step(self) -> int:
        """Examples of data.train, or prompts, that a training step takes."""
        return next(filter(None, (getattr(self.algorithm, name, 0) for name in ("prompts_per_step", "batch_size", "rollouts_per_step"))))

    @abstractmethod
    def traits(self) -> Traits:
        """This run's traits. Lengths are as set: 0 if not filled in yet."""

    @abstractmethod
    def read(self, location: str, tokenizer: Tokenizer, *, first: int | None = None) -> tuple[Sequence[Any], LoadReport]:
        """The usable records at `location` (of its `first` ones only), as the run reads them. Raises DataError listing bad lines."""

    def servers(self) -> Sequence[Server]:
        """The other components of the run."""
        return ()

    def residents(self) -> Sequence[Server]:
        """Further models that are trained in the trainer's own processes, and serve nobody else."""
        return ()

    @property
    def sampler(self) -> RolloutConfig | None:
        """The settings of the engine; None if the run samples nothing."""
        return None

    @property
    def server_placement(self) -> Placement:
        """The GPUs of its servers."""
        return Placement.separate

    def models(self) -> list[UsedModel]:
        """Every model that a component loads, the trained one first."""
        return [UsedModel(component="trainer", key="model", config=self.model, is_scalar=self.traits().head is Head.scalar)]

    def readers(self) -> dict[str, ModelConfig]:
        """The models that read a run's token sequences, by setting name."""
        return {"model": self.model}

    def with_lengths(self, context: lengths.Context) -> Self:
        """A copy with every length filled in. Raises ConfigError naming the lengths that do not fit."""
        return lengths.examples(self, context)

    def reserved_length(self, tokenizer: Callable[[], Tokenizer]) -> int:
        """Context tokens to leave free when filling in unset lengths."""
        return 0

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        """Raise ConfigError if `num_ranks` ranks cannot run this. Each component calls it at start, `aligner plan` for all."""
        check_layout(self.model, self.parallel, architecture, num_ranks)

    def check_complete(self) -> None:
        """Raise ConfigError if a setting is missing that a run needs but printing the config does not."""
        if (self.loop.validate_every or self.loop.validate_first) and not self.data.validation:
            key = f"loop.validate_every={self.loop.validate_every}" if self.loop.validate_every else "loop.validate_first=true"
            raise ConfigError(f"{key}: there is nothing to validate on; allowed: data.validation, or loop.validate_every=0")


@dataclass(kw_only=True, slots=True)
class TrainerRun(JobRun):
    """A run that trains `model` on existing data. `build(job: TrainerJob)` returns a `Built`."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)  # what NaN, empty updates and a gap between engine and trainer lead to
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # how checkpoints are written, verified and kept
    kind: ClassVar[Kind] = Kind.trains
    has_frozen_start: ClassVar[bool] = False  # the model that it starts from is a reference, which no checkpoint of the run holds

    def __post_init__(self) -> None:
        JobRun.__post_init__(self)
        check_best_metric(self.checkpoint, self.loop, reports=self.reports(), validation=self.data.validation)

    def reports(self) -> Sequence[str]:
        """The metrics of a validation."""
        return getattr(self.algorithm, "reports", ())

    def traits(self) -> Traits:
        return self.batch_traits()

    def batch_traits(
        self, *, rows: int = 0, unit: int = 1, phases: Sequence[Phase] = (), head: Head = Head.language, has_reference: bool = False
    ) -> Traits:
        """Traits of training on batches of data, `rows` sequences each (0: `algorithm.batch_size` times `unit`); `phases` come before."""
        rows, length = rows or self.algorithm.batch_size * unit, self.data.max_length
        first = (Phase.ref_logprobs,) if has_reference else ()
        return Traits(
            role="trainer",
            work=Work(
                phases=(*first, *phases, Phase.train),
                rows=rows,
                length=length,
                response_length=length,
                update_rows=rows,
                num_updates=1,
                unit=unit,
            ),
            head=head,
            has_reference=has_reference,
            checkpoints=(REWARD_MODEL if head is Head.scalar else POLICY,),
        )

    def check(self, architecture: Architecture, num_ranks: int) -> None:
        check_layout(self.model, self.parallel, architecture, num_ranks)
        check_replicas("batch_size", self.algorithm.batch_size, num_ranks // self.parallel.replica_size)


@dataclass(kw_only=True, slots=True)
class WritingRun(JobRun):
    """A run that writes a data set instead of training. `build(job: WriterJob)` does the work and returns the exit code."""

    kind: ClassVar[Kind] = Kind.writes

    def __post_init__(self) -> None:
        JobRun.__post_init__(self)
        for name in ("train", "validation"):
            if not isinstance(location := getattr(self.data, name), str):
                raise ConfigError(f"data.{name} lists {len(location)} sources; allowed: one path, in a run that writes a data set")
        if self.data.cache:
            raise ConfigError(f"data.cache={self.data.cache}: a run that writes a data set reads it once; allowed: ''")

    @property
    def loop(self) -> LoopConfig:
        """One step per file to write; only done.json marks completion."""
        return LoopConfig(max_steps=1)

    def models(self) -> list[UsedModel]:
        scores = self.traits().head is Head.scalar
        return [UsedModel(component="trainer", key="model", config=self.model, is_scalar=scores, needs_head=scores)]

    def pass_traits(self, phases: Sequence[Phase], *, rows: int, head: Head = Head.language) -> Traits:
        """Traits of a frozen model's pass over data, `rows` sequences a file."""
        length = self.data.max_length
        return Traits(role="writer", work=Work(phases=tuple(phases), rows=rows, length=length, response_length=length), head=head)


def check_layout(model: ModelConfig, parallel: ParallelConfig, architecture: Architecture, num_ranks: int) -> None:
    """Raise ConfigError if a model cannot be laid out over `num_ranks` ranks."""
    parallel.check_world(num_ranks)  # first, as in a run, whose ranks meet before its model is looked at
    check_divisible(architecture, parallel)
    check_together(architecture, model, parallel)


def check_replicas(setting: str, size: int, num_replicas: int, *, section: str = "algorithm") -> None:
    """Raise ConfigError for a batch with fewer examples than there are data-parallel replicas."""
    if size < num_replicas:
        raise ConfigError(f"{section}.{setting}={size}: smaller than the {num_replicas} data-parallel replicas")


def check_pooling(pooling: Pooling, model: ModelConfig) -> None:
    """Raise ConfigError for mean pooling if rows share tokens that are computed once."""
    if pooling is Pooling.mean and model.share_prompts:
        raise ConfigError("algorithm.pooling=mean: needs model.share_prompts=false: the prompt's tokens count in every row")


def check_best_metric(
    checkpoint: CheckpointConfig, loop: LoopConfig, *, reports: Sequence[str], validation: str, missing: str = ""
) -> None:
    """Raise ConfigError if the best checkpoint is to be kept and no validation `reports` it. `missing` says what others need."""
    metric = checkpoint.best_metric
    if not metric:
        return
    if not loop.validate_every:
        raise ConfigError(f"checkpoint.best_metric={metric}: needs loop.validate_every above 0")
    if not validation:
        raise ConfigError(f"checkpoint.best_metric={metric}: needs data.validation")
    if metric not in reports:
        raise ConfigError(f"checkpoint.best_metric={metric}: validation reports {', '.join(reports)}{missing}")
