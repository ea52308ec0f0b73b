"""`aligner migrate` on scripts and configs in the form of published ones: what once came out wrong, and the plan of each."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from aligner.commands.migrate.command import OTHER, command_line, migrate, report
from aligner.commands.migrate.engine import Migration, Severity, migrate as migrated, replaced
from aligner.commands.migrate.reading import read
from aligner.commands.parts import MigrateOptions
from aligner.commands.plan import command as plan
from aligner.errors import AlignerError, ConfigError
from aligner.settings.command_line import override

PUBLISHED: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "published" / "migrate.yaml").read_text())
VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m"
GRPO = f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
VERL_PPO = f"{VERL} algorithm.adv_estimator=gae critic.model.path=m trainer.n_gpus_per_node=8 trainer.nnodes=1"
VERL_SFT = "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet model.partial_pretrain=m"
OPENRLHF_PPO = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d.jsonl --data.label_key label"
OPENRLHF_PPO += " --actor.num_gpus_per_node 4 --critic.num_gpus_per_node 4 --reward.num_gpus_per_node 4"
OPENRLHF_GRPO = f"{OPENRLHF_PPO} --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"
OPENRLHF_SFT = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d.jsonl"
LLAMA = {"stage": "sft", "model_name_or_path": "m", "finetuning_type": "lora", "template": "default", "dataset": "d.jsonl", "max_steps": 2}
LLAMA_SFT = "llamafactory-cli train --stage sft --dataset d.jsonl --max_steps 2 --model_name_or_path"
TRL = "--model_name_or_path m --dataset_name d.jsonl --max_steps 10 --per_device_train_batch_size 1"
SCRIPTS = {
    "verl ppo": VERL_PPO,
    "verl ppo with a reward model": f"{VERL_PPO} reward_model.enable=True reward_model.model.path=rm",
    "verl grpo": f"{GRPO} custom_reward_function.path=mine.py",
    "verl sft": f"{VERL_SFT} data.prompt_key=extra_info +data.prompt_dict_keys=['question'] data.response_key=extra_info",
    "openrlhf ppo": f"{OPENRLHF_PPO} --reward.model_name_or_path rm",
    "openrlhf grpo": f"{OPENRLHF_GRPO} --reward.model_name_or_path rm",
    "openrlhf sft": OPENRLHF_SFT,
    "trl ppo": f"accelerate launch --num_processes 8 examples/scripts/ppo/ppo.py {TRL} --total_episodes 1000 --reward_model_path rm",
    "trl grpo": f"accelerate launch --num_processes 8 trl/scripts/grpo.py {TRL} --reward_model_name_or_path rm",
    "deepspeed-chat ppo": "deepspeed --num_gpus 8 main.py --actor_model_name_or_path a --critic_model_name_or_path c --data_path d.jsonl",
}


def of(text: str, *, examples: int = 640, ranks: int = 0) -> Migration:
    return migrated(read(text), examples=examples, ranks=ranks)


def of_llama(folder: Path, **keys: Any) -> Migration:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(LLAMA | keys))
    return of(str(file), ranks=2)


def changed(found: Migration) -> set[str]:
    """Keys that change the result."""
    return {row.key for row in (*found.rows, *found.defaults) if row.severity is Severity.result}


# every command is composed, and planned


def loaded(found: Migration) -> Any:
    """The config of the command, with the sizes of a published model instead of files that are not here. Raises AlignerError if it is
    refused."""
    models = {key: value for key, value in found.settings.items() if re.fullmatch(r"((critic|reward)\.)?model\.(path|tokenizer)", key)}
    name = str(models.get("model.path"))
    sizes = (
        "qwen3_30b_a3b"
        if re.search(r"(?i)a3b|30b|8x7b|qwen3-moe", name)
        else "llama3_70b"
        if re.search(r"(?i)[67][0-9]b", name)
        else "llama3_8b"
    )
    own = [override(key, replaced(value, "{}")) for key, value in found.settings.items() if key not in models]
    lora = [word for word in own if word.startswith("model.lora.") and sizes == "qwen3_30b_a3b"]  # of 128 experts a minute each
    words = [f"model={sizes}", "model.path=", *(word for word in own if word not in lora)]
    words += ["model.architecture.max_position_embeddings=65536"] if found.recipe in ("grpo", "ppo") else []
    return plan.load(found.recipe, words)


def planned(found: Migration) -> None:
    """Raises AlignerError where the plan refuses the command."""
    config = loaded(found)
    plan.plan_config(found.recipe, config, advises=False)


def composes_and_plans_or_says_why(found: Migration) -> None:
    try:
        planned(found)
    except AlignerError as error:
        assert found.is_other and found.stops, error
    else:
        assert not found.is_refused
    assert not found.is_other or found.stops or changed(found)


def published(case: dict[str, Any], folder: Path) -> Migration:
    suffix = ".yaml" if "file" in case else ".sh"
    path = folder / f"{case['from'].rpartition(': ')[2].replace('/', '_').removesuffix(suffix)}{suffix}"
    path.write_text(yaml.safe_dump(case["file"]) if "file" in case else f"{case['command']}\n")
    return of(str(path))


@pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
def test_scripts_are_planned(tmp_path: Path, on_ranks) -> None:
    """In a process of its own, which a plan needs: the scripts above, and a quarter of the published ones."""
    assert on_ranks(plan_scripts, 1, tmp_path, timeout=600) == [len(SCRIPTS) + len(PUBLISHED[1::4])]


def plan_scripts(folder: Path) -> int:
    given = {name: of(text) for name, text in SCRIPTS.items()}
    given |= {case["from"]: published(case, folder) for case in PUBLISHED[1::4]}
    for script, found in given.items():
        print("planned:", script, flush=True)
        composes_and_plans_or_says_why(found)
    return len(given)


# severities and the exit code


def test_three_severities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = of_llama(tmp_path, use_badam=True, template="llama3", plot_loss=True, logging_steps=10)
    of_kind = {row.key: row.severity for row in found.rows}
    assert changed(found) == {"use_badam"} and of_kind["template"] is Severity.said
    assert of_kind["plot_loss"] is of_kind["logging_steps"] is Severity.cosmetic
    heads = re.findall(r"^(Changes the result|Must be said|Mapped|Same by default|Cosmetic).*\((\d+)\)", report(found), re.MULTILINE)
    assert [head for head, _ in heads] == ["Changes the result", "Must be said", "Mapped", "Same by default", "Cosmetic"]
    options = MigrateOptions(ranks=2, output=tmp_path / "mine.sh", json_path=tmp_path / "mine.json")
    assert migrate([str(tmp_path / "config.yaml")], options) == OTHER == 3
    assert "cannot run or is another experiment (exit code 3)" in capsys.readouterr().out
    assert "# Changes the result: use_badam=true: not here" in (tmp_path / "mine.sh").read_text()
    assert "result" in [row["severity"] for row in json.loads((tmp_path / "mine.json").read_text())["rows"]]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(LLAMA))
    assert migrate([str(tmp_path / "config.yaml")], MigrateOptions(ranks=2)) == 0


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        *(({"optim": name}, {"optimizer.kind": "adam8bit"}) for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")),
        ({"use_muon": True, "finetuning_type": "full"}, {"optimizer.kind": "muon", "optimizer.distributed": False}),
        (
            {"quantization_bit": 4, "use_dora": True, "loraplus_lr_ratio": 16.0},
            {"model.quantization": "nf4", "model.double_quantization": True, "model.lora.dora": True, "optimizer.loraplus_ratio": 16.0},
        ),
        *(
            ({"pissa_init": True, "pissa_convert": True} | given, {"model.lora.init": "pissa", "model.lora.pissa_iterations": iterations})
            for given, iterations in (({}, 16), ({"pissa_iter": 4}, 4), ({"pissa_iter": -1}, None))
        ),
        ({"neftune_noise_alpha": 5.0}, {"algorithm.neftune_alpha": 5.0}),
        ({}, {"model.lora.init": None}),
    ],
)
def test_what_is_the_same_experiment(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    found = of_llama(tmp_path, **keys)
    assert not changed(found) and not found.is_other and {key: found.settings.get(key) for key in wanted} == wanted
    assert "optimizer.kind" not in wanted or loaded(found).optimizer.kind.value == wanted["optimizer.kind"]


def test_what_changes_the_result(tmp_path: Path) -> None:
    keys = {"val_size": 0.1, "image_max_pixels": 262144, "packing": True, "use_galore": True}
    assert changed(of_llama(tmp_path, **keys)) == set(keys)
    assert changed(of_llama(tmp_path, neftune_noise_alpha=5.0, stage="dpo", pref_loss="sigmoid")) == {"neftune_noise_alpha"}


# LLaMA-Factory


def test_names_of_another_index_and_a_bound_of_each(tmp_path: Path) -> None:
    found = of_llama(
        tmp_path, dataset="identity,alpaca.jsonl", max_samples=100, max_steps=None, num_train_epochs=1, per_device_train_batch_size=5
    )
    assert [one["max_records"] for one in found.settings["data.train"]] == [100, 100]
    assert found.settings["loop.max_steps"] == 20  # 200 of 640 records, 2 * 5 a step
    assert any("data.train: identity: names from its dataset_info.json" in one for one in found.stops)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_path: m\nadapter_name_or_path: a\nexport_dir: out\n", "trains nothing.*merges adapters.*aligner convert"),
        ("model_name_or_path: m\ninfer_backend: vllm\n", "trains nothing.*answers prompts.*aligner train generate"),
        ("model: m\ntrain_dataset: data.yaml\nmicro_batch_size: 1\n", "its version 1"),
    ],
)
def test_configs_that_train_nothing(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(str(tmp_path / "config.yaml"))


# OpenRLHF


def test_rewards_that_are_normalized_by_two_constants() -> None:
    found = of(f"{OPENRLHF_PPO} --reward.model_name_or_path rm --reward.normalize_enable")
    assert "algorithm.shaping.standardize" not in found.settings and changed(found) == {"reward.normalize_enable"}
    assert any(one.startswith("algorithm.shaping.scale, algorithm.shaping.shift") for one in found.stops)


def test_all_linear_layers_of_a_mixture() -> None:
    text = OPENRLHF_SFT.replace(" m ", " mistralai/Mixtral-8x7B-v0.1 ")
    found = of(f"{text} --ds.lora.rank 8")
    (row,) = (row for row in found.defaults if row.key == "target_modules")
    assert found.settings["model.lora.targets"][-1] == "experts" and row.severity is Severity.said
    assert "model.lora.targets" not in of(f"{OPENRLHF_SFT} --ds.lora.rank 8").settings


def test_ranks_that_nobody_said() -> None:
    found = of(OPENRLHF_SFT)
    assert any(one.startswith("num_processes: how many GPUs train") for one in found.open_questions) and not found.is_other
    assert not any("num_processes" in one for one in of(OPENRLHF_SFT, ranks=8).open_questions)


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (OPENRLHF_GRPO, "it cannot run as it is: reward.function.path=''"),
        (f"{OPENRLHF_GRPO} --train.agent_func_path agent.py", "environment.path=FILE.py:CLASS"),
        (f"{OPENRLHF_GRPO} --reward.remote_url ${{WORK_DIR}}/math_reward.py", "reward.function.path=${WORK_DIR}/math_reward.py:NAME"),
        (f"{SCRIPTS['openrlhf grpo']} --reward.stop_properly_penalty_coef 0.0", "a response that was cut gets another reward"),
        (GRPO, "reward.function.path: verl chooses compute_score"),
        (SCRIPTS["verl grpo"], "reward.function.path=mine.py:compute_score"),
        (f"python examples/scripts/ppo/ppo.py {TRL}", "reward.model.path, critic.model.path: reward_model_path is not given"),
        (f"{LLAMA_SFT} Qwen/Qwen3-VL-4B-Instruct", "model.path=Qwen/Qwen3-VL-4B-Instruct: judging by its name, it reads images"),
        (f"{LLAMA_SFT} Qwen/Qwen3-8B-AWQ", "model.path=Qwen/Qwen3-8B-AWQ: judging by its name, it has quantized weights"),
        (f"{LLAMA_SFT} a/b-GPTQ-Int4", "model.path=a/b-GPTQ-Int4: judging by its name, it has quantized weights"),
    ],
)
def test_what_a_command_cannot_say_is_asked_for(text: str, question: str) -> None:
    (found,) = (one for one in of(text).stops if "the number of ranks" not in one)
    assert found.startswith(question)


def test_a_bound_of_the_records() -> None:
    found = of(f"{OPENRLHF_SFT} --data.max_samples 256 --train.batch_size 128 --train.max_epochs 1")
    assert found.settings["data.train"] == [{"path": "d.jsonl", "max_records": 256}] and found.settings["loop.max_steps"] == 2
    several = of(f"{OPENRLHF_SFT.replace('d.jsonl', 'a.jsonl,b.jsonl')} --data.max_samples 256")
    assert changed(several) == {"data.dataset"}


NODES = """#!/bin/bash
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
readonly IMAGE="nvcr.io/nvidia/pytorch:24.01-py3"
nodes_array=( $nodes )
srun --nodes=1 --ntasks=1 -w "${nodes_array[0]}" --container-image="$IMAGE" bash -c \\
    "pip install ray[default]==2.12.0 \\
    && /root/.local/bin/ray start --head --block" &>> ${LOG} &
"""


def test_a_job_whose_command_is_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        NODES
        + 'srun --overlap --nodes=1 --ntasks=1 --container-image="$IMAGE" bash -c \\\n"pip install ray[default]==2.12.0 \\\n'
        + '&& ray job submit --address=http://localhost:8265 \\\n    --runtime-env-json=\'{\\"working_dir\\": \\"/openrlhf\\"}\' \\\n'
        + f'    -- {OPENRLHF_PPO} \\\n    --reward.model_name_or_path rm" &>> ${{LOG}}\n'
    )
    found = of(str(tmp_path / "job.sh"))
    assert found.settings["num_processes"] == 4 and found.settings["reward.model.path"] == "rm"


def test_a_job_that_sources_its_command(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        NODES
        + 'readonly training_script="train_dpo.sh"\nreadonly GPUS=8\nsource ./${training_script} slurm\n'
        + 'srun bash -c " cd /openrlhf; pip install . ; torchrun \\\n'
        + '--nproc_per_node $GPUS --nnodes $SLURM_NNODES -m ${training_commands}"\n'
    )
    with pytest.raises(ConfigError, match=r"it runs \./train_dpo\.sh, which is not beside it: give that script"):
        of(str(tmp_path / "job.sh"))
    (tmp_path / "train_dpo.sh").write_text(
        "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_dpo \\\n   --model.model_name_or_path m --data.dataset d.jsonl\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi\n'
    )
    found = of(str(tmp_path / "job.sh"))
    assert found.recipe == "dpo" and found.settings["num_processes"] == 16


def test_an_error_names_the_command_that_trains() -> None:
    with pytest.raises(ConfigError, match="the command .trl sft.*No closing quotation"):
        read("echo 'a b' && ls\ntrl sft --model_name_or_path 'm --dataset_name d.jsonl")


# verl


@pytest.mark.parametrize(
    ("words", "servers"), [("", {"critic"}), ("reward_model.enable=True reward_model.model.path=rm", {"critic", "reward"})]
)
def test_all_models_share_the_gpus(words: str, servers: set[str]) -> None:
    """The critic in the actor's processes, unless it has a layout of its own."""
    together = of(f"{VERL_PPO} {words}").settings
    assert together["critic.kind"] == "model" and "critic.num_processes" not in together
    assert together.get("placement") == ("colocated" if "reward" in servers else None)
    assert together.get("reward.num_processes") == (8 if "reward" in servers else None)
    found = of(f"{VERL_PPO} {words} critic.megatron.tensor_model_parallel_size=2").settings
    assert found["placement"] == "colocated" and found["num_processes"] == 8 and "critic.kind" not in found
    assert {name: found.get(f"{name}.num_processes") for name in servers} == dict.fromkeys(servers, 8)
    assert found.get("reward.serve", True) is ("reward" in servers)
    assert (
        "placement"
        not in of(f"{VERL_PPO} reward_model.enable=True reward_model.model.path=rm reward_model.enable_resource_pool=True").settings
    )


def test_warm_up_in_whole_steps() -> None:
    """640 prompts, 64 a step, 10.5 epochs: 105 steps of 4 updates, of which int(10.5) warm up; of the critic int(9.45) steps of 2."""
    words = "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 critic.ppo_mini_batch_size=32"
    words += " trainer.total_training_steps=105"
    found = of(f"{VERL_PPO} {words} actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.09")
    assert (found.settings["optimizer.warmup_steps"], found.settings["critic.optimizer.warmup_steps"]) == (40, 18)
    (row,) = (row for row in found.rows if row.key == "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio")
    assert row.note == "0.1 of 105 steps there: 10, of 4 updates each"


OF_ONE_PROCESS = {"placement": "colocated", "num_processes": 8, "reward.num_processes": 8, "critic.num_processes": None}
WITH_THE_ACTOR = {"critic.kind": "model", "critic.num_processes": 4, "num_processes": 4}
OFFLOADED = dict.fromkeys(("optimizer.offload", "critic.optimizer.offload", "rollout.offload"), True)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            f"{GRPO} algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce",
            {"algorithm.objective": "reinforce"},
        ),
        (
            f"{GRPO} actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=8"
            " actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
            {"validation.num_samples": 8, "validation.temperature": 0.6},
        ),
        (f"{GRPO} data.train_max_samples=100", {"data.train": [{"path": "a.parquet", "max_records": 100}]}),
        (
            f"{GRPO} trainer.n_gpus_per_node=12 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=12"
            " +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6",
            {"parallel.pp": 12, "parallel.last_stage_layers": 6},
        ),
        (
            f"{GRPO} trainer.experiment_name='run_${{trainer.project_name}}' trainer.project_name=p trainer.logger=[wandb]",
            {"logging.wandb_run_name": "run_p"},
        ),
        (f"{VERL_SFT} data.prompt_key=info data.response_key=x", {"data.prompt_field": "info", "data.response_field": "x"}),
        (f"{VERL_SFT} data.prompt_key=info '+data.prompt_dict_keys=['question']'", {"data.prompt_field": "info.question"}),
        (f"{VERL_SFT} data.prompt_key=info '+data.prompt_dict_keys=[a,question]'", {"data.prompt_field": "info.a.question"}),
        (OPENRLHF_SFT.replace("d.jsonl", "ORG/prompts-v0.1"), {"data.train": "ORG/prompts-v0.1"}),
        (SCRIPTS["trl ppo"], OF_ONE_PROCESS | {"critic.kind": "model"}),
        (SCRIPTS["trl grpo"], OF_ONE_PROCESS | {"critic.kind": None}),
        (SCRIPTS["deepspeed-chat ppo"], OF_ONE_PROCESS | {"critic.kind": "model"}),
        (f"{SCRIPTS['openrlhf ppo']} --train.colocate_all", WITH_THE_ACTOR | {"placement": "colocated", "rollout.offload": None}),
        # a function in the actor's processes: the run has no servers
        (f"{OPENRLHF_PPO} --reward.remote_url mine.py --train.colocate_all", WITH_THE_ACTOR | OFFLOADED | {"placement": None}),
        (SCRIPTS["openrlhf ppo"], {"critic.kind": None}),
    ],
)
def test_settings_of_a_command(text: str, settings: dict[str, Any]) -> None:
    found = of(text)
    assert {key: found.settings.get(key) for key in settings} == settings and not found.is_refused


def test_its_own_config_is_not_missed() -> None:
    words = "--config-path=config --config-name=ppo_megatron_trainer.yaml"
    assert not any("--config" in one for one in of(f"{GRPO} {words}").open_questions)
    assert any("--config" in one for one in of(f"{GRPO} --config-path=config --config-name=my_trainer").open_questions)


def test_arrays_with_sums(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"length=$((1024 * 2))\nDATA=(\n    data.max_prompt_length=$((length + 1024))\n    data.train_batch_size=32\n)\n{GRPO} "
        + '"${DATA[@]}" "$@"\n'
    )
    found = of(str(tmp_path / "run.sh")).settings
    assert (found["data.max_prompt_length"], found["algorithm.prompts_per_step"]) == (3072, 32)


# NeMo-Aligner


def test_references_of_the_file_see_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "gpt_ppo_actor.yaml").write_text(
        "trainer: {num_nodes: 1, devices: 8, ppo: {max_steps: 10}}\nmodel:\n  encoder_seq_length: 4096\n"
        "  ppo: {length_params: {max_length: '${int_div:${model.encoder_seq_length}, 2}'}}\n"
        "  data: {data_prefix: {train: ['${oc.env:NOT_SET_HERE}/a.jsonl'], validation: [b.jsonl]}}\n"
    )
    (tmp_path / "run.sh").write_text(
        "python train_gpt_ppo_actor.py --config-path=conf --config-name=gpt_ppo_actor model.encoder_seq_length=8192 "
        "pretrained_checkpoint.restore_from_path=m.nemo\n"
    )
    found = of(str(tmp_path / "run.sh")).settings
    assert (found["model.seq_length"], found["rollout.sampling.max_response_length"]) == (8192, 4096)
    assert found["data.validation"] == "b.jsonl"


# TRL


def test_validation_is_another_split_of_the_same_data() -> None:
    words = "trl/scripts/dpo.py --model_name_or_path m --eval_strategy steps --eval_steps 50"
    hub = of(f"python {words} --dataset_name ORG/NAME").settings
    assert (hub["data.validation"], hub["loop.validate_every"]) == ("ORG/NAME:test", 50)
    assert of(f"python {words} --dataset_name ORG/NAME --dataset_config main").settings["data.train"] == "ORG/NAME:main:train"
    file = of(f"python {words} --dataset_name d.jsonl")
    assert "loop.validate_every" not in file.settings and any("loop.validate_every=50 is left out" in one for one in file.open_questions)


PROGRAM = '''"""
It's how {name} is started:

accelerate launch \\\\
    --config_file configs/zero3.yaml \\\\
    examples/scripts/{name} --model_name_or_path m --dataset_name d.jsonl {words}
"""
from trl import {trainer}

trainer = {trainer}(model="m")
'''


@pytest.mark.parametrize(
    ("name", "trainer", "words", "recipe"),
    [
        ("gspo.py", "GRPOTrainer", "--num_generations 8 --importance_sampling_level sequence --reward_funcs mine.short", "grpo"),
        ("sft_gpt_oss.py", "SFTTrainer", "--max_length 512", "sft"),
        ("my_own.py", "DPOTrainer", "--beta 0.2", "dpo"),
    ],
)
def test_programs_by_their_trainer(name: str, trainer: str, words: str, recipe: str, tmp_path: Path) -> None:
    """Given themselves, whose text says how to start them, or in a command; their launcher's file says how many ranks."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero3.yaml").write_text("num_processes: 8\n")
    scripts = tmp_path / "examples" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / name).write_text(PROGRAM.format(name=name, trainer=trainer, words=words))
    found = of(str(scripts / name))
    assert found.recipe == recipe and found.settings["num_processes"] == 8
    (scripts / "run.sh").write_text(f"python {name} --model_name_or_path m --dataset_name d.jsonl {words}\n")
    assert of(str(scripts / "run.sh")).recipe == recipe
    assert name == "my_own.py" or of(f"accelerate launch examples/scripts/{name} {TRL}").recipe == recipe  # which is not here


@pytest.mark.parametrize("has_head", [True, False])
def test_a_policy_with_a_value_head(has_head: bool, tmp_path: Path) -> None:
    """TRL's class in the program makes the critic a head, whose loss has TRL's weight; else it is a model, which starts from the reward
    model."""
    model = "model = AutoModelForCausalLMWithValueHead.from_pretrained(name)\n" if has_head else ""
    program = tmp_path / "my_ppo.py"
    words = "--model_name_or_path m --dataset_name d.jsonl --reward_model_path rm --vf_coef 0.3 --learning_rate 2e-6"
    program.write_text(model + PROGRAM.format(name="my_ppo.py", trainer="PPOTrainer", words=words))
    (tmp_path / "run.sh").write_text(f"python my_ppo.py {words}\n")
    found = of(str(tmp_path / "run.sh")).settings
    assert (found["critic.kind"], found.get("critic.head.coef")) == (("head", 0.3) if has_head else ("model", None))
    assert found["reward.model.path"] == "rm" and found.get("critic.model.path") == (None if has_head else "rm")
    assert found["optimizer.lr"] == found["critic.optimizer.lr"] == 2e-6
    words = "--stage ppo --model_name_or_path m --dataset d --reward_model rm --learning_rate 1e-5"
    found = of(f"llamafactory-cli train {words}").settings  # whose critic is always a head
    assert found["critic.kind"] == "head" and found["reward.model.path"] == "rm" and "critic.model.path" not in found
    assert found["critic.optimizer.lr"] == 1e-5 and found["placement"] == "colocated"


def test_programs_without_a_recipe() -> None:
    with pytest.raises(ConfigError, match="TRL nash_md: no recipe here does that"):
        of(f"python examples/scripts/nash_md.py {TRL}")
    own = f"python train_mine.py {TRL} --num_generations 8 --reward_funcs mine.short"
    with pytest.raises(ConfigError, match="--from trl --trains grpo"):
        of(own)
    assert migrated(read(own, framework="trl", trains="grpo")).recipe == "grpo"


# DeepSpeed-Chat


@pytest.mark.parametrize(("split", "is_other"), [("2,4,4", True), ("0,0,10", False), ("0,10,0", True)])
def test_shares_of_the_steps(split: str, is_other: bool) -> None:
    found = of(f"{SCRIPTS['deepspeed-chat ppo'].replace('d.jsonl', 'a.jsonl b.jsonl')} --data_split {split}")
    assert ("data_split" in changed(found)) is is_other and any("data_split" in one for one in found.stops) is is_other


def test_text_beside_ppo() -> None:
    """Its coefficient has a default there, without effect unless there is such text; its steps are not PPO's, which is said."""
    ppo = SCRIPTS["deepspeed-chat ppo"]
    found = of(f"{ppo} --unsupervised_dataset_name o/n --unsupervised_dataset_config_name part")
    assert (found.settings["algorithm.pretraining_coef"], found.settings["pretraining.train"]) == (27.8, "o/n")
    assert of(f"{ppo} --unsupervised_dataset_name o/n --unsup_coef 3").settings["algorithm.pretraining_coef"] == 3
    for other in (ppo, f"{ppo} --unsup_coef 3"):
        assert not {"algorithm.pretraining_coef", "pretraining.train"} & of(other).settings.keys()
    assert "(the updates of unsupervised text)" in changed(found) - changed(of(ppo))


def test_a_command_is_printed_as_it_is_typed() -> None:
    words = shlex.split(command_line(of(f"{OPENRLHF_SFT} --data.max_samples 256")).replace("\\\n", ""))
    assert words[:4] == ["aligner", "launch", "local", "sft"] and "data.train=[{path:'d.jsonl',max_records:256}]" in words
