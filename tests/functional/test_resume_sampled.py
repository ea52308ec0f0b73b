"""Recipes that sample what they learn from: killed with SIGKILL, or in two parts, they end with the same bits; and what they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import load_module
from resumed_runs import in_two_parts, kept, kill_when, killed_and_resumed
from training_jobs import (
    ROOT,
    SIZES,
    Job,
    checkpoint_steps,
    metrics_of,
    read_rows,
    run_job,
    series,
    slow_reward,
    tiny_settings,
    train,
    write_rows,
)

pytestmark = pytest.mark.timeout(600)


def test_spin_killed_at_several_points(task: Path) -> None:
    """Iterations of 40 of 48 prompts, twice in 20 steps; their responses in files of ten. Killed while it samples the first iteration, at
    the turn (as the policy becomes the reference, or answers the first prompts), and in the middle of the second."""
    data = write_rows(task / "sft.jsonl", ({"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(6)))
    settings = [
        *(*tiny_settings(task), f"data.train={data}", f"data.validation={data}", "data.max_length=16"),
        *("algorithm.batch_size=4", "algorithm.epochs_per_iteration=2", "algorithm.sampled_together=10"),
        *("algorithm.prompts_per_iteration=40", "loop.max_steps=50", "loop.save_every=7", "loop.validate_every=10"),
    ]
    whole, killed, _ = killed_and_resumed("spin", task, settings, lambda run: kept(run, "spin"), 20, 31, last=50)
    assert [len(list(folder.iterdir())) for folder in sorted((whole / "spin").iterdir())] == [4, 4, 4]  # 40 responses in parts of ten
    assert kept(killed, "spin") == kept(whole, "spin")
    assert checkpoint_steps(killed / "checkpoints" / "reference")[-1] == 40
    assert set(series(whole, "spin/iteration")) == {1.0, 2.0, 3.0}
    margins = series(whole, "preference/margin")
    assert all(abs(margins[step]) < 1e-6 for step in (0, 20, 40)) and margins[19] > 0.1  # at first the policy is its own reference


@pytest.mark.slow
def test_self_rewarding_killed_while_it_samples_judges_and_trains(task: Path) -> None:
    """Iterations of 24 of 64 prompts in six steps; responses and judgements in files of four prompts. The judge's template is one that the
    eighteen tokens of the model can say; its score is the last digit."""
    (task / "template.txt").write_text("{prompt}{response}=")
    settings = [
        *tiny_settings(task),
        *("algorithm.batch_size=4", "algorithm.prompts_per_iteration=24", "algorithm.sampled_together=4", "algorithm.group_size=3"),
        *("algorithm.num_judgements=2", "algorithm.max_judgement_length=6", "algorithm.drop_truncated=false"),
        *(f"algorithm.judge_template={task / 'template.txt'}", "algorithm.score_pattern='(\\d)'", "algorithm.highest_score=6"),
        *(slow_reward(task, 0.02), "loop.max_steps=15", "loop.save_every=4"),  # not what it learns from: reported beside its judge
        *(f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=8", "loop.validate_every=5"),
    ]
    kills = [
        lambda run, found=f: list((run / "self_rewarding").glob(f"{found}_*.json"))
        for f in ("iteration_0001*/responses", "iteration_0002*/judgements")
    ]
    whole, killed, output = killed_and_resumed("self_rewarding", task, settings, *kills, 14, last=15)
    assert "resumed after step 12" in output
    files = [sorted(path.name[:-5] for path in folder.iterdir()) for folder in sorted((whole / "self_rewarding").iterdir())]
    assert files == [[f"{stem}_{part:06d}" for stem in ("judgements", "responses") for part in range(6)]] * 3
    assert kept(killed, "self_rewarding") == kept(whole, "self_rewarding")
    assert checkpoint_steps(killed / "checkpoints" / "reference")[-1] == 12
    assert min(series(whole, "preference/loss")) > 0
    first = metrics_of(whole)[0].values  # of the step that begins the first iteration
    assert first["judge/judgements"] == 144 and 0 < first["judge/unparsed"] < 144
    assert 0 <= first["rollout/reward"] <= 6 and 0 <= first["judge/reward"] <= 1 and first["pairs/count"] > 4


def test_a_rule_in_the_judges_place_is_learnt(task: Path) -> None:
    """Iterative DPO: the more sevens the better. Each iteration's own samples are better than those before."""
    run = task / "rule"
    settings = [
        *tiny_settings(task),
        *("algorithm.judge=reward", slow_reward(task, 0.0), "algorithm.batch_size=16", "algorithm.epochs_per_iteration=2"),
        *("algorithm.drop_truncated=false", "loop.max_steps=17", "run.export_hf=false"),
    ]
    run_job(train("self_rewarding"), run, settings)
    rewards = [line.values["rollout/reward"] for line in metrics_of(run) if "rollout/reward" in line.values]
    assert len(rewards) == 3  # of eight steps each
    assert rewards[2] > rewards[1] + 0.1 > rewards[0] + 0.2


SIZES_OF_A_STEP = ("algorithm.prompts_per_step=24", "algorithm.mini_batch_size=8")  # of 64: step 3 straddles epochs


def test_online_dpo_in_two_parts(task: Path) -> None:
    """The reference is the policy after step 2 from step 3 on: the resumed run reads it from its own checkpoint."""
    own = ("algorithm.group_size=4", "algorithm.num_epochs=2", "algorithm.reference_every=2", slow_reward(task, 0.0))
    _, run, _ = in_two_parts("online_dpo", task, [*tiny_settings(task), *own, *SIZES_OF_A_STEP], first=3, last=4)
    assert max(series(run, "rollout/logprob_gap")) < 1e-4
    assert checkpoint_steps(run / "checkpoints" / "reference") == [2]
    assert not (run / "checkpoints" / "reference" / "step_000002" / "optimizer").exists()
    assert min(series(run, "pairs/count")) > 0 and min(series(run, "pairs/ref_kl")) > 0


def test_rejection_sampling_keeps_the_best(task: Path) -> None:
    run, own = task / "rejection_sampling", ("algorithm.require_spread=true", slow_reward(task, 0.0), "loop.max_steps=3")
    run_job(train("rejection_sampling"), run, [*tiny_settings(task), *own, *SIZES_OF_A_STEP])
    assert max(series(run, "rollout/logprob_gap")) < 1e-4
    assert all(one > other for one, other in zip(series(run, "kept/reward"), series(run, "rollout/reward"), strict=True))
    assert all(0 < fraction <= 1 / 8 for fraction in series(run, "kept/fraction"))


def constitution_settings(folder: Path) -> list[str]:
    """On a model with a token per printable character and a judge of the same shape with other weights. Random weights write random
    letters, of which a quarter ends a response."""
    module = load_module(ROOT / "tests" / "unit" / "data" / "conftest.py", "character_tokenizer")
    module.write_tokenizer(folder / "tokenizer", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    model = [
        *(f"model.tokenizer={folder / 'tokenizer'}", *SIZES, "model.architecture.max_position_embeddings=340"),
        *("model.make_vocab_divisible_by=1", "model.micro_batch_size=16", "logging.tensorboard=false", "logging.progress=plain"),
    ]
    data = write_rows(folder / "sft.jsonl", [{"prompt": "a", "response": "b"}])
    one = ["run.seed=3", "loop.max_steps=1", "algorithm.batch_size=1", "data.max_length=40", f"data.train={data}"]
    run_job(train("sft"), folder / "judge", [*model, *one])
    prompts = write_rows(folder / "prompts.jsonl", ({"prompt": f"q {letter}"} for letter in "abcdefghijkl"))
    asks = {"critique_request": "?", "revision_request": "Mend.", "question": "Better?"}
    principles = {"principles": [{"name": name, **asks} for name in ("one", "two")]}
    (folder / "constitution.json").write_text(json.dumps(principles))
    return [
        *(*model, f"judge.path={folder / 'judge' / 'export'}", f"data.train={prompts}"),
        *(f"data.constitution={folder / 'constitution.json'}", "algorithm.pairs=sampled", "algorithm.part_size=3"),
        *("data.max_prompt_length=40", "data.max_history_length=300", "rollout.sampling.max_response_length=30"),
        f"rollout.sampling.stop_token_ids=[{','.join(map(str, range(30, 55)))}]",
    ]


def test_constitutional_ai_killed_on_the_way(tmp_path: Path) -> None:
    """Every file is the same in the end."""
    whole, killed, settings = tmp_path / "whole", tmp_path / "killed", constitution_settings(tmp_path)
    command = train("constitution")
    output = run_job(command, whole, settings)
    with Job(command, killed, settings) as job:
        kill_when(job, (killed / "written" / "parts" / "part_000001.jsonl").exists)
    assert not (killed / "written" / "records.jsonl").exists()
    assert "resumed after step" in run_job(command, killed, settings)
    files = [{str(path.relative_to(run)): path.read_bytes() for path in (run / "written").rglob("*.json*")} for run in (killed, whole)]
    assert files[0] == files[1]

    supervised, pairs = (read_rows(whole / "written" / name) for name in ("records.jsonl", "preferences.jsonl"))
    report = json.loads((whole / "written" / "report.json").read_text())
    assert report["records"] == {"traces.jsonl": 12, "records.jsonl": len(supervised), "preferences.jsonl": len(pairs)}
    assert 0 < len(supervised) < 12 and 0 < len(pairs) < 12 and f"{len(pairs)} preferences.jsonl" in output
    assert sum(count for name, count in report["not used"].items() if "comparison" not in name) == 12 - len(supervised)
    assert {name for record in supervised for name in record["principles"]} == {"one", "two"}
    assert all(0.5 < record["probability"] < 1 and record["chosen"] != record["rejected"] for record in pairs)
