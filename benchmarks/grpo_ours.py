"""Our side of the GRPO comparison: time steps of the `GRPO` algorithm on given weights and prompts, phases apart.

    <python of this project's environment> benchmarks/grpo_ours.py SPEC.json RESULT.json

SPEC.json and RESULT.json have the fields of `trl_grpo_reference.py`. The parts are the ones that a `train_grpo.py` job is made of: session,
policy, reference, engine, reward function, algorithm; nothing is special to the benchmark but the clock and the token-id prompts. Unless
`varied`, no stop token exists here, so every response has exactly `max_new_tokens` tokens, as on TRL's side. Rows are packed into
micro-batches of as many tokens as TRL's have with padding, and share their prompts; TRL has neither for GRPO.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from random_model import EOS
from trl_grpo_reference import Clock as PhaseClock, Spec, fixed_batch, median_seconds, per_1000_tokens, read_spec

from aligner.algorithms.grpo import GRPO, GRPOConfig, TrainGRPO
from aligner.data.order import EpochSampler
from aligner.loop.loop import Clock
from aligner.models.config import Dtype, ModelConfig
from aligner.models.training.optimizer import Decay, OptimizerConfig
from aligner.online.collect import Scorers
from aligner.online.task import OnlineTask, Validation
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.run.settings import RunConfig
from aligner.servers.components import RewardConfig
from aligner.types import PolicyBatch, Prompt, RolloutBatch, SamplingConfig

PHASES = {"generate": "generation", "ref_logprobs": "logprobs", "train": "train"}  # ours -> the comparison's


class CPUClock(Clock):
    """The algorithm's clock, which also takes CPU seconds, under the comparison's names."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self.clock = clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name), self.clock.phase(PHASES[name]):
            yield


class CountedReference:
    """A reference policy that counts its passes."""

    def __init__(self, reference) -> None:
        self.reference = reference
        self.num_passes = 0

    def logprobs(self, batch: RolloutBatch):
        self.num_passes += 1
        return self.reference.logprobs(batch)


def text_of(tokens: Sequence[int]) -> str:
    """Token ids as text: the models of the comparison have no tokenizer."""
    return " ".join(map(str, tokens))


def even_tokens(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """As TRL's side: the fraction of even token ids."""
    return [sum(int(token) % 2 == 0 for token in text.split()) / len(text.split()) for text in responses]


def make_config(spec: Spec, folder: str) -> TrainGRPO:
    """The settings that TRL's side has, in this project's names."""
    rows = len(spec.prompts) * spec.group_size
    longest = max(map(len, spec.prompts)) + spec.max_new_tokens
    tokens = (spec.micro_batch_size or rows) * longest
    model = ModelConfig(path=spec.model, dtype=Dtype(spec.dtype), packing=True, share_prompts=True, micro_batch_tokens=tokens)
    return TrainGRPO(
        run=RunConfig(directory=folder, seed=spec.seed, num_threads=spec.threads),
        model=model,
        optimizer=OptimizerConfig(
            lr=spec.learning_rate,
            min_lr=spec.learning_rate,
            decay=Decay.constant,
            warmup_steps=0,
            weight_decay=0.0,
            beta2=0.999,
            clip_grad=1.0,
        ),
        rollout=RolloutConfig(sampling=SamplingConfig(temperature=spec.temperature, max_response_length=spec.max_new_tokens)),
        algorithm=GRPOConfig(
            prompts_per_step=len(spec.prompts), group_size=spec.group_size, mini_batch_size=rows, kl_coef=spec.beta, clip_eps_high=0.2
        ),
        reward=RewardConfig(),
    )


def make_algorithm(config: TrainGRPO, spec: Spec, topology, vision=None, extras: Sequence[dict] = (), tokenizer=None) -> GRPO:
    """GRPO over a policy with the model's weights. `vision` reads the images in the prompts' `extras`. Imports Megatron-Core."""
    from aligner.models import create
    from aligner.models.training.policy import ReferencePolicy
    from aligner.models.training.trainable import Training
    from aligner.rewards.local import FunctionReward
    from aligner.rollout.create import create_engine

    sampling = config.rollout.sampling
    architecture = create.read_architecture(config.model, vocab_size=0)
    training = Training(
        optimizer=config.optimizer,
        total_steps=spec.warmup_steps + spec.steps,
        micro_batch_size=config.model.micro_batch_size,
        micro_batch_tokens=config.model.micro_batch_tokens,
        packing=config.model.packing,
        share_prompts=config.model.share_prompts,
        temperature=sampling.temperature,
        sees=vision,
    )
    policy = create.create_policy(config.model, architecture, ParallelConfig(), topology, training)
    task = OnlineTask(
        engine=create_engine(policy, config.rollout, tokenizer=tokenizer, eos_id=EOS if spec.varied else -1),
        reference=CountedReference(ReferencePolicy(policy)) if config.algorithm.kl_coef else None,
        judges=Scorers(reward=FunctionReward(even_tokens, text_of, 60.0)),
        validation=Validation(sampling=sampling),
        topology=topology,
        train=[
            Prompt(id=index, tokens=tuple(tokens), source=f"prompt {index}", extras=extras[index] if extras else {})
            for index, tokens in enumerate(spec.prompts)
        ],
        order=EpochSampler(len(spec.prompts), config.algorithm.prompts_per_step, spec.seed),
        decode=text_of,
        seed=spec.seed,
        max_response_length=sampling.max_response_length,
    )
    return GRPO(config.algorithm, policy, task)


def check_numbers(algorithm: GRPO, spec: Spec, extras: dict | None = None) -> dict[str, float]:
    """Loss and gradient norm of the fixed batch (with these `extras`) that TRL's side computes too; no optimizer step."""
    import torch

    from aligner.models.training import forward
    from aligner.telemetry.metrics import values

    fixed = fixed_batch(spec)
    prompts, completions = (torch.tensor(fixed[name]) for name in ("prompts", "completions"))
    tokens = torch.cat([prompts, completions], dim=1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, prompts.shape[1] :] = True
    batch = PolicyBatch(
        tokens=tokens,
        lengths=torch.full((tokens.shape[0],), tokens.shape[1]),
        loss_mask=mask,
        old_logprobs=None,
        advantages=torch.tensor(fixed["advantages"])[:, None] * mask,
        ref_logprobs=torch.full(tokens.shape, fixed["ref_logprob"]) * mask,
        extras=extras or {},
    )
    policy: Any = algorithm.policy
    model = policy.model
    for runner in model.runners:
        runner.zero_grad_buffer()
    parts = model._micro_batches(batch, model._plan(batch))
    metrics = forward.forward_backward(model.runners, parts, policy._outputs, algorithm.loss(), counts=True)
    norm = sum(float(parameter.main_grad.norm()) ** 2 for chunk in model.chunks for parameter in chunk.parameters()) ** 0.5
    return {"loss": values(metrics)["policy/loss"], "grad_norm": norm}


def run(spec: Spec, config: TrainGRPO, make=make_algorithm, extras: dict | None = None) -> dict:
    """Warm up, time the steps of the algorithm that is made of config, spec and topology, and return the result."""
    import torch

    from aligner.parallel.mcore import version
    from aligner.run.session import open_session

    clock = PhaseClock()
    with open_session(config, config.run, config.parallel, component="actor") as session:
        algorithm = make(config, spec, session.topology)
        check = check_numbers(algorithm, spec, extras)
        for step in range(1, spec.warmup_steps + spec.steps + 1):
            with clock.phase("total"):
                result = algorithm.step(step, CPUClock(clock))
            clock.current["tokens"] = round(result.metrics["rollout/response_length"] * config.algorithm.rollouts_per_step)
            clock.end_step()
        algorithm.task.judges.reward.close()
    reference = algorithm.task.reference
    steps = clock.steps[spec.warmup_steps :]
    return {
        "versions": {"megatron-core": version, "torch": torch.__version__, "python": sys.version.split()[0]},
        "check": check,
        "num_logprob_passes": 0 if reference is None else reference.num_passes // len(clock.steps),
        "generated_tokens_per_step": statistics.mean(step["tokens"] for step in steps),
        "steps": [per_1000_tokens(step) for step in steps] if spec.varied else steps,
    }


def summarize(steps: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Median seconds per phase; `other` is what the step does besides. The reward function runs beside generation and is counted there."""
    for step in steps:
        step.setdefault("logprobs", [0.0, 0.0, 0])
        parts = [step[name] for name in ("generation", "logprobs", "train")]
        step["other"] = [step["total"][i] - sum(part[i] for part in parts) for i in (0, 1)]
    return {name: median_seconds([step[name] for step in steps]) for name in ("total", "generation", "logprobs", "train", "other")}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: grpo_ours.py SPEC.json RESULT.json")
    spec = read_spec(Path(sys.argv[1]))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(spec, make_config(spec, folder))
    write_result(Path(sys.argv[2]), spec, result, started)


def write_result(path: Path, spec: Spec, result: dict, started: float) -> None:
    """Write what `run` returned, with medians and what the process took since `started`."""
    result |= {
        "spec": {**asdict(spec), "prompts": [len(prompt) for prompt in spec.prompts]},
        "median": summarize(result["steps"]),
        "whole_run_seconds": time.perf_counter() - started,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
