"""Does SteerLM steer? Both of its versions from beginning to end on a small task, offline; figures, and exit code 1 where it does not.

The task: stories such as `the cat sings weeps grins sulks` about whom they are asked about. The attribute `joy` is a rule: how many of
the four verbs are glad. The chain is the one of docs/algorithms.md:

    attribute model on judged stories -> it labels all stories -> SteerLM 1 on the labels, half of which are then spoilt ->
    responses that it samples under requested attributes, with log Q', log P(y|x) and log P(a|x,y) -> SteerLM 2 on these

SteerLM 1 takes a label on trust; SteerLM 2 asks the attribute model about every response.

Stories are then sampled under every requested level, and counted by the rule. `python examples/learning/steerlm.py --directory DIR`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WHO = ("cat", "dog", "king", "fish", "boy", "bird")
GLAD, SAD = ("sings", "grins", "plays", "wins"), ("weeps", "sulks", "falls", "moans")
VERBS, LEVELS = 4, range(5)  # of a story; of joy
SPOILT = 0.5  # of the labels for SteerLM 1
HELD_OUT = ("boy", "bird")  # SteerLM 2 is not trained on requests about them
FORMAT = ("<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "System", "User", "Assistant", "joy", ":", "\n", "0", "1", "2", "3", "4")
WORDS = ("tell", " of", " the", "the", *(f" {word}" for word in (*WHO, *GLAD, *SAD)))
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}

SAMPLING = ("data.max_prompt_length=48", "rollout.sampling.max_response_length=24", "model.make_vocab_divisible_by=1")

# Margins: levels between asking SteerLM 1 for none and for all; parts of its error, and of the KL, that SteerLM 2 takes away.
GAP, CLOSER, KL_FALLS = 1.0, 0.15, 0.05

WRITTEN = Path("written") / "records.jsonl"  # of a run that writes a data set
MARK = "made_by_examples_learning_steerlm"
# recipe, run directory, settings; returns when the run has come to a good end
Launch = Callable[[str, Path, Sequence[str]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of sampled stories: `joy` is its mean for each level that was asked for, `error` the mean distance from these levels."""

    joy: tuple[float, ...]
    error: float

    @property
    def gap(self) -> float:
        """Between asking for none and for all: 0 for a model that ignores what is asked of it, 4 for one that does as it is told."""
        return self.joy[-1] - self.joy[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """What both versions made of the task; `kl_*`: KL(w || b) on prompts that SteerLM 2 is not trained on, before and after it."""

    first: Measured
    second: Measured
    kl_before: float
    kl_after: float

    @property
    def passed(self) -> bool:
        """Whether SteerLM 1 moved the attribute, SteerLM 2 brought it closer to what is asked for, and the KL fell, each by its margin."""
        closer = self.second.error <= (1 - CLOSER) * self.first.error
        return self.first.gap >= GAP and closer and self.kl_after <= (1 - KL_FALLS) * self.kl_before


def run(directory: Path, launch: Launch, *, seed: int = 1) -> Steered:
    """The whole chain below `directory`, each job a run directory of its own there. Raises what `launch` raises."""
    files = write_task(directory / "data", seed)
    model = [*sizes(files.tokenizer), "data.max_length=72", "loop.table_every=0", *rate("1e-2")]
    launch("regression_reward_model", directory / "judge", [*model, f"data.train={files.judged}", "data.attributes=[joy]", *steps(60, 32)])
    judge = f"model.path={directory / 'judge' / 'checkpoints' / 'reward_model'}"
    label = [judge, f"data.train={files.stories}", "data.max_length=72", "algorithm.attributes=[joy]", "algorithm.part_size=100"]
    launch("annotate", directory / "labels", label)
    launch("sft", directory / "plain", [*model, f"data.train={files.stories}", *steps(50, 32)])
    plain, labelled = f"model.path={directory / 'plain' / 'export'}", directory / "careless.jsonl"
    write(labelled, careless(read(directory / "labels" / WRITTEN), seed))
    steered = [
        plain,
        "data.max_length=72",
        "loop.table_every=0",
        "model.micro_batch_size=32",
        *rate("1e-2"),
        f"data.train={labelled}",
        *steps(120, 32),
    ]
    launch("steerlm", directory / "steerlm", steered)
    first = measure(directory, "steerlm", files, launch, seed)

    groups = read(propose(directory, files.asked, launch))
    held_out = [group for group in groups if group["prompt_turns"][-1]["value"].endswith(HELD_OUT)]
    write(directory / "train.jsonl", [group for group in groups if group not in held_out])
    write(directory / "held_out.jsonl", held_out)
    settings = [
        *(f"model.path={directory / 'steerlm' / 'export'}", "data.max_length=72", "model.micro_batch_size=128", *rate("2e-3")),
        *(f"data.train={directory / 'train.jsonl'}", f"data.validation={directory / 'held_out.jsonl'}"),
        *(*steps(40, 20), "loop.table_every=0", "loop.validate_every=10", "loop.validate_first=true"),
    ]
    launch("steerlm2", directory / "steerlm2", settings)
    second = measure(directory, "steerlm2", files, launch, seed)
    before, last = kl(directory / "steerlm2")
    return Steered(first=first, second=second, kl_before=before, kl_after=last)


def careless(records: list[dict], seed: int) -> list[dict]:
    """The records with SPOILT of their labels replaced by any other, by chance."""
    draw = random.Random(seed)
    for one in records:
        if draw.random() < SPOILT:
            one["conversations"][-1]["label"] = f"joy:{draw.choice(LEVELS)}"
    return records


def measure(directory: Path, name: str, files: Task, launch: Launch, seed: int) -> Measured:
    """What stories are like that the run `name` samples under every level."""
    run_directory = directory / f"{name}_measured"
    settings = [f"model.path={directory / name / 'export'}", f"data.train={files.measured}", "algorithm.num_samples=32", f"run.seed={seed}"]
    launch("generate", run_directory, [*settings, *SAMPLING])
    found: dict[int, list[int]] = {level: [] for level in LEVELS}
    for record in read(run_directory / WRITTEN):
        answer = record["conversations"][-1]
        found[int(answer["label"].removeprefix("joy:"))].append(joy(answer["value"]))
    distances = [abs(one - level) for level in LEVELS for one in found[level]]
    return Measured(joy=tuple(sum(found[level]) / len(found[level]) for level in LEVELS), error=sum(distances) / len(distances))


def propose(directory: Path, asked: Path, launch: Launch) -> Path:
    """Eight responses of SteerLM 1 to every request in `asked`, with all that SteerLM 2 needs to know of them."""
    steerlm, plain = (f"model.path={directory / one / 'export'}" for one in ("steerlm", "plain"))
    judge = [f"model.path={directory / 'judge' / 'checkpoints' / 'reward_model'}", "algorithm.attributes=[joy]"]
    grouped = ("algorithm.num_samples=8", "algorithm.grouped=true")
    launch("generate", directory / "sampled", [steerlm, f"data.train={asked}", *grouped, *SAMPLING])
    written = directory / "sampled" / WRITTEN
    for adds, model in (("proposal", [steerlm]), ("response", [plain]), ("attributes", judge)):
        settings = [*model, f"algorithm.adds={adds}", f"data.train={written}", "data.max_length=96", "data.bad_lines=skip"]
        launch("proposals", directory / adds, [*settings, "algorithm.batch_size=256", "model.micro_batch_size=256"])
        written = directory / adds / WRITTEN
    return written


def kl(run_directory: Path) -> tuple[float, float]:
    """KL(w || b) on the held-out prompts before the first step and after the last."""
    steps = read(run_directory / "metrics.jsonl")
    found = [step["validation/kl"] for step in steps if "validation/kl" in step]
    return found[0], found[-1]


def joy(story: str) -> int:
    """The rule: how many of its verbs are glad."""
    return sum(word in GLAD for word in story.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The files of the task: `judged` has labels by the rule, `stories` none; the others are requests."""

    tokenizer: Path
    judged: Path
    stories: Path
    asked: Path
    measured: Path


def write_task(folder: Path, seed: int) -> Task:
    """Same seed, same bytes."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("judged", "stories", "asked", "measured")
    task = Task(tokenizer=folder / "tokenizer", **{name: folder / f"{name}.jsonl" for name in names})
    write_tokenizer(task.tokenizer)
    write(task.judged, [record(who, story(draw, who), label=True) for who in draw.choices(WHO, k=200)])
    write(task.stories, [record(who, story(draw, who)) for who in draw.choices(WHO, k=400)])
    requests = [(who, level) for who in WHO for level in LEVELS]
    write(task.measured, [request(who, level) for who, level in requests])
    write(task.asked, [request(who, level) for who, level in requests for _ in range(10)])
    return task


def story(draw: random.Random, who: str) -> str:
    """Mostly of one mood: none of its verbs are glad, or all."""
    glad = draw.choices(LEVELS, (3, 1, 1, 1, 3))[0]
    verbs = [draw.choice(GLAD) for _ in range(glad)] + [draw.choice(SAD) for _ in range(VERBS - glad)]
    draw.shuffle(verbs)
    return " ".join(("the", who, *verbs))


def record(who: str, text: str, *, label: bool = False) -> dict:
    """A story as a conversation, with the label that the rule gives it or without one."""
    turns = [{"from": "User", "value": f"tell of the {who}"}, {"from": "Assistant", "value": text}]
    turns[1] |= {"label": f"joy:{joy(text)}"} if label else {}
    return {"system": "", "conversations": turns, "mask": "User"}


def request(who: str, level: int) -> dict:
    """A prompt with what is asked of the story: the last turn is what is sampled anew."""
    turns = [{"from": "User", "value": f"tell of the {who}"}, {"from": "Assistant", "value": "the", "label": f"joy:{level}"}]
    return {"system": "", "conversations": turns, "mask": "User", "type": "VALUE_TO_TEXT"}


def write_tokenizer(folder: Path) -> None:
    """One token per word, mark and line break, as a Hugging Face tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers, processors

    vocabulary = {token: number for number, token in enumerate((*SPECIAL.values(), *FORMAT, *WORDS))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<extra_id_\d>| ?[A-Za-z]+|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.values()])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}))


def sizes(tokenizer: Path) -> list[str]:
    """The models' architecture: about 30,000 parameters."""
    architecture = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
    named = [f"model.architecture.{name}={size}" for name, size in (architecture | {"max_position_embeddings": 96}).items()]
    return [*named, f"model.tokenizer={tokenizer}", "model.make_vocab_divisible_by=1", "model.micro_batch_size=32"]


def rate(value: str) -> list[str]:
    """A learning rate that stays."""
    return [f"optimizer.lr={value}", "optimizer.min_lr=0", "optimizer.warmup_steps=0", "optimizer.decay=constant"]


def steps(number: int, batch_size: int) -> list[str]:
    """How long to train."""
    return [f"loop.max_steps={number}", f"algorithm.batch_size={batch_size}"]


def write(path: Path, records: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    from launching import launch, prepare, refuse_foreign  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/steerlm_check"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    root = arguments.directory.absolute()
    if refuse_foreign(root, MARK):
        return 2
    prepare(root, MARK)
    found = run(root, launch, seed=arguments.seed)
    (root / "steerlm.json").write_text(json.dumps(asdict(found) | {"passed": found.passed}, indent=2) + "\n")
    for name, measured in (("SteerLM 1", found.first), ("SteerLM 2", found.second)):
        means = ", ".join(f"{mean:.2f}" for mean in measured.joy)
        print(f"{name}: joy {means} where 0 to 4 was asked for; error {measured.error:.3f}")
    print(f"KL on held-out prompts: {found.kl_before:.3f} to {found.kl_after:.3f}")
    print(f"needed: {GAP:g} levels between 0 and 4 by SteerLM 1; {CLOSER:.0%} less error, and {KL_FALLS:.0%} less KL, by SteerLM 2")
    print("steers" if found.passed else "MISSES")
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
