"""The demo's last screen: what the three stages did, how much better the answers are, what ran, and where everything is.

It fits into 80 columns, and says the same without colours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aligner.reporting.formats import seconds, sparkline
from aligner.reporting.jsonl import StepMetrics, read_metrics
from aligner.rewards.builtin import exact_match

ACCURACY = "validation/accuracy"
WIDTH, PICTURE_WIDTH = 80, 100
_BAR_WIDTH = 30
_NUM_SAMPLES = 8
_ERASED = b"\x1b[2K"  # a live view erases its lines before it draws them again
_DRAWN = b"\x1b[?25h"  # and shows the cursor when it has drawn for the last time
_EXTERNAL_FONTS = re.compile(r"@font-face\s*{[^}]*}\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage: its recipe (and folder), what it is called, what it learns from, and how long it took."""

    recipe: str
    title: str
    about: str
    took: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of a finished demo, read from what its stages wrote."""

    stages: Sequence[Stage]
    runs: dict[str, list[StepMetrics]]
    answers: Sequence[tuple[dict[str, str], dict[str, str]]]  # of the same held-out prompts, before PPO and after
    num_held_out: int

    @property
    def accuracies(self) -> list[float]:
        """On the held-out sums, at each validation of PPO."""
        return self.series("ppo", ACCURACY)

    @property
    def rose(self) -> bool:
        return self.accuracies[-1] > self.accuracies[0]

    def series(self, recipe: str, metric: str) -> list[float]:
        return [step.values[metric] for step in self.runs[recipe] if metric in step.values]

    def total(self, recipe: str, metric: str) -> int:
        return round(sum(self.series(recipe, metric)))

    def steps(self, recipe: str) -> int:
        return self.runs[recipe][-1].step


def outcome(root: Path, stages: Sequence[Stage], held_out: Path) -> Outcome:
    """Read what the stages left below `root`; `held_out` is the file with the sums that PPO is validated on."""
    validations = sorted((root / "ppo" / "validation").glob("step_*.jsonl"))
    before, after = (_read(path) for path in (validations[0], validations[-1]))
    answers = {row["prompt"]: row["answer"] for row in _read(held_out)}
    return Outcome(
        stages=stages,
        runs={stage.recipe: read_metrics(root / stage.recipe / "metrics.jsonl") for stage in stages},
        answers=[(old | {"answer": answers[old["prompt"]]}, new) for old, new in zip(before, after, strict=True)],
        num_held_out=len(answers),
    )


def last_screen(found: Outcome, root: Path, program: str) -> RenderableType:
    """The whole screen; `program` is the interpreter that the next commands name."""
    before, after = found.accuracies[0], found.accuracies[-1]
    headline = Text("exact match on sums that are in no training file: ", justify="center", style="bold")
    headline.append(f"{before:.1%}", "yellow").append(" → ").append(f"{after:.1%}", "green" if found.rose else "red")
    took = seconds(sum(stage.took for stage in found.stages))
    colour = "green" if found.rose else "red"
    return Group(
        Panel(headline, title=f"SFT → reward model → PPO in {took}", width=WIDTH, border_style=colour),
        _stages(found),
        _accuracy(found),
        _samples(found),
        _what_ran(found),
        _places(root),
        _next(root, program),
    )


def _stages(found: Outcome) -> RenderableType:
    pairs, rewards = found.series("reward_model", ACCURACY), found.series("ppo", "rollout/reward")
    results = {
        "sft": "copies those who forget to carry",
        "reward_model": f"judges {pairs[-1]:.1%} of new pairs right",
        "ppo": f"mean score {rewards[0]:+.2f} → {rewards[-1]:+.2f}",
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for heading in ("steps", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what came out", no_wrap=True)
    for number, stage in enumerate(found.stages, 1):
        table.add_row(f"{number} {stage.title}", str(found.steps(stage.recipe)), seconds(stage.took), results[stage.recipe])
    return table


def _accuracy(found: Outcome) -> RenderableType:
    accuracies = found.accuracies
    table = Table.grid(padding=(0, 2))
    for label, value, colour in (("before PPO", accuracies[0], "yellow"), ("after PPO", accuracies[-1], "green")):
        full = round(_BAR_WIDTH * value)
        bar = Text.assemble(("█" * full, colour), ("░" * (_BAR_WIDTH - full), "dim"))
        table.add_row(label, bar, Text(f"{value:.1%}", style="bold"))
    steps = found.steps("ppo") // max(1, len(accuracies) - 1)
    table.add_row("on the way", Text(sparkline(accuracies, _BAR_WIDTH), style="cyan"), Text(f"every {steps} steps", style="dim"))
    return _section(f"Exact match on {found.num_held_out} held-out sums, greedy", table)


def _samples(found: Outcome) -> RenderableType:
    shown = found.answers[:_NUM_SAMPLES]
    half = -(-len(shown) // 2)
    blocks = Table.grid(padding=(0, 6))
    blocks.add_row(*(_block(part) for part in (shown[:half], shown[half:]) if part))
    return _section("The first of them", blocks)


def _block(answers: Sequence[tuple[dict[str, str], dict[str, str]]]) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    table.add_row("", Text("SFT model", style="dim"), Text("after PPO", style="dim"))
    for old, new in answers:
        table.add_row(old["prompt"], *(_marked(row["response"], old["answer"]) for row in (old, new)))
    return table


def _marked(response: str, answer: str) -> Text:
    right = exact_match([""], [response], [answer])[0] == 1.0
    return Text(f"{response:<5}{'✓' if right else '✗'}", style="green" if right else "red")


def _what_ran(found: Outcome) -> RenderableType:
    sampled = found.total("ppo", "learnt/samples_seen")
    table = Table.grid(padding=(0, 2))
    table.add_row("policy", f"sampled {sampled:,} responses, learnt from them in {found.total('ppo', 'optim/updates'):,} updates")
    table.add_row("critic server", f"valued {sampled:,} responses, trained on them meanwhile")
    table.add_row("reward server", f"scored {sampled + len(found.accuracies) * found.num_held_out:,} responses, those of validations too")
    return _section("Three processes ran PPO and spoke HTTP", table)


def _places(root: Path) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for path, what in (
        ("ppo/checkpoints", "policy and critic, paired by step"),
        ("ppo/export", "the policy as a Hugging Face model"),
        ("ppo/metrics.jsonl", "every step; in ppo/tensorboard too, if it is installed"),
    ):
        table.add_row(path, Text(what, style="dim"))
    return _section(f"In {_short(root)}", table)


def _next(root: Path, program: str) -> RenderableType:
    aligner = _short(Path(program).with_name("aligner"))
    lines = [
        ("# this run as a page of HTML", "dim"),
        (f"{aligner} report {_short(root / 'ppo')}", ""),
        ("# GRPO on a model of yours", "dim"),
        (f"{aligner} train grpo model.path=HF_DIRECTORY \\", ""),
        ("    data.train=PROMPTS.jsonl reward.function.path=my_rewards.py:reward", ""),
        ("# all of it in a browser", "dim"),
        (f"{aligner} studio {_short(root)}", ""),
    ]
    body = Group(*(Text(line, style=style, overflow="fold") for line, style in lines))
    return _section("Next", body)


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), Padding(body, (0, 0, 1, 2)))


def _short(path: Path) -> str:
    """Relative to where we are, where it is below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def picture(path: Path, log: Path, screen: RenderableType) -> None:
    """Write an SVG of the PPO stage's live view, as its log has it at the end (nothing without a terminal), and of the last screen."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=PICTURE_WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(last_drawn(log.read_bytes()), Text(), screen, sep="\n")
    svg = _EXTERNAL_FONTS.sub("", console.export_svg(title="make demo"))  # a picture loads nothing from another host
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg)


def last_drawn(log: bytes) -> Text:
    """What a live view drew last; empty where the log is of none."""
    drawn, end, _ = log.rpartition(_DRAWN)
    return Text.from_ansi(drawn.rpartition(_ERASED)[2].replace(b"\r", b"").decode(errors="replace").strip("\n")) if end else Text()


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
