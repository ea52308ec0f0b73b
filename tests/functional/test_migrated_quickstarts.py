"""The quickstarts of six projects train a small model, written as `aligner migrate` writes them, with names of files here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from training_jobs import ALIGNER, run_job, series

from aligner.commands.migrate.command import migrate
from aligner.commands.parts import MigrateOptions

pytestmark = [pytest.mark.shared, pytest.mark.timeout(600)]
STORIES = ["Lily had a red ball.", "Tom saw a big dog in the park.", "The cat sat on a mat.", "One day, a bird found a stone."]
SAYS = "Once upon a time, "


def trl_dpo(model: Path, data: Path) -> str:  # README.md
    return f"trl dpo --model_name_or_path {model} --dataset_name {data} --per_device_train_batch_size 4 --max_length 64 --max_steps 2"


def llama_factory_sft(model: Path, data: Path) -> str:  # examples/train_lora/qwen3_lora_sft.yaml
    keys = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "cutoff_len": 64,
        "bf16": False,
    }
    keys |= {"model_name_or_path": str(model), "dataset": str(data), "template": "default", "max_steps": 2, "lr_scheduler_type": "cosine"}
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4, "warmup_ratio": 0.1}
    (data.parent / "qwen3_lora_sft.yaml").write_text(yaml.safe_dump(keys))
    return str(data.parent / "qwen3_lora_sft.yaml")


def openrlhf_sft(model: Path, data: Path) -> str:  # examples/scripts/train_sft.sh
    sizes = "--train.batch_size 8 --train.micro_batch_size 2 --data.max_len 64 --train.max_epochs 1 --adam.lr 5e-6 --ds.packing_samples"
    fields = "--data.input_key prompt --data.output_key response"
    return (
        f"deepspeed --num_gpus 1 --module openrlhf.cli.train_sft --model.model_name_or_path {model} --data.dataset {data} {fields} {sizes}"
    )


def verl_sft(model: Path, data: Path) -> str:  # examples/sft/gsm8k/run_qwen_05_sp2.sh
    sizes = "data.train_batch_size=8 data.micro_batch_size=4 data.max_length=64 optim.lr=1e-4 trainer.total_training_steps=2"
    fields = "data.prompt_key=prompt data.response_key=response trainer.logger=console trainer.n_gpus_per_node=1"
    return f"torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain={model} data.train_files={data} {fields} {sizes}"


def nemo_aligner_dpo(model: Path, data: Path) -> str:  # docs/user-guide/dpo.rst
    sizes = "trainer.num_nodes=1 trainer.devices=1 ++model.global_batch_size=8 model.encoder_seq_length=64 ++trainer.dpo.max_epochs=1"
    files = shlex.quote(f"model.data.data_prefix={{train: [{data}], validation: [{data}], test: [{data}]}}")
    return f"python -u examples/nlp/gpt/train_gpt_dpo.py pretrained_checkpoint.restore_from_path={model} {files} {sizes}"


def deepspeed_chat_sft(model: Path, data: Path) -> str:  # training/step1_supervised_finetuning/training_scripts/opt/single_gpu/run_1.3b.sh
    script = data.parent / "step1_run_1.3b.sh"
    sizes = (
        "--gradient_accumulation_steps 8 --per_device_train_batch_size 1 --lora_dim 8 --only_optimize_lora --max_seq_len 64 --dtype bf16"
    )
    sizes += " --data_split 1,0,0"  # all records are of this step
    script.write_text(f"deepspeed --num_gpus 1 main.py --model_name_or_path {model} --data_path {data} {sizes} --deepspeed\n")
    return str(script)


@pytest.mark.parametrize(
    ("quickstart", "suffix", "loss"),
    [
        (trl_dpo, ".yaml", "preference/loss"),
        pytest.param(llama_factory_sft, ".sh", "sft/loss", marks=pytest.mark.slow),
        pytest.param(openrlhf_sft, ".sh", "sft/loss", marks=pytest.mark.slow),
        pytest.param(verl_sft, ".yaml", "sft/loss", marks=pytest.mark.slow),
        pytest.param(nemo_aligner_dpo, ".sh", "preference/loss", marks=pytest.mark.slow),
        pytest.param(deepspeed_chat_sft, ".yaml", "sft/loss", marks=pytest.mark.slow),
    ],
)
def test_quickstart(quickstart: Callable[[Path, Path], str], suffix: str, loss: str, tmp_path: Path, shared_data: Path) -> None:
    data, written = tmp_path / "data.jsonl", tmp_path / f"mine{suffix}"
    pairs = [(STORIES[number % 4], STORIES[(number + 1) % 4]) for number in range(16)]
    records = [{"prompt": SAYS, "chosen": text, "rejected": other, "response": text} for text, other in pairs]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert migrate([quickstart(shared_data / "stories260k", data)], MigrateOptions(ranks=1, examples=16, output=written)) == 0
    if suffix == ".sh":
        command = shlex.split(written.read_text().replace("\\\n", ""), comments=True)[1:]
    else:
        command = ["launch", "local", "mine", "--config-dir", str(tmp_path)]
    run_job(ALIGNER, tmp_path / "run", [*command, "run.export_hf=false"])
    assert len(series(tmp_path / "run", loss)) == 2
