"""TRL's side of the GRPO comparison: time `GRPOTrainer` steps on given weights and prompts, phases apart.

    <python of an environment that holds torch and trl> benchmarks/trl_grpo_reference.py SPEC.json RESULT.json

It imports nothing of this project, because TRL's dependencies do not fit beside PyTriton's. SPEC.json holds the fields of `Spec`.

Both sides must do the same work: every response has exactly `max_new_tokens` tokens (`min_new_tokens` forbids the end-of-sequence token)
unless `varied` lets the model end them (then steps are compared by the token, and `tokens` of a step says how many there were); gradient
checkpointing and mixed precision are off, and there is one optimizer step per rollout batch. With `beta` > 0 a reference pass is included.
On this setting TRL leaves out the pass for the old log-probs (they equal the policy's own); `num_logprob_passes` in the result says how
many passes without gradient a step made.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What to run. `model` is a Hugging Face directory, with or without a tokenizer; `prompts` are token ids."""

    model: str
    prompts: list[list[int]]
    group_size: int
    max_new_tokens: int
    steps: int = 5
    warmup_steps: int = 1
    micro_batch_size: int = 0  # sequences; 0: the whole batch at once
    threads: int = 1
    seed: int = 0
    temperature: float = 1.0
    beta: float = 0.04
    learning_rate: float = 1e-6
    varied: bool = False  # responses end where the model ends them, at the latest after max_new_tokens
    device: str = "cpu"
    dtype: str = "float32"  # bfloat16: of the computation; the trained weights are float32
    images: list[str] = field(default_factory=list)  # of a model that sees: the file of each prompt's image
    question: str = ""  # of every prompt, beside its image
    slot: int = -1  # the token in an image's places, which no response has

    def __post_init__(self) -> None:
        rows = len(self.prompts) * self.group_size
        if not self.prompts or self.group_size < 2 or self.max_new_tokens < 1 or self.steps < 1:
            raise ValueError(f"spec: needs prompts, group_size >= 2, max_new_tokens >= 1 and steps >= 1, got {self}")
        if rows % (self.micro_batch_size or rows):
            raise ValueError(f"spec: micro_batch_size {self.micro_batch_size} does not divide the {rows} sequences of a step")


@dataclass(kw_only=True, slots=True)
class Clock:
    """Wall and CPU seconds (all threads of this process) by phase, of the step that is running and of the finished ones."""

    current: dict[str, list[float] | int] = field(default_factory=dict)
    steps: list[dict[str, list[float] | int]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        spent = self.current.setdefault(name, [0.0, 0.0, 0])
        spent[0] += time.perf_counter() - wall
        spent[1] += time.process_time() - cpu
        spent[2] += 1

    def end_step(self) -> None:
        self.steps.append(self.current)
        self.current = {}


def read_spec(path: Path) -> Spec:
    """Raises TypeError naming a field that Spec has not, or that is missing."""
    return Spec(**json.loads(path.read_text()))


def load_tokenizer(model: str):
    """The model's tokenizer, or a stand-in that can only decode: TRL insists on one, the prompts are token ids. Or its processor."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

    if (Path(model) / "processor_config.json").exists():
        return AutoProcessor.from_pretrained(model)
    if (Path(model) / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    size = AutoConfig.from_pretrained(model).vocab_size
    words = WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="t0", pad_token="t0", eos_token="t1")


def even_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward that costs nothing and differs within a group: the fraction of even token ids."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def trainer_settings(spec: Spec, folder: str):
    """TRL's settings for the same step as ours: full-length responses, one update per batch, no checkpointing."""
    from trl import GRPOConfig

    rows = len(spec.prompts) * spec.group_size
    micro = spec.micro_batch_size or rows
    return GRPOConfig(
        output_dir=folder,
        use_cpu=spec.device == "cpu",
        bf16=spec.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=spec.group_size,
        max_completion_length=spec.max_new_tokens,
        generation_kwargs=({} if spec.varied else {"min_new_tokens": spec.max_new_tokens})
        | ({"suppress_tokens": [spec.slot]} if spec.images else {}),
        temperature=spec.temperature,
        top_k=0,
        beta=spec.beta,
        use_bias_correction_kl=False,  # TRL's default multiplies the KL term by the (differentiable) ratio: another gradient
        loss_type="grpo",  # the mean of each response's mean; all responses are equally long, so `dapo` is the same number
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        max_steps=spec.warmup_steps + spec.steps,
        seed=spec.seed,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def make_trainer(spec: Spec, clock: Clock, folder: str):
    """A GRPOTrainer whose phases are timed; `folder` is where it would save."""
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, TrainerCallback
    from trl import GRPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.whole = clock.phase("total")
            self.whole.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            self.whole.__exit__(None, None, None)
            clock.end_step()

    class TimedTrainer(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            if spec.images:
                return super()._tokenize_prompts(prompts)
            return [spec.prompts[int(prompt)] for prompt in prompts], None, {}

        def _generate(self, prompts):
            with clock.phase("generation"):
                output = super()._generate(prompts)
            lengths = {len(tokens) for tokens in output[1]}
            clock.current["tokens"] = clock.current.get("tokens", 0) + sum(len(tokens) for tokens in output[1])
            if not spec.varied and lengths != {spec.max_new_tokens}:
                raise RuntimeError(f"TRL made responses of {sorted(lengths)} tokens, the comparison needs {spec.max_new_tokens}")
            return output

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            if torch.is_grad_enabled():  # the training pass
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            with clock.phase("logprobs"):
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def _generate_and_score_completions(self, inputs):
            with clock.phase("rollout"):
                return super()._generate_and_score_completions(inputs)

    rows = [{"prompt": str(index)} for index in range(len(spec.prompts))]
    if spec.images:
        rows = [
            {"prompt": [{"role": "user", "content": spec.question}], "images": [Image.open(file).convert("RGB")]} for file in spec.images
        ]
    return TimedTrainer(
        model=(AutoModelForImageTextToText if spec.images else AutoModelForCausalLM).from_pretrained(spec.model, dtype=torch.float32),
        reward_funcs=even_tokens,
        args=trainer_settings(spec, folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(spec.model),
        callbacks=[Steps()],
    )


def fixed_batch(spec: Spec) -> dict:
    """A small batch that is a function of `spec` alone, on which both sides compute loss and gradient norm; lists, without a framework."""
    longest = min(len(prompt) for prompt in spec.prompts)
    prompts = [prompt[:longest] for prompt in spec.prompts[:4]]
    vocabulary = sorted({token for prompt in spec.prompts for token in prompt} - {spec.slot})
    return {
        "prompts": prompts,
        "completions": [[vocabulary[(7 * row + 3 * t + 1) % len(vocabulary)] for t in range(32)] for row in range(len(prompts))],
        "advantages": [1.0 - 0.5 * row for row in range(len(prompts))],
        "ref_logprob": -7.0,
    }


def check_numbers(trainer, spec: Spec) -> dict[str, float]:
    """Loss and gradient norm of the fixed batch under the initial weights (`_compute_loss` in eval mode: no accumulation factor)."""
    import torch

    fixed = fixed_batch(spec)
    prompts, completions = (torch.tensor(fixed[name], device=trainer.model.device) for name in ("prompts", "completions"))
    seen = {}
    if spec.images:
        from PIL import Image

        pictures = [Image.open(file).convert("RGB") for file in spec.images[: len(prompts)]]
        pixels = trainer.processing_class.image_processor(pictures, return_tensors="pt")["pixel_values"]
        seen = {"pixel_values": pixels, "num_images": [1] * len(pictures)}
    trainer.model.eval()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "advantages": torch.tensor(fixed["advantages"], device=trainer.model.device),
            "ref_per_token_logps": torch.full(completions.shape, fixed["ref_logprob"], device=trainer.model.device),
            **seen,
        },
    )
    loss.backward()
    norm = sum(float(parameter.grad.norm()) ** 2 for parameter in trainer.model.parameters() if parameter.grad is not None) ** 0.5
    trainer.model.zero_grad()
    trainer.model.train()
    return {"loss": loss.item(), "grad_norm": norm}


def per_1000_tokens(step: dict) -> dict:
    """The step's phases as seconds for 1,000 response tokens."""
    return {
        name: value if name == "tokens" else [value[0] * 1000 / step["tokens"], value[1] * 1000 / step["tokens"], value[2]]
        for name, value in step.items()
    }


def median_seconds(pairs: list) -> dict[str, float]:
    """Medians of [wall seconds, CPU seconds, ...] entries."""
    return {"wall_seconds": statistics.median(p[0] for p in pairs), "cpu_seconds": statistics.median(p[1] for p in pairs)}


def summarize(steps: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds per phase. `train` is forward, backward and optimizer; `other` is rewards, padding and advantages."""
    nothing = [0.0, 0.0, 0]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ("total", "generation", "logprobs", "train", "other")}
    for step in steps:
        total, rollout = step["total"], step["rollout"]
        generation, logprobs = step["generation"], step.get("logprobs", nothing)
        samples["total"].append((total[0], total[1]))
        samples["generation"].append((generation[0], generation[1]))
        samples["logprobs"].append((logprobs[0], logprobs[1]))
        samples["train"].append((total[0] - rollout[0], total[1] - rollout[1]))
        samples["other"].append((rollout[0] - generation[0] - logprobs[0], rollout[1] - generation[1] - logprobs[1]))
    return {name: median_seconds(pairs) for name, pairs in samples.items()}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: trl_grpo_reference.py SPEC.json RESULT.json")
    spec = read_spec(Path(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # before torch is loaded
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    import transformers
    import trl

    torch.set_num_threads(spec.threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(spec, clock, folder)
        if trainer.model.is_gradient_checkpointing:
            raise RuntimeError("TRL recomputes activations although it was told not to: the comparison would not be fair")
        check = check_numbers(trainer, spec)
        trainer.train()
    measured = clock.steps[spec.warmup_steps :]
    result = {
        "spec": {**asdict(spec), "prompts": [len(prompt) for prompt in spec.prompts]},
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "check": check,
        "median": summarize([per_1000_tokens(step) for step in measured] if spec.varied else measured),
        "num_logprob_passes": measured[0].get("logprobs", [0, 0, 0])[2],
        "generated_tokens_per_step": statistics.mean(step["tokens"] for step in measured),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steps": measured,
    }
    Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")
    for name, seconds in result["median"].items():
        print(f"trl {name:<12} wall {seconds['wall_seconds']:8.3f} s   cpu {seconds['cpu_seconds']:8.3f} s")


if __name__ == "__main__":
    main()
