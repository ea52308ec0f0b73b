"""`aligner.train`: what a notebook gives it, and what comes back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from training_jobs import LAUNCHER_VARIABLES, ROOT, read_rows

import aligner
from aligner.errors import AlignerError, ConfigError

ARCHITECTURE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
ARCHITECTURE["max_position_embeddings"] = 32
ROWS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns, or the kind and text of its error, in a process that no launcher started: a fork that has the imports done,
    as have the forks that the run starts from there."""
    for name in [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    try:
        return call(*arguments)
    except AlignerError as error:
        return type(error), str(error)


def train(recipe: str, settings: dict[str, Any]) -> Any:
    return aligner.train(recipe, **settings)


@pytest.fixture(scope="module")
def sft(task: Path, on_ranks) -> aligner.Result:
    """SFT of a new model on rows, with settings as sections and as keys."""
    model = {"tokenizer": task / "tokenizer", "architecture": ARCHITECTURE, "make_vocab_divisible_by": 2}
    sections = {"data": {"train": ROWS, "max_length": 16}, "optimizer": {"lr": 1e-3}, "model": model}
    given = {"max_steps": 2, "directory": task / "sft", "algorithm.batch_size": 8}
    return on_ranks(alone, 1, train, "sft", sections | given)[0]


def test_the_result_is_what_the_run_left(sft: aligner.Result, task: Path) -> None:
    assert [record["step"] for record in sft.metrics] == [1, 2] and sft.metrics[0]["optim/lr"] <= 1e-3
    assert sft.checkpoint == task / "sft" / "checkpoints" / "policy" / "step_000002"
    model, tokenizer = sft.model(), sft.tokenizer()
    assert isinstance(model, transformers.PreTrainedModel) and model.config.num_hidden_layers == 1
    assert tokenizer.decode(tokenizer("3+4=")["input_ids"]).endswith("3+4=")
    assert read_rows(task / "sft" / "given" / "data_train.jsonl") == ROWS


def train_on_lengths(checkpoint: Path, directory: Path, bonus: float) -> aligner.Result:
    prompts = [{"prompt": row["prompt"], "answer": row["response"]} for row in ROWS]
    settings = {"algorithm.prompts_per_step": 4, "algorithm.group_size": 2, "algorithm.mini_batch_size": 8, "algorithm.kl_coef": 0.0}
    settings |= {"rollout.sampling.max_response_length": 4, "data.max_prompt_length": 8, "model.make_vocab_divisible_by": 2}

    def reward(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        return [len(response) + bonus for response in responses]

    given = {"model": checkpoint, "data": prompts, "reward": reward, "max_steps": 1, "directory": directory}
    return aligner.train("grpo", **given, overrides=["algorithm=dr_grpo"], **settings)


def test_a_function_with_what_it_closes_over_is_the_reward(sft: aligner.Result, task: Path, on_ranks) -> None:
    where = task / "grpo"
    grpo = on_ranks(alone, 1, train_on_lengths, sft.checkpoint, where, 0.25)[0]
    row = json.loads(next((where / "rollouts").glob("*.jsonl")).read_text().splitlines()[0])
    assert row["reward"] == len(row["response"]) + 0.25
    assert (grpo.directory, len(grpo.metrics)) == (where, 1)


REFUSED: list[tuple[dict[str, Any], type[AlignerError], str]] = [
    ({"learning_rate": 3}, ConfigError, "unknown setting learning_rate in 'learning_rate=3': did you mean optimizer.lr?"),
    ({"max_steps": -1}, ConfigError, "loop.max_steps=-1: must be at least 1"),
    ({"data": [3]}, ConfigError, "data.train: row 0 is not a mapping of names to texts and numbers"),
    ({"data": [{"promt": "3+4=", "response": "7"}]}, AlignerError, "data_train.jsonl:1"),
]


def train_each(settings: list[dict[str, Any]]) -> list[Any]:
    return [alone(train, "sft", one) for one in settings]


def test_refusals_name_the_setting_or_the_row(sft: aligner.Result, tmp_path: Path, on_ranks) -> None:
    given = {"model": sft.export, "data": ROWS, "max_steps": 1, "directory": tmp_path / "run"}
    found = on_ranks(train_each, 1, [given | settings for settings, *_ in REFUSED])[0]
    for (kind, said), (_, error, text) in zip(found, REFUSED, strict=True):
        assert issubclass(kind, error) and text in said
    with pytest.raises(ConfigError, match="there is no config 'gropo': did you mean grpo?"):
        aligner.train("gropo")


def run_programs(programs: list[str], folder: Path) -> None:
    os.chdir(folder)
    for program in programs:
        exec(compile(program, "docs/index.md", "exec"), {"__name__": "__main__"})


def test_the_programs_of_the_documentation(sft: aligner.Result, tmp_path: Path, on_ranks) -> None:
    """They are complete, short, and run as they stand on a model of that name."""
    text = (ROOT / "docs" / "index.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 3
    assert all(sum(bool(line.strip()) for line in program.splitlines()) <= 12 for program in programs)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base").symlink_to(sft.export)
    assert on_ranks(alone, 1, run_programs, programs, tmp_path)[0] is None
    assert (tmp_path / "runs" / "grpo" / "done.json").is_file()
