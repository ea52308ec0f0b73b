"""The quickstarts of six projects train a small model, written as `aligner migrate` writes them, with names of files here."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from tiers import cases
from training_jobs import ALIGNER, run_job, series, write_rows

from aligner.commands.migrate.command import migrate
from aligner.commands.parts import MigrateOptions

pytestmark = [pytest.mark.shared, pytest.mark.timeout(600)]
STORIES = ["Lily had a red ball.", "Tom saw a big dog in the park.", "The cat sat on a mat.", "One day, a bird found a stone."]
SAYS = "Once upon a time, "
LLAMA_FACTORY = {"stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "cutoff_len": 64}
LLAMA_FACTORY |= {"bf16": False, "model_name_or_path": "{model}", "dataset": "{data}", "template": "default", "max_steps": 2}
LLAMA_FACTORY |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4, "warmup_ratio": 0.1}
LLAMA_FACTORY |= {"lr_scheduler_type": "cosine"}
QUICKSTARTS = {  # by name: the command or, with its name, the file; what is written, the loss
    "trl_dpo": (  # README.md
        "trl dpo --model_name_or_path {model} --dataset_name {data} --per_device_train_batch_size 4 --max_length 64 --max_steps 2",
        *("", ".yaml", "preference/loss"),
    ),
    "llama_factory_sft": (
        yaml.safe_dump(LLAMA_FACTORY),
        "qwen3_lora_sft.yaml",
        ".sh",
        "sft/loss",
    ),  # examples/train_lora/qwen3_lora_sft.yaml
    "openrlhf_sft": (  # examples/scripts/train_sft.sh
        "deepspeed --num_gpus 1 --module openrlhf.cli.train_sft --model.model_name_or_path {model} --data.dataset {data} "
        "--data.input_key prompt --data.output_key response --train.batch_size 8 --train.micro_batch_size 2 --data.max_len 64 "
        "--train.max_epochs 1 --adam.lr 5e-6 --ds.packing_samples",
        *("", ".sh", "sft/loss"),
    ),
    "verl_sft": (  # examples/sft/gsm8k/run_qwen_05_sp2.sh
        "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain={model} data.train_files={data} data.prompt_key=prompt "
        "data.response_key=response trainer.logger=console trainer.n_gpus_per_node=1 data.train_batch_size=8 data.micro_batch_size=4 "
        "data.max_length=64 optim.lr=1e-4 trainer.total_training_steps=2",
        *("", ".yaml", "sft/loss"),
    ),
    "nemo_aligner_dpo": (  # docs/user-guide/dpo.rst
        "python -u examples/nlp/gpt/train_gpt_dpo.py pretrained_checkpoint.restore_from_path={model} "
        "'model.data.data_prefix={{train: [{data}], validation: [{data}], test: [{data}]}}' trainer.num_nodes=1 trainer.devices=1 "
        "++model.global_batch_size=8 model.encoder_seq_length=64 ++trainer.dpo.max_epochs=1",
        *("", ".sh", "preference/loss"),
    ),
    "deepspeed_chat_sft": (  # training/step1_supervised_finetuning/training_scripts/opt/single_gpu/run_1.3b.sh
        "deepspeed --num_gpus 1 main.py --model_name_or_path {model} --data_path {data} --gradient_accumulation_steps 8 "
        "--per_device_train_batch_size 1 --lora_dim 8 --only_optimize_lora --max_seq_len 64 --dtype bf16 --data_split 1,0,0 --deepspeed\n",
        *("step1_run_1.3b.sh", ".yaml", "sft/loss"),
    ),
}


@pytest.mark.parametrize("name", cases(QUICKSTARTS, fast=["trl_dpo"]))
def test_quickstart(name: str, tmp_path: Path, shared_data: Path) -> None:
    text, file, suffix, loss = QUICKSTARTS[name]
    written, pairs = tmp_path / f"mine{suffix}", [(STORIES[number % 4], STORIES[(number + 1) % 4]) for number in range(16)]
    rows = ({"prompt": SAYS, "chosen": text, "rejected": other, "response": text} for text, other in pairs)
    given = text.format(model=shared_data / "stories260k", data=write_rows(tmp_path / "data.jsonl", rows))
    if file:
        (tmp_path / file).write_text(given)
        given = str(tmp_path / file)
    assert migrate([given], MigrateOptions(ranks=1, examples=16, output=written)) == 0
    if suffix == ".sh":
        command = shlex.split(written.read_text().replace("\\\n", ""), comments=True)[1:]
    else:
        command = ["launch", "local", "mine", "--config-dir", str(tmp_path)]
    run_job(ALIGNER, tmp_path / "run", [*command, "run.export_hf=false"])
    assert len(series(tmp_path / "run", loss)) == 2
