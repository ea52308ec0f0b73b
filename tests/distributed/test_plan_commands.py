"""`aligner plan` as it is typed: every job config, refusals and their reasons, long contexts, components that share GPUs, the search."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from aligner import cli
from aligner.algorithms.registry import recipes
from aligner.files import configs
from aligner.planner import dry_run
from aligner.planner.estimate import Scales

JOB_CONFIGS = [name for name in configs() if name not in recipes()]
SMALL = [f"model.architecture.{size}" for size in ("num_layers=8", "hidden_size=1024", "vocab_size=32000", "max_position_embeddings=1024")]
OFFLOAD, PPO_8B = ("rollout.offload=true", "optimizer.offload=true", "critic.optimizer.offload=true"), ("ppo_8b", "num_processes=8")
LONG = ("model.seq_length=131072", "data.max_prompt_length=126976", "rollout.max_batch_size=4", "model.recompute=full")
COMMANDS = {
    **{name: [name] for name in JOB_CONFIGS},
    "grpo_gsm8k_tiny": ["grpo_gsm8k_tiny", *SMALL],  # it takes any small model
    "tp128": ["ppo_70b", "parallel.tp=128", "parallel.pp=1"],
    "one_gpu": ["ppo_70b", "parallel.tp=1", "parallel.sequence_parallel=false", "parallel.pp=1"],
    "long": ["ppo_70b", "parallel.cp=8", *LONG],
    "no_model": ["sft"],
    "no_recipe": ["pppo_70b"],
    "too_long": ["sft_70b", "data.max_length=9000"],
    "experts": ["grpo_70b", "model=mixtral_8x7b", "parallel.ep=4"],
    "apart": [*PPO_8B, *OFFLOAD],
    "together": [*PPO_8B, "placement=colocated", "cluster.host_memory_gib=300"],
    "critic_with_reward": [*PPO_8B, *OFFLOAD[:2], "critic.with_reward=true"],
    "search": ["sft", *SMALL, "+cluster=dgx_h100", "num_processes=8", "--search", "--top", "3"],
}


def weigh_once() -> None:
    """What one command has built and weighed the next one need not: most are of the same model."""
    known: dict[str, dict] = {}
    begin, build = Scales.__init__, dry_run.shard_parameters

    def begin_knowing(self: Scales, device) -> None:
        begin(self, device)
        self._known = known.setdefault(device.value, {})

    def build_once(component, stage: int):
        key = repr((component.architecture, component.head, component.model, component.parallel, stage))
        return built[key] if key in built else built.setdefault(key, build(component, stage))

    built: dict[str, list] = {}
    Scales.__init__, dry_run.shard_parameters = begin_knowing, build_once


def run(commands: dict[str, list[str]], folder: Path) -> dict[str, dict]:
    """What each `aligner plan` command printed and returned."""
    weigh_once()
    results = {}
    for name, arguments in commands.items():
        out, err, report = io.StringIO(), io.StringIO(), folder / f"{name}.json"
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["plan", *arguments, "--json", str(report)])
        plan = json.loads(report.read_text()) if report.exists() else None
        results[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "plan": plan}
    return results


@pytest.fixture(scope="module")
def results(on_ranks, tmp_path_factory) -> dict[str, dict]:
    """Exit code, output and JSON of the commands; they all run in one process."""
    return on_ranks(run, 1, COMMANDS, tmp_path_factory.mktemp("plans"), timeout=480)[0]


@pytest.mark.parametrize("name", JOB_CONFIGS)
def test_job_configs_fit(name: str, results) -> None:
    found = results[name]
    assert found["code"] == 0, found["out"] + found["err"]
    assert found["plan"]["fits"] and found["out"].rstrip().endswith("fits")
    for one in found["plan"]["components"].values():
        assert max(moment["bytes"] for moment in one["memory"]) == one["peak_bytes"] <= one["limit_bytes"]


def test_models_are_counted_exactly(results) -> None:
    counted = dict.fromkeys(("ppo_70b", "grpo_70b", "sft_70b", "dpo_70b", "online_dpo_70b"), 70_553_706_496)
    counted |= {"ppo_175b": 174_604_259_328 + 47 * 12288, "experts": 46_702_792_704}  # 47 rows pad the vocabulary of 50,257
    for name, count in counted.items():
        main = next(iter(results[name]["plan"]["components"].values()))
        assert main["parameters"] == count, name
        if name.endswith("_70b"):  # norms are on every tensor-parallel rank: 2 of 8192 in each layer, and the last one
            norms = (80 * 2 + 1) * 8192
            assert sum(main["parameters_per_rank"]) == (count - norms) / 8 + norms, name


def test_refused_because_it_does_not_fit(results) -> None:
    found = results["one_gpu"]
    assert found["code"] == 1 and not found["plan"]["fits"]
    reasons = found["plan"]["problems"]
    assert [reason.split(":")[0] for reason in reasons] == ["actor", "critic", "reward"]
    peak, limit = (found["plan"]["components"]["actor"][key] for key in ("peak_bytes", "limit_bytes"))
    assert f"{(peak - limit) / 2**30:.1f} GiB too much" in reasons[0]
    assert "parallel.tp=8 parallel.sequence_parallel=true" in reasons[0]
    assert "does not fit" in found["out"]


def test_long_context(results) -> None:
    found = results["long"]
    assert found["code"] == 0, found["out"]
    assert {one["parallel"]["cp"] for one in found["plan"]["components"].values()} == {8}
    assert found["plan"]["components"]["actor"]["micro_batches"]["length"] == 126976 + 2048


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_model", "error: model.path='': a plan needs a model"),
        ("no_recipe", "error: there is no config 'pppo_70b': did you mean ppo_70b?"),
        ("too_long", "error: data.max_length=9000: longer than the model's context of 8192 tokens"),
        ("tp128", "error: actor: parallel.tp=128: does not divide the model's num_attention_heads=64; allowed: 1, 2, 4, 8"),
    ],
)
def test_mistakes(name: str, text: str, results) -> None:
    assert results[name]["code"] == 2
    assert results[name]["err"].startswith(text)


def test_search(results) -> None:
    found = results["search"]
    plan, rows = found["plan"], found["plan"]["pareto"]
    assert found["code"] == 0 and plan["fits"] and plan["best"]["gpus"] <= plan["most_gpus"] == 8
    assert [row["gpus"] for row in rows] == sorted({row["gpus"] for row in rows})
    assert rows[-1]["step_seconds"] == plan["best"]["step_seconds"]
    assert "num_processes=8" not in plan["best"]["settings"]  # it was typed
    assert "the best one, " in found["out"]


def peaks(job: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Bytes of every phase, by component and phase; there is one pipeline stage."""
    return {(name, moment["phase"]): moment["bytes"] for name, one in job["components"].items() for moment in one["memory"]}


def seconds(job: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, phase): time for name, one in job["components"].items() for phase, time in one["seconds"].items()}


def test_components_that_take_turns(results) -> None:
    """Memory is the largest phase's and not their sum: of the others there are the processes' own parts alone on the device."""
    apart, together = results["apart"]["plan"], results["together"]["plan"]
    context = apart["components"]["actor"]["memory"][0]["parts"]["context and communicators"]  # alike: so are the layouts
    assert peaks(together) == {phase: size + 2 * context for phase, size in peaks(apart).items()}
    turns = {key: time["parts"]["turns on the GPUs"] for key, time in seconds(together).items() if "turns on the GPUs" in time["parts"]}
    assert turns.keys() == {("actor", "generate"), ("actor", "train"), ("critic", "values"), ("critic", "train"), ("reward", "scores")}
    reward, critic = (together["components"][name]["state_bytes"][0] for name in ("reward", "critic"))
    pcie = together["cluster"]["host_gb_per_second"] * 1e9 * together["cluster"]["achievable_link"]
    assert turns["reward", "scores"] == pytest.approx(2 * reward["weights"] / pcie)
    assert turns["critic", "train"] == pytest.approx(2 * (critic["weights"] + critic["optimizer"]) / pcie)
    phases = sum(time["total"] for time in seconds(together).values())
    assert together["step_seconds"] == pytest.approx(together["step_phases"]["host work"] + phases)
    assert "8 GPUs, on which the components take turns" in results["together"]["out"] and "24 ranks" in results["apart"]["out"]
    waiting = "weights (while others have the GPUs)"
    for name, one in together["components"].items():
        assert one["host_bytes"][waiting] == 8 * one["state_bytes"][0]["weights"] and waiting not in apart["components"][name]["host_bytes"]
    host = sum(size for one in together["components"].values() for size in one["host_bytes"].values())
    (problem,) = together["problems"]
    assert problem.startswith(f"all components together: the host memory of a node needs {host / 2**30:.1f} GiB of 300")


def test_a_critic_with_the_reward(results) -> None:
    """The two models lie beside each other; the one that waits has its weights there, and the critic its training state."""
    apart, both = results["apart"]["plan"], results["critic_with_reward"]["plan"]
    critic, reward = (both["components"][name]["state_bytes"][0] for name in ("critic", "reward"))
    state = critic["gradients"] + critic["optimizer"]  # offloaded between training phases in the other plan
    grown = {key: size - peaks(apart)[key] for key, size in peaks(both).items()}
    assert grown["critic", "train"] == reward["weights"]
    assert grown["critic", "values"] == pytest.approx(reward["weights"] + state, rel=0.05)  # and what the allocator loses between blocks
    assert grown["reward", "scores"] == critic["weights"] + state
    assert grown["actor", "train"] == 0
    said = results["critic_with_reward"]["out"]
    assert "reward in the processes of the critic" in said and "16 ranks" in said
    times = seconds(both)
    scoring = times["critic", "values"]["total"] + times["reward", "scores"]["total"]
    others = times["actor", "logprobs"]["total"] + times["actor", "ref_logprobs"]["total"]
    training = max(times["actor", "train"]["total"], times["critic", "train"]["total"])
    # What has been sampled is scored while the rest is; the last batch of responses, all as long as they may be, ends at once.
    sampling, waiting = both["step_phases"]["host work"] + times["actor", "generate"]["total"], both["step_phases"]["waiting for scores"]
    assert 0 < waiting < scoring
    assert both["step_seconds"] == pytest.approx(sampling + waiting + others + training)


SEARCHED = [f"model.architecture.{size}" for size in ("num_layers=4", "hidden_size=512", "vocab_size=8000", "max_position_embeddings=512")]
SEARCHED += ["+cluster=dgx_h100", "data.max_prompt_length=128", "rollout.sampling.max_response_length=128", "algorithm.prompts_per_step=8"]
SEARCHED += ["parallel.vpp=1", "parallel.cp=1", "optimizer.offload=false", "rollout.offload=false", "rollout.asynchronous.max_staleness=0"]
SEARCHED += ["algorithm.mini_batch_size=64", "plan.response_length=60", "model.recompute=none"]


def searches(folder: Path) -> list[int]:
    """Exit codes: of a search, of a plan of what it wrote, and of two that find nothing."""
    command = ["plan", "grpo", *SEARCHED, "--search", "--gpus"]
    commands = [
        [*command, "4", "--write", str(folder), "--steps", "20", "--json", str(folder / "s.json")],
        ["plan", "grpo_4_gpus", "--config-dir", str(folder), "--json", str(folder / "again.json")],
        [*command, "7"],
        [*command, "4", "--steps", "1000000", "--deadline", "1m"],
    ]
    return [cli.main(one) for one in commands]


@pytest.mark.slow
def test_what_a_search_writes_plans_the_same(on_ranks, tmp_path: Path):
    """That nothing is faster is in test_planner_job_search.py."""
    assert on_ranks(searches, 1, tmp_path, timeout=400) == [[0, 0, 2, 1]]
    written, again = (json.loads((tmp_path / name).read_text()) for name in ("s.json", "again.json"))
    best = written["best"]
    assert best["gpus"] <= 4 and best["hours"] == pytest.approx(best["step_seconds"] * 20 / 3600)
    # The written config plans the same figures, and its script starts as many ranks.
    assert again["step_seconds"] == pytest.approx(best["step_seconds"]) and again["fits"]
    assert again["components"]["actor"]["ranks"] == best["gpus"]
    script = (tmp_path / "grpo_4_gpus.sub").read_text()
    assert "#SBATCH" in script and "grpo_4_gpus" in script
    fronts = [row["step_seconds"] for row in written["pareto"]]
    assert fronts == sorted(fronts, reverse=True)
