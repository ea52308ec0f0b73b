"""What README, docs and messages claim: settings and values that they name exist, commands can be typed, plan figures are the planner's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from aligner import cli
from aligner.algorithms.registry import composed, recipes
from aligner.commands.plan.command import plan_job
from aligner.errors import ConfigError
from aligner.files import configs, recipe_folders
from aligner.losses.advantages import Estimator
from aligner.losses.policy import Objective
from aligner.losses.preference import DPOVariant
from aligner.planner.report import JobPlan, gib, seconds
from aligner.rollout.config import EngineKind
from aligner.settings.command_line import read
from aligner.settings.explain import groups_in, synonyms
from aligner.settings.schema import SchemaKey, is_known, named_as, schema_keys

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "benchmarks/README.md", "tools/README.md")),
        *(path for folder in ("docs", "examples") for path in ROOT.glob(f"{folder}/**/*.md")),
    )
)
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in (*(ROOT / "aligner").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "tools").rglob("*.py"))
)
SETTING = re.compile(r"(?<![\w./<-])(?P<key>[a-z]\w*(?:\.[a-z]\w*)+)(?:=(?P<value>[\w.+-]*\w))?")
FILES = "bin c csv h html json jsonl log md model nemo parquet py safetensors sh sub txt yaml"  # the ends of names of files
OTHERS = {
    "docs/coming_from.md": r"algorithm\.adv_estimator|rollout\.name",
    "docs/models.md": r"model\.embed_tokens\.weight",
    "docs/planning.md": r"plan\.(activations|fits|peak\..+)",
    "docs/index.md": r"model\.generate",
    "aligner/data/templates.py": r"loop\..+",
    "aligner/data/tokenizer.py": r"model\.vocab_size",
    "aligner/commands/evaluate.py": r"judge\.\w+",  # of a file with a judge alone
    "aligner/rewards/": r"judge\.\w+",  # of a part of reward.functions, as are url and path
    "aligner/commands/migrate/": r"(algorithm|critic|data|model)\.\w+(\.\w+)?",
    "aligner/models/checkpoint/optimizer.py": r"optimizer\.state",  # of Megatron-Core's files
    "aligner/models/families/": r"model\.(decoder|embed_tokens|norm)\..+|model\.decoder",
    "aligner/models/checkpoint/foreign/": r"model\.module",
    "aligner/planner/tower.py": r"model\.visual",
    "aligner/parallel/cpu_platform.py": r"optimizer\.\w+",
}
OPEN = {"algorithm.advantage_estimator": Estimator, "algorithm.objective": Objective, "algorithm.loss": DPOVariant}
OPEN |= {"rollout.engine": EngineKind}  # or a function of the user's


@cache
def all_keys() -> dict[str, list[SchemaKey]]:
    """Of every setting of every recipe, by its key."""
    found: dict[str, list[SchemaKey]] = {}
    for recipe in recipes().values():
        for key in schema_keys(recipe.config):
            found.setdefault(key.key, []).append(key)
    return found


@cache
def is_setting(key: str, *, goes_on: bool = False) -> bool:
    """`goes_on`: the text goes on with something that only the program knows."""
    every = [of_key[0] for of_key in all_keys().values()]
    return key in all_keys() or is_known(key, every) or (goes_on and any(one.key.startswith(key) for one in every))


def takes(key: str, value: str) -> bool:
    """Whether the setting takes this value, where its values can be listed; placeholders (`N`, `MODEL`) pass."""
    kinds = [one.type for known, of_key in all_keys().items() if named_as(known, key) == key for one in of_key]
    allowed = {part.strip() for kind in kinds for part in kind.split("|")}
    if value.isupper() or not kinds or allowed - {"null", "bool"} and not any("|" in kind.replace(" | ", "") for kind in kinds):
        return True
    allowed |= {"true", "false"} if "bool" in allowed else set()
    return value in allowed or (key in OPEN and value in [one.value for one in OPEN[key]])


@cache
def roots() -> set[str]:
    return {key.partition(".")[0] for key in all_keys()}


def false_claims(source: str, text: str, *, goes_on: bool = False) -> Iterator[str]:
    """What begins like a setting, with the name of a section, and is none, or has a value that the setting does not take."""
    others = [pattern for place, pattern in OTHERS.items() if source.startswith(place)]
    for match in SETTING.finditer(text):
        key, value = match["key"], match["value"]
        is_cut = match.end() == len(text) and (goes_on or key.endswith("_"))
        if key.partition(".")[0] not in roots() or key.rpartition(".")[2] in FILES.split() or any(re.fullmatch(one, key) for one in others):
            continue
        if not is_setting(key, goes_on=is_cut) or (value and not is_cut and not takes(key, value)):
            yield f"{source}: {match[0]}"


@cache
def tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def blocks(page: str) -> list[str]:
    return [token.content for token in tokens(page) if token.type in ("code_block", "fence")]


def code(page: str) -> list[str]:
    """Code spans and blocks of a page."""
    return [child.content for token in tokens(page) for child in token.children or () if child.type == "code_inline"] + blocks(page)


def messages(source: str) -> Iterator[tuple[str, bool]]:
    """The texts of a module that are no docstrings, and whether the program puts something behind them."""
    tree = ast.parse((ROOT / source).read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values[:-1]}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and not re.fullmatch(r"[\w-]+ = [\w.]+:\w+", node.value):  # a command's function
            yield node.value, id(node) in pieces


def test_settings_that_the_docs_name_exist_and_take_the_values() -> None:
    assert [claim for page in PAGES for text in code(page) for claim in false_claims(page, text)] == []


def test_pages_that_the_code_names_exist() -> None:
    tables = [str(path.relative_to(ROOT)) for folder in ("aligner", "conf") for path in (ROOT / folder).rglob("*.yaml")]
    found = [(source, page) for source in (*SOURCES, *tables) for page in re.findall(r"docs/[\w/]+\.md", (ROOT / source).read_text())]
    assert len(found) > 30 and [one for one in found if not (ROOT / one[1]).is_file()] == []


def test_settings_that_messages_name_exist_and_take_the_values() -> None:
    assert [claim for source in SOURCES for text, on in messages(source) for claim in false_claims(source, text, goes_on=on)] == []


def test_what_does_not_exist_is_found() -> None:
    text = "set algorithm.correction.kind=tsi, loop.save_evry=5, model.lora.rank=16, rollout.engine=vllm or guard.learnt_nothing=never"
    wrong = ["algorithm.correction.kind=tsi", "loop.save_evry=5", "guard.learnt_nothing=never"]
    assert [claim.removeprefix("x: ") for claim in false_claims("x", text)] == wrong
    assert list(false_claims("x", "rollout.asynchronous.max_", goes_on=True)) == []
    assert list(false_claims("x", "rollout.asynchronous.mux_", goes_on=True)) == ["x: rollout.asynchronous.mux_"]


def test_synonyms_are_of_settings_that_there_are_and_of_values_that_they_take() -> None:
    assert synonyms().keys() == {"NeMo-Aligner", "TRL", "verl", "OpenRLHF", "field", "migrate"}
    for project, table in synonyms().items():
        for name, meaning in ((name, meaning) for name, meanings in table.items() for meaning in meanings):
            named, _, note = meaning.partition(";")
            assert named.strip() or note, f"{project}: {name} says nothing"
            for key, equals, value in (part.strip().partition("=") for part in named.split(" and ") if part.strip()):
                assert is_setting(key) and (not equals or takes(key, value)), f"{project}: {name}: {meaning}"


def commands() -> list[tuple[str, str]]:
    """(page, command) for every line of a block that starts `aligner`, also under srun or with placeholders."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if match := re.match(r"(?:srun |\.venv/bin/)*(aligner [a-z].*)", line.strip()):
                    found.append((page, match[1]))
    return found


def words_of(command: str) -> list[str]:
    """As a shell gives them; `...` is for what the reader has, `x=...` for a value."""
    words = shlex.split(command, comments=True)[1:]
    words = [re.sub(r"=\.\.\.$", "=x", word) for word in words if word not in ("...", "|") and not word.startswith("$")]
    return [re.sub(r"^([^\[{]+?=[^\[{,]+),.*", r"\1", word) if "--multirun" in words else word for word in words]


def refusal(config: str, overrides: list[str]) -> str:
    """Why this config cannot be composed with these settings and those that it asks for; empty if it can."""
    given = list(overrides)
    while True:
        try:
            composed(config, given)
        except ConfigError as error:
            required = re.match(r"([\w.]+) is required", str(error))
            if not required or f"{required[1]}=x" in given:
                return str(error)
            given.append(f"{required[1]}=x")
        else:
            return ""


def test_the_commands_of_the_docs_can_be_typed() -> None:
    """They are parsed as the shell gives them, and the settings of those that run or plan something are composed."""
    wrong, seen = [], 0
    for page, command in commands():
        try:
            parsed = cli._parse(words_of(command)).keywords
        except (SystemExit, ConfigError) as error:
            wrong.append(f"{page}: {command}: {error}")
            continue
        overrides = list(parsed.get("overrides") or ())
        config = parsed.get("config") or parsed.get("name") or parsed.get("target") or ""
        if "settings" in parsed:
            settings = [word for word in parsed["settings"] if "=" in word or word.startswith("-")]
            overrides = list(read(settings).overrides)
            config = config or next((word for word in parsed["settings"] if word not in settings), "ppo")
        if config in configs() and not any(word.startswith("hydra.") for word in overrides):
            seen += 1
            if why := refusal(config, overrides):
                wrong.append(f"{page}: {command}: {why}")
    assert wrong == [] and seen > 60


def test_paths_in_the_commands_of_the_docs_exist() -> None:
    own = r"(?<![\w./-])(?:examples|slurm|conf|benchmarks|tools|tests|docs)/[\w./-]+\.(?:py|sub|yaml|jsonl|md)\b"
    wrong = [
        f"{page}: {path}"
        for page in PAGES
        if page != "docs/coming_from.md"  # the paths of others' checkouts
        for text in code(page)
        for path in re.findall(own, text)
        if not (ROOT / path).exists() and not (ROOT / page).parent.joinpath(path).exists()
    ]
    assert wrong == []


def test_presets_that_the_docs_choose_exist() -> None:
    folders = [*recipe_folders(), ROOT / "conf"]
    groups = groups_in(folders)
    for page in PAGES:
        for text in code(page):
            for group, name in re.findall(r"(?<![\w./-])\+?(algorithm|experiment|cluster|environment)=([a-z]\w*)", text):
                if name in ("mine", "ours"):  # a file of the reader's
                    continue
                assert group in groups, f"{page}: {group}"
                assert any((folder / group / f"{name}.yaml").is_file() for folder in folders), f"{page}: {group}={name}"


def test_code_that_a_page_quotes_is_in_the_file_that_it_names() -> None:
    """A block whose first line is a comment with a path; `docs/extending.md` has such."""
    quoted = []
    for page in PAGES:
        for block in blocks(page):
            name, _, text = block.partition("\n")
            if path := re.fullmatch(r"# ((?:aligner|tests|examples)/[\w./]+\.py)", name):
                quoted.append(path[1])
                assert text in (ROOT / path[1]).read_text(), f"{page}: {text}"
    assert len(quoted) > 4


FIGURES = re.compile(r"<!-- aligner plan (?P<command>[^:]+): (?P<figures>.+?) -->")


def figure(job: JobPlan, name: str) -> str:
    """As a page writes it: GiB on the fullest rank of the first component, or a part of them; the time of a step; whether it fits."""
    plan = job.components[0]
    if name == "step":
        return seconds(job.step_seconds)
    if name == "fits":
        return "no" if job.problems else "yes"
    return gib(plan.peak.total if name == "GiB" else plan.peak.parts[name])


def marked() -> list[tuple[str, str, str]]:
    return [(page, found["command"], found["figures"]) for page in PAGES for found in FIGURES.finditer((ROOT / page).read_text())]


def stale_figures() -> list[str]:
    stale = []
    for page, command, figures in marked():
        config, *overrides = command.split()
        job = plan_job(config, overrides)
        for name, _, told in (one.partition(" ") for one in figures.split(", ")):
            text = FIGURES.sub("", (ROOT / page).read_text())
            if figure(job, name) != told or (name != "fits" and told not in text):
                stale.append(f"{page}: {command}: {name} is {figure(job, name)}, not {told}")
    return stale


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
def test_the_figures_of_plans_are_the_planners(on_ranks) -> None:
    """`<!-- aligner plan CONFIG KEY=VALUE...: GiB 50.6, step 24 s -->` stands behind the text that has them. In a process of its own."""
    assert on_ranks(stale_figures, 1, timeout=600) == [[]]
    assert len(marked()) >= 8
