"""`aligner migrate` on published commands and configs of six projects (published/migrate.yaml: keys and values, and where they stand)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.commands.migrate.command import OTHER, migrate, report
from aligner.commands.migrate.engine import Migration, migrate as migrated
from aligner.commands.migrate.reading import Source, read
from aligner.commands.migrate.transforms import Kind
from aligner.commands.parts import MigrateOptions
from aligner.errors import ConfigError

ALL: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "published" / "migrate.yaml").read_text())
CASES = [case if index % 3 == 0 else pytest.param(case, marks=pytest.mark.slow) for index, case in enumerate(ALL)]


def name(case: dict[str, Any]) -> str:
    return case["from"].rpartition(": ")[2]


def source(case: dict[str, Any], folder: Path) -> Source:
    """Of a file that is called as the published one, whose path may say which step it is."""
    suffix = ".yaml" if "file" in case else ".sh"
    path = folder / f"{name(case).replace('/', '_').removesuffix(suffix)}{suffix}"
    path.write_text(yaml.safe_dump(case["file"]) if "file" in case else f"#!/bin/bash\n{case['command']}\n")
    return read(str(path))


def of(text: str, trains: str = "") -> Migration:
    return migrated(read(text, trains=trains), examples=640)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_key_has_a_row_and_the_recipe_takes_what_follows(case: dict[str, Any], tmp_path: Path) -> None:
    given = source(case, tmp_path)
    found = migrated(given)
    assert [row.key for row in found.rows if row.kind is Kind.unknown] == []
    assert not found.is_refused, found.open_questions[0]
    text = report(found)
    for key in (*given.given, *given.launcher):
        (row,) = (row for row in found.rows if row.key == key)
        assert key in text and (row.note or row.settings or row.kind in (Kind.same, Kind.mapped))


def test_sizes_of_nemo_aligner(tmp_path: Path) -> None:
    """The actor's script and its critic's are one run; the decay ends 20 of 80 optimizer steps before the end."""
    script = tmp_path / "ppo.sh"
    actor = "model.global_batch_size=64 model.ppo.num_rollout_samples=512 trainer.ppo.max_steps=10 model.optim.sched.constant_steps=20"
    script.write_text(
        "python serve_ppo_critic.py trainer.num_nodes=2 ++model.tensor_model_parallel_size=8 "
        "pretrained_checkpoint.restore_from_path=rm.nemo\n"
        f"python train_gpt_ppo_actor.py trainer.num_nodes=4 {actor} pretrained_checkpoint.restore_from_path=sft.nemo\n"
    )
    found = of(str(script)).settings
    wanted = {"num_processes": 32, "critic.num_processes": 16, "critic.parallel.tp": 8, "optimizer.decay_steps": 60, "loop.max_steps": 10}
    assert wanted.items() <= found.items()
    assert found["model.path"] == "sft.nemo" and found["critic.model.path"] == found["reward.model.path"] == "rm.nemo"


def test_variables_that_nobody_fills_in(tmp_path: Path) -> None:
    """A path keeps its variable, for the shell or, in a file, for OmegaConf; a number is asked for."""
    text = "trl sft --model_name_or_path ${MODEL} --dataset_name d.jsonl --learning_rate $LR"
    found = migrated(read(text))
    assert "\"model.path='${MODEL}'\"" in report(found) and "learning_rate=${LR} is not filled in: taken as 2e-05" in report(found)
    assert migrate([text], MigrateOptions(output=tmp_path / "mine.yaml")) == OTHER
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"]["path"] == "${oc.env:MODEL}"


OPENRLHF = "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset a.jsonl,b.jsonl"
LLAMA_FACTORY = "llamafactory-cli train --model_name_or_path m --stage sft --dataset a.jsonl,b.jsonl"
WEIGHTED = [{"path": "a.jsonl", "weight": 0.3}, {"path": "b.jsonl", "weight": 0.7}]


@pytest.mark.parametrize(
    ("text", "train"),
    [
        (f"{OPENRLHF} --dataset_probs 0.3,0.7", WEIGHTED),
        (OPENRLHF, ["a.jsonl", "b.jsonl"]),
        ("python train_gpt_dpo.py restore_from_path=m 'model.data.data_prefix={train: [0.3, a.jsonl, 0.7, b.jsonl]}'", WEIGHTED),
        (f"{LLAMA_FACTORY} --mix_strategy interleave_over --interleave_probs 0.3,0.7", WEIGHTED),
        (f"{LLAMA_FACTORY} --interleave_probs 0.3,0.7", ["a.jsonl", "b.jsonl"]),
        (
            "python3 -m verl.trainer.main_ppo 'data.train_files=[$HOME/a/x.parquet, $HOME/b/x.parquet]' actor_rollout_ref.model.path=m",
            ["${HOME}/a/x.parquet", "${HOME}/b/x.parquet"],
        ),
    ],
)
def test_several_data_sets_are_a_mixture(text: str, train: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert of(text).settings["data.train"] == train
    migrate([text], MigrateOptions(output=tmp_path / "mine.yaml"))
    written = yaml.safe_load((tmp_path / "mine.yaml").read_text())["data"]["train"]
    assert written == [one.replace("${HOME}", "${oc.env:HOME}") if isinstance(one, str) else one for one in train]


def test_a_file_whose_keys_do_not_say_what_it_trains(tmp_path: Path) -> None:
    """Where that is said, the framework is the one that knows all keys."""
    path = tmp_path / "mine.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d.jsonl\nlearning_rate: 1.0e-4\n")
    assert read(str(path), trains="dpo").table.name == "TRL"
    path.write_text("model_name_or_path: m\nlearning_rate: 1.0e-4\nsomething: 1\n")
    with pytest.raises(ConfigError, match="mine.yaml: .* pass --from "):
        read(str(path), trains="dpo")


def test_what_the_recipe_refuses_is_shown_with_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1 data.train_files=a.parquet actor_rollout_ref.model.path=m"
    assert migrate([f"python -m verl.trainer.main_ppo {words}"], MigrateOptions()) == OTHER
    said = capsys.readouterr().out
    assert "the recipe grpo refuses it as it is: algorithm.group_size=1: a group needs at least 2" in said and "Mapped" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere/config.yaml", "nowhere/config.yaml: there is no such file"),
        ("ls -l", "no command of DeepSpeed-Chat, LLaMA-Factory, NeMo-Aligner, OpenRLHF, TRL, verl in it"),
        (
            "python serve_ppo_critic.py trainer.devices=8",
            "NeMo-Aligner critic: a part of a run; give the file or the command of its actor with it",
        ),
        ("deepspeed main.py --model_name_or_path m --deepspeed", r"pass --trains .*dpo.* \(of DeepSpeed-Chat\)"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrated(read(text))


# keys whose meaning only the other project's code has; numbers are worked out by hand

LLAMA = "llamafactory-cli train --model_name_or_path m --dataset d"
DEEPSPEED_CHAT = "deepspeed --num_gpus 2 main.py --model_name_or_path m --data_path d.jsonl"
PPO = "deepspeed --num_gpus 2 main.py --actor_model_name_or_path a --critic_model_name_or_path c --data_path d.jsonl"
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
)


@pytest.mark.parametrize(
    ("text", "trains", "wanted"),
    [
        # -log sigma(beta * (difference - gamma / beta)), so gamma is ours
        (
            f"{LLAMA} --stage dpo --pref_loss simpo --pref_beta 2.0 --simpo_gamma 1.5",
            "",
            {"algorithm.beta": 2.0, "algorithm.gamma": 1.5},
        ),
        # alpha is twice the rank; long examples are cut
        (f"{LLAMA} --stage sft --lora_rank 16", "", {"model.lora.rank": 16, "model.lora.alpha": 32, "data.overlong": "truncate"}),
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
        # 64 prompts of 5 responses are updates of 320 responses; two epochs of 640 prompts are four steps
        (
            "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo"
            " data.train_batch_size=256 actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64"
            " trainer.total_epochs=2",
            "",
            {"algorithm.prompts_per_step": 256, "algorithm.group_size": 5, "algorithm.mini_batch_size": 320, "loop.max_steps": 4}
            | {"num_processes": 8},
        ),
        # 4 rows a device, 8 accumulated, on 2 ranks: 64 an update; 3 epochs of 640 are 30 steps, of which a tenth warms up
        (
            "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path m --dataset_name d.jsonl"
            " --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --warmup_ratio 0.1",
            "",
            {"algorithm.batch_size": 64, "loop.max_steps": 30, "optimizer.warmup_steps": 3, "num_processes": 2},
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
        # 8-bit moments by each of transformers' names
        (
            "trl sft --model_name_or_path m --dataset_name d.jsonl --optim paged_adamw_8bit",
            "",
            {"optimizer.kind": "adam8bit"},
        ),
        # weights outside of the bounds are 0, and the others are multiplied
        (
            "trl grpo --model_name_or_path m --dataset_name d.jsonl --use_vllm --vllm_importance_sampling_mode token_mask"
            " --vllm_importance_sampling_clip_max 4 --vllm_importance_sampling_clip_min 0.25",
            "",
            {"algorithm.correction.kind": "icepop", "algorithm.correction.high": 4, "algorithm.correction.low": 0.25},
        ),
    ],
    ids=["simpo", "alpha", "adapters", "accumulated", "verl", "trl", "warmup", "peft", "adam8bit", "masked"],
)
def test_meanings_of_the_code(text: str, trains: str, wanted: dict[str, Any]) -> None:
    found = of(text, trains).settings
    assert {key: found.get(key) for key in wanted} == wanted


def test_keys_that_are_unknown_and_keys_of_another_kind_of_training() -> None:
    found = of("trl sft --model_name_or_path m --dataset_name d.jsonl --lerning_rate 1")
    (row,) = (row for row in found.rows if row.kind is Kind.unknown)
    assert row.key == "lerning_rate" and "not a key of TRL that is known here" in row.note
    rows = {row.key: row for row in of(f"{LLAMA} --stage sft --pref_beta 0.1 --ppo_epochs 2").rows}
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
        f"{LLAMA} --stage sft --eval_strategy steps --eval_steps 10 --val_size 0.1",
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
