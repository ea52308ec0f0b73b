"""`aligner plan` as it is typed: every job config, refusals with their reasons, long contexts, the search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.algorithms.registry import recipes
from aligner.files import configs

JOB = Path(__file__).parent / "plan_commands_job.py"
JOB_CONFIGS = [name for name in configs() if name not in recipes()]
SMALL = [f"model.architecture.{size}" for size in ("num_layers=8", "hidden_size=1024", "vocab_size=32000", "max_position_embeddings=1024")]
COMMANDS = {
    **{name: [name] for name in JOB_CONFIGS},
    "grpo_gsm8k_tiny": ["grpo_gsm8k_tiny", *SMALL],  # it takes any small model
    "tp128": ["ppo_70b", "parallel.tp=128", "parallel.pp=1"],
    "one_gpu": ["ppo_70b", "parallel.tp=1", "parallel.sequence_parallel=false", "parallel.pp=1"],
    "long": [
        "ppo_70b",
        "parallel.cp=8",
        "model.seq_length=131072",
        "data.max_prompt_length=126976",
        "rollout.max_batch_size=4",
        "model.recompute=full",
    ],
    "no_model": ["sft"],
    "no_recipe": ["pppo_70b"],
    "too_long": ["sft_70b", "data.max_length=9000"],
    "experts": ["grpo_70b", "model=mixtral_8x7b", "parallel.ep=4"],
    "search": ["sft", *SMALL, "+cluster=dgx_h100", "num_processes=8", "--search", "--top", "3"],
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {}


@pytest.fixture
def result(results, run_distributed, tmp_path):
    """`result(name)`: exit code, output and JSON of a command; they all run in one process."""

    def get(name: str) -> dict:
        if not results:
            run_distributed(JOB, 1, json.dumps(COMMANDS), tmp_path / "results.json", timeout=480)
            results.update(json.loads((tmp_path / "results.json").read_text()))
        return results[name]

    return get


@pytest.mark.parametrize("name", JOB_CONFIGS)
def test_job_configs_fit(name: str, result) -> None:
    found = result(name)
    assert found["code"] == 0, found["out"] + found["err"]
    assert found["plan"]["fits"] and found["out"].rstrip().endswith("fits")
    for one in found["plan"]["components"].values():
        assert max(moment["bytes"] for moment in one["memory"]) == one["peak_bytes"] <= one["limit_bytes"]


@pytest.mark.parametrize("name", ["ppo_70b", "grpo_70b", "sft_70b", "dpo_70b", "online_dpo_70b"])
def test_llama_70b_is_counted_exactly(name: str, result) -> None:
    main = next(iter(result(name)["plan"]["components"].values()))
    assert main["parameters"] == 70_553_706_496
    # Norms are on every tensor-parallel rank: 2 of 8192 in each layer, and the last one.
    norms = (80 * 2 + 1) * 8192
    assert sum(main["parameters_per_rank"]) == (70_553_706_496 - norms) / 8 + norms


def test_gpt_175b_is_counted_exactly(result) -> None:
    # 174,604,259,328 parameters and 47 rows of vocabulary padding (50,257 to 50,304).
    assert result("ppo_175b")["plan"]["components"]["actor"]["parameters"] == 174_604_259_328 + 47 * 12288


def test_refused_because_the_heads_do_not_divide(result) -> None:
    found = result("tp128")
    assert found["code"] == 2
    assert found["err"].startswith("error: actor: parallel.tp=128: does not divide the model's num_attention_heads=64; allowed: 1, 2, 4, 8")


def test_refused_because_it_does_not_fit(result) -> None:
    found = result("one_gpu")
    assert found["code"] == 1 and not found["plan"]["fits"]
    reasons = found["plan"]["problems"]
    assert [reason.split(":")[0] for reason in reasons] == ["actor", "critic", "reward"]
    peak, limit = (found["plan"]["components"]["actor"][key] for key in ("peak_bytes", "limit_bytes"))
    assert f"{(peak - limit) / 2**30:.1f} GiB too much" in reasons[0]
    assert "parallel.tp=8 parallel.sequence_parallel=true" in reasons[0]
    assert "does not fit" in found["out"]


def test_long_context(result) -> None:
    found = result("long")
    assert found["code"] == 0, found["out"]
    assert {one["parallel"]["cp"] for one in found["plan"]["components"].values()} == {8}
    assert found["plan"]["components"]["actor"]["micro_batches"]["length"] == 126976 + 2048


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_model", "error: model.path='': a plan needs a model"),
        ("no_recipe", "error: there is no config 'pppo_70b': did you mean ppo_70b?"),
        ("too_long", "error: data.max_length=9000: longer than the model's context of 8192 tokens"),
    ],
)
def test_mistakes(name: str, text: str, result) -> None:
    assert result(name)["code"] == 2
    assert result(name)["err"].startswith(text)


def test_experts(result) -> None:
    assert result("experts")["plan"]["components"]["actor"]["parameters"] == 46_702_792_704


def test_search(result) -> None:
    found = result("search")
    plan, rows = found["plan"], found["plan"]["pareto"]
    assert found["code"] == 0 and plan["fits"] and plan["best"]["gpus"] <= plan["most_gpus"] == 8
    assert [row["gpus"] for row in rows] == sorted({row["gpus"] for row in rows}) and rows[-1]["step_seconds"] == plan["best"][
        "step_seconds"
    ]
    assert "num_processes=8" not in plan["best"]["settings"]  # it was typed
    assert "the best one, " in found["out"]
