"""The job of a recipe that writes a data set: the argument of its `build`, and resumable writing of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from aligner.cluster.run_directory import RunDirectory
from aligner.data.collate import token_batch
from aligner.data.report import LoadReport
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.jobs.parts import conclude, load_model_files, run_loop, with_lengths
from aligner.jobs.sources import FrozenModels, model_digest, pinned
from aligner.loop.writing import Parts, Writing, WrittenFiles
from aligner.models import create
from aligner.models.config import Architecture, ModelConfig
from aligner.models.training.guard import GuardConfig
from aligner.models.training.policy import MegatronPolicy
from aligner.parallel.collectives import from_rank_0
from aligner.protocols import RolloutEngine
from aligner.reporting.formats import Column
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.run.recipe import Recipe
from aligner.run.session import Session, open_session
from aligner.run.settings import LoopConfig, WritingRun
from aligner.servers.access import TLS, Access
from aligner.servers.client import RewardClient

C = TypeVar("C", bound=WritingRun)
Item = TypeVar("Item")
Score = Callable[[Sequence[Sequence[int]]], Tensor]  # token sequences -> float32 [B, K]; every rank calls it


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterJob(FrozenModels, Generic[C]):
    """The inputs of a writing recipe, on one rank. `config` has every length and the run's original model."""

    session: Session
    config: C
    tokenizer: Tokenizer
    architecture: Architecture
    columns: Sequence[Column]

    def load(self, load: Callable[..., tuple[Sequence[Item], LoadReport]], *arguments: Any, **options: Any) -> Sequence[Item]:
        """Usable records of data.train; prints what was left out. Raises DataError listing all bad lines."""
        items, report = load(self.config.data.train, self.config.data, self.tokenizer, *arguments, **options)
        self.session.say(report.summary())
        return items

    def policy(self, *, temperature: float = 1.0) -> MegatronPolicy:
        """The model, frozen."""
        frozen = create.training(self.config.model, None, temperature=temperature, vision=self.tokenizer.vision)
        return create.create_policy(self.config.model, self.architecture, self.config.parallel, self.session.topology, frozen)

    def at_temperature_1(self, policy: MegatronPolicy) -> MegatronPolicy:
        """The same weights, with log-probs at temperature 1."""
        return MegatronPolicy(policy.model)

    def model_digest(self, model: ModelConfig | None = None) -> str:
        """Changes with the weights of a model (None: the job's own). Every rank calls it."""
        source = create.source_directory(self.config.model if model is None else model)
        return from_rank_0(lambda: model_digest(source))

    def engine(self, policy: MegatronPolicy, rollout: RolloutConfig) -> RolloutEngine:
        """An engine on the policy's weights."""
        return create_engine(policy, rollout, tokenizer=self.tokenizer)

    @contextmanager
    def attribute_scorer(self) -> Iterator[Score]:
        """The scorer: a server of another run, called by rank 0, or the model of `model.path` in these processes."""
        session, config, pad_id = self.session, self.config, self.tokenizer.pad_id
        attributes = tuple(config.algorithm.attributes)
        if config.algorithm.served_by:
            server = RunDirectory(Path(config.algorithm.served_by))
            access = Access.for_client(server.secret, config.server_client, own_tls=(server.path / TLS).is_dir())
            client = RewardClient(server.services, config=config.server_client, access=access)
            try:
                if session.is_first:
                    client.wait_until_ready()
                yield lambda rows: _of_width(from_rank_0(lambda: client.attributes(rows)), attributes)
            finally:
                client.close()
            return
        head = create.head_of(config.model)
        if head is None or head.outputs != attributes:
            has = "no head: it is a language model" if head is None else f"the outputs {', '.join(head.outputs)}"
            raise ConfigError(f"algorithm.attributes={list(attributes)}: model.path={config.model.path} has {has}; allowed: its outputs")
        model = create.create_reward_model(
            config.model, self.architecture, config.parallel, session.topology, create.training(config.model, None), head=head
        )
        yield lambda rows: model.scores(token_batch(rows, pad_id))

    def write_parts(
        self, items: Sequence, make: Callable, *, made_of: dict[str, str], finish: Callable[[Parts, Path], str] | None = None
    ) -> int:
        """Make and write every missing part, then join them in one file, or `finish(parts, folder)` on rank 0. Returns the exit code."""
        session, config = self.session, self.config
        folder = session.directory.written
        parts = Parts(
            directory=folder / "parts",
            made_of=made_of | {"model": self.model_digest()},
            num_items=len(items),
            part_size=config.algorithm.part_size,
        )
        from_rank_0(parts.begin)
        work = Writing(items, parts.part_size, make=make, write=lambda part, records: from_rank_0(lambda: parts.write(part, records)))
        return self.conclude(work, parts.num_complete, lambda: (finish or _join)(parts, folder))

    def conclude(self, work: Any, count: Callable[[], int], finish: Callable[[], str] | None = None) -> int:
        """Run an algorithm that writes `num_steps` files, of which `count()` exist, then `finish()` on rank 0. Returns the exit code."""
        loop = LoopConfig(max_steps=work.num_steps, table_every=0)
        logging = self.config.logging
        last = run_loop(self.session, work, WrittenFiles(count), loop, logging=logging, shown=self.columns, guard=GuardConfig())
        if last == work.num_steps and finish is not None:
            self.session.say(from_rank_0(finish))
        return conclude(self.session, last, loop)


def write(recipe: Recipe, config: WritingRun) -> int:
    """Run a recipe that writes; the exit code. Every rank calls it; a restarted job continues after the existing files."""
    with open_session(config, config.run, config.parallel, component=recipe.component or recipe.name, recipe=recipe.name) as session:
        config = with_lengths(replace(config, model=pinned(session, "model", config.model)))
        tokenizer, architecture = load_model_files(config.model, config.data, session)
        config.check(architecture, session.topology.world_size)
        job = WriterJob(session=session, config=config, tokenizer=tokenizer, architecture=architecture, columns=recipe.columns)
        code = recipe.build(job)
    return code


def _join(parts: Parts, folder: Path) -> str:
    parts.join(folder / "records.jsonl")
    return f"{parts.num_items} items written to {folder / 'records.jsonl'}"


def _of_width(scores: Tensor, attributes: Sequence[str]) -> Tensor:
    if scores.shape[1] != len(attributes):
        raise ConfigError(f"algorithm.attributes={list(attributes)}: the server gives {scores.shape[1]} scores; allowed: as many names")
    return scores
