"""What `aligner migrate` says of keys whose meaning only the other project's code has. Numbers are worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aligner.commands.migrate.engine import Migration
from aligner.commands.migrate.engine import migrate as migrated
from aligner.commands.migrate.reading import read
from aligner.commands.migrate.transforms import Kind

LLAMA_FACTORY = "llamafactory-cli train --model_name_or_path m --dataset d"
DEEPSPEED_CHAT = "deepspeed --num_gpus 2 main.py --model_name_or_path m --data_path d.jsonl"
PPO = "deepspeed --num_gpus 2 main.py --actor_model_name_or_path a --critic_model_name_or_path c --data_path d.jsonl"
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
)


def of(text: str, trains: str = "") -> Migration:
    return migrated(read(text, trains=trains), examples=640)


@pytest.mark.parametrize(
    ("text", "trains", "wanted"),
    [
        # -log sigma(beta * (difference - gamma / beta)), so gamma is ours
        (
            f"{LLAMA_FACTORY} --stage dpo --pref_loss simpo --pref_beta 2.0 --simpo_gamma 1.5",
            "",
            {"algorithm.beta": 2.0, "algorithm.gamma": 1.5},
        ),
        # alpha is twice the rank; long examples are cut
        (f"{LLAMA_FACTORY} --stage sft --lora_rank 16", "", {"model.lora.rank": 16, "model.lora.alpha": 32, "data.overlong": "truncate"}),
        # adapters are scaled by 1 / rank, and have a learning rate of their own
        (
            f"{DEEPSPEED_CHAT} --lora_dim 128 --learning_rate 0.01",
            "sft",
            {"model.lora.rank": 128, "model.lora.alpha": 1.0, "optimizer.lr": 5e-4, "data.learn": "everything", "model.dtype": "float16"},
        ),
        # gradients of four rounds of 2 * 2 responses are one update: a step has all 16, and an epoch of 640 prompts 40 steps
        (
            f"{PPO} --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --gradient_accumulation_steps 4",
            "",
            {"algorithm.rollouts_per_step": 16, "algorithm.mini_batch_size": 16, "loop.max_steps": 40, "algorithm.shaping.clip_low": -5.0},
        ),
        # its schedulers step after each training step, which has 256 / 64 updates, twice
        (
            f"{VERL} data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=2"
            " actor_rollout_ref.actor.optim.lr_warmup_steps=3",
            "",
            {"optimizer.warmup_steps": 24, "optimizer.decay": "constant"},
        ),
        # PEFT's own choice of layers where none are named
        ("trl sft --model_name_or_path m --dataset_name d.jsonl --use_peft", "", {"model.lora.rank": 16, "model.lora.targets": ["q", "v"]}),
        # weights outside of the bounds are 0, and the others are multiplied
        (
            "trl grpo --model_name_or_path m --dataset_name d.jsonl --use_vllm --vllm_importance_sampling_mode token_mask"
            " --vllm_importance_sampling_clip_max 4 --vllm_importance_sampling_clip_min 0.25",
            "",
            {"algorithm.correction.kind": "icepop", "algorithm.correction.high": 4, "algorithm.correction.low": 0.25},
        ),
    ],
    ids=["simpo", "alpha", "adapters", "accumulated", "warmup", "peft", "masked"],
)
def test_meanings_of_the_code(text: str, trains: str, wanted: dict[str, Any]) -> None:
    found = of(text, trains).settings
    assert {key: found.get(key) for key in wanted} == wanted


def test_a_key_of_another_kind_of_training_is_not_unknown() -> None:
    rows = {row.key: row for row in of(f"{LLAMA_FACTORY} --stage sft --pref_beta 0.1 --ppo_epochs 2").rows}
    assert rows["pref_beta"].kind is Kind.same and "of dpo, kto" in rows["pref_beta"].note
    assert rows["ppo_epochs"].kind is Kind.same and rows["ppo_epochs"].settings == {}


def test_records_of_messages_are_learnt_whole_by_trl() -> None:
    text = "trl sft --model_name_or_path m --dataset_name d.jsonl"
    assert any(row.key == "(what is learnt)" and row.kind is Kind.another for row in of(text).defaults)
    assert not any(row.key == "(what is learnt)" for row in of(f"{text} --completion_only_loss false").defaults)


def test_arguments_that_a_script_was_not_given(tmp_path: Path) -> None:
    """The default counts; a path that stays empty is asked for."""
    script = tmp_path / "step3_run.sh"
    script.write_text(
        'OUT=$1\nACTOR=\nif [ "$OUT" == "" ]; then\n  OUT=./output\nfi\n'
        "deepspeed --num_gpus 1 main.py --actor_model_name_or_path $ACTOR --critic_model_name_or_path c --output_dir $OUT\n"
    )
    found = of(str(script))
    assert found.settings["run.directory"] == "./output" and "model.path" not in found.settings
    assert "actor_model_name_or_path has no value" in found.open_questions


@pytest.mark.parametrize(
    "text",
    [
        "trl sft --model_name_or_path m --dataset_name d.jsonl --eval_strategy steps --eval_steps 10",
        f"{LLAMA_FACTORY} --stage sft --eval_strategy steps --eval_steps 10 --val_size 0.1",
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 trainer.test_freq=10",
    ],
)
def test_validations_without_data_are_left_out_and_asked_for(text: str) -> None:
    found = of(text)
    assert not found.is_refused and not {"loop.validate_every", "loop.validate_first"} & found.settings.keys()
    assert "loop.validate_every=10 is left out: no data to validate on were named (data.validation)" in found.open_questions


def test_reward_functions_of_trl() -> None:
    """An importable function in TRL's form is ours too; several have names and weights."""
    text = "trl grpo --model_name_or_path m --dataset_name d.jsonl --reward_funcs"
    assert of(f"{text} mine.rewards.short").settings["reward.function.path"] == "mine.rewards:short"
    several = of(f"{text} accuracy_reward mine.rewards.short --reward_weights 1.0 0.5").settings["reward.functions"]
    assert several["short"] == {"path": "mine.rewards:short", "weight": 0.5} and several["accuracy_reward"]["weight"] == 1.0
    assert any("unheard_of" in question for question in of(f"{text} unheard_of").open_questions)
