"""TRL's side of the SFT comparison: time `SFTTrainer` (HF Trainer's loop, TRL's fused loss) on given weights and token rows.

    <python of an environment that holds torch and trl> benchmarks/trl_sft_reference.py SPEC.json RESULT.json

It imports nothing of this project. SPEC.json holds the fields of `Spec`. The rows of the spec are one optimizer step; every step takes the
same ones (an epoch), so that losses and gradient norms can be compared step by step while the weights move.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trl_grpo_reference import Clock, load_tokenizer, median_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What to run. `rows` are token ids, of which the first `prompt_lengths` are not learnt."""

    model: str
    rows: list[list[int]]
    prompt_lengths: list[int]
    steps: int = 4
    warmup_steps: int = 1
    micro_batch_size: int = 4  # rows, where nothing is packed
    pack_tokens: int = 0  # tokens of a packed row; 0: pad
    threads: int = 1
    seed: int = 0
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.prompt_lengths) or self.steps < 1:
            raise ValueError(f"spec: needs rows, a prompt length for each and steps >= 1; got {len(self.rows)}, {len(self.prompt_lengths)}")
        if len(self.rows) % self.micro_batch_size:
            raise ValueError(f"spec: micro_batch_size {self.micro_batch_size} does not divide the {len(self.rows)} rows of a step")
        if self.pack_tokens and self.pack_tokens < max(map(len, self.rows)):
            raise ValueError(f"spec: a row of {max(map(len, self.rows))} tokens does not fit into pack_tokens {self.pack_tokens}")


def read_spec(path: Path) -> Spec:
    """Raises TypeError naming a field that Spec has not, or that is missing."""
    return Spec(**json.loads(path.read_text()))


def make_dataset(spec: Spec):
    """The rows with their masks, as TRL takes what is tokenized already."""
    from datasets import Dataset

    masks = [[0] * prompt + [1] * (len(row) - prompt) for row, prompt in zip(spec.rows, spec.prompt_lengths, strict=True)]
    return Dataset.from_dict({"input_ids": spec.rows, "completion_mask": masks})


def micro_batches_per_step(spec: Spec) -> int:
    """How many forward passes one epoch is: known before the trainer packs the rows."""
    from trl import pack_dataset

    if not spec.pack_tokens:
        return len(spec.rows) // spec.micro_batch_size
    return len(pack_dataset(make_dataset(spec).select_columns(["input_ids"]), spec.pack_tokens, "bfd"))


def trainer_settings(spec: Spec, folder: str):
    """One optimizer step an epoch, AdamW without decay or schedule, float32, no checkpointing."""
    from trl import SFTConfig

    return SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=1 if spec.pack_tokens else spec.micro_batch_size,
        gradient_accumulation_steps=micro_batches_per_step(spec),
        num_train_epochs=spec.warmup_steps + spec.steps,
        packing=bool(spec.pack_tokens),
        max_length=spec.pack_tokens or max(map(len, spec.rows)),
        completion_only_loss=True,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=spec.seed,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def make_trainer(spec: Spec, clock: Clock, folder: str):
    """An SFTTrainer on the CPU whose steps are timed, from the first forward pass to the end of the update."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.whole = clock.phase("total")
            self.whole.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            self.whole.__exit__(None, None, None)
            clock.end_step()

    class OrderedTrainer(SFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)  # the same rows side by side, and so the same padding, as on our side

    return OrderedTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32),
        args=trainer_settings(spec, folder),
        train_dataset=make_dataset(spec),
        processing_class=load_tokenizer(spec.model),
        callbacks=[Steps()],
    )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: trl_sft_reference.py SPEC.json RESULT.json")
    spec = read_spec(Path(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # before torch is loaded
    import torch
    import transformers
    import trl

    torch.set_num_threads(spec.threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(spec, clock, folder)
        if trainer.model.is_gradient_checkpointing:
            raise RuntimeError("TRL recomputes activations although it was told not to: the comparison would not be fair")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    if len(logged) != spec.warmup_steps + spec.steps or len(clock.steps) != len(logged):
        raise RuntimeError(
            f"TRL made {len(logged)} optimizer steps, {spec.warmup_steps + spec.steps} were asked for: an epoch is not one step"
        )
    result = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "losses": [float(entry["loss"]) for entry in logged],
        "grad_norms": [float(entry["grad_norm"]) for entry in logged],
        "median": median_seconds([step["total"] for step in clock.steps[spec.warmup_steps :]]),
        "num_micro_batches": trainer.args.gradient_accumulation_steps,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
