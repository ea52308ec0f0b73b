"""What the cases of supervised.py have in common: the pretrained model, its stories, runs of recipes, and the lines of the table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import stories
from launching import Launch
from stories import Files, StoryFiles

from aligner.data.tokenizer import Tokenizer, load_tokenizer

COMMON = (
    *("model.micro_batch_tokens=2048", "optimizer.weight_decay=0.01", "optimizer.warmup_steps=10"),
    *("loop.table_every=0", "logging.tensorboard=false", "logging.progress=plain"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """`steps` replaces the number of steps of every run where it is not 0. The rest is how much there is of the stories: names to train on,
    names held out, beginnings for each, and `told` stories of the model to each prompt; `judged` are sampled to compare two models."""

    seed: int = 1
    steps: int = 0
    names: int = 12
    held_out_names: int = stories.HELD_OUT_NAMES
    beginnings: int = len(stories.BEGINNINGS)
    told: int = 16
    judged: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: `after` with its 95 % interval. `needed` is what the whole interval has to be above (`rises`) or below."""

    case: str
    metric: str
    before: float
    after: float
    low: float
    high: float
    needed: float
    rises: bool = True
    cpu_seconds: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the worse end of the interval is beyond what is needed."""
        return self.low > self.needed if self.rises else self.high < self.needed

    @classmethod
    def of(cls, case: str, metric: str, found: tuple[float, float, float], **others: object) -> Row:
        """A row of (after, low, high)."""
        return cls(case=case, metric=metric, after=found[0], low=found[1], high=found[2], **others)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended well."""

    directory: Path
    cpu_seconds: float

    @property
    def export(self) -> Path:
        return self.directory / "export"


class Bench:
    """Trains from `model` (Hugging Face format) below `root`; `data` is the folder of public data sets. A run is made once."""

    def __init__(self, root: Path, model: Path, data: Path, options: Options, launch: Launch) -> None:
        self.root = root
        self.model = model
        self.data = data
        self.options = options
        self.launch = launch
        self._runs: dict[str, Run] = {}
        self._stories: StoryFiles | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The pretrained model's."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self.model))
        return self._tokenizer

    @property
    def stories(self) -> StoryFiles:
        """What is made of the model's own stories, which are told when they are first asked for."""
        if self._stories is None:
            prompts, options = Files.below(self.root / "data", "prompts"), self.options
            stories.write_prompts(prompts, num_names=options.names, num_held_out=options.held_out_names, num_beginnings=options.beginnings)
            told = Files(train=self._told("told", prompts.train), held_out=self._told("told_held_out", prompts.held_out))
            self._stories = stories.label(told, self.root / "data", options.seed)
        return self._stories

    def fresh(self, name: str) -> Path:
        """The directory of this name below `root`, without what an earlier program left there."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        return self.root / name

    def run(self, name: str, recipe: str, settings: Sequence[str]) -> Run:
        """A run of `recipe` that starts from the pretrained model unless the settings say otherwise. Raises CaseFailed."""
        if name not in self._runs:
            directory = self.fresh(name)
            given = [f"model.path={self.model}", f"run.seed={self.options.seed}", *settings]
            self._runs[name] = Run(directory=directory, cpu_seconds=self.launch(recipe, directory, given))
        return self._runs[name]

    def train(self, name: str, recipe: str, settings: Sequence[str]) -> Run:
        """`run` of a recipe that trains."""
        steps = [f"loop.max_steps={self.options.steps}"] if self.options.steps else []
        return self.run(name, recipe, [*COMMON, *settings, *steps])

    def _told(self, name: str, prompts: Path) -> Path:
        lengths = [f"data.max_prompt_length={stories.PROMPT_LENGTH}", f"rollout.sampling.max_response_length={stories.RESPONSE_LENGTH}"]
        settings = [f"data.train={prompts}", *lengths, "rollout.max_batch_size=256", f"algorithm.num_samples={self.options.told}"]
        self.run(name, "generate", [*settings, "logging.tensorboard=false", "logging.progress=plain"])
        return self.root / name / "written" / "records.jsonl"
