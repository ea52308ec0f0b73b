"""One run of `asynchronous.py`: GRPO on given weights and prompts, on-policy or asynchronous.

    python benchmarks/asynchronous_ours.py SPEC.json RESULT.json

The parts are those of a `train_grpo.py` job; special are the token-id prompts and the reward: the part of tokens in the lower half of the
vocabulary, which a few dozen steps raise from a half to nearly 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from asynchronous import Spec

from aligner.algorithms.grpo import GRPO, GRPOConfig, TrainGRPO
from aligner.data.order import EpochSampler
from aligner.loop.loop import Clock
from aligner.losses.correction import Correction, CorrectionConfig
from aligner.models.config import ModelConfig
from aligner.models.training.optimizer import Decay, OptimizerConfig
from aligner.online.collect import Scorers
from aligner.online.task import OnlineTask, Validation
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import AsynchronousConfig, RolloutConfig
from aligner.run.settings import RunConfig
from aligner.types import Prompt, SamplingConfig

NUM_AVERAGED = 4  # steps whose rewards are averaged, at either end


def make_config(spec: Spec, folder: str) -> TrainGRPO:
    """The run's settings; rows are packed and share their prompts."""
    tokens = spec.prompts_per_step * spec.group_size * (len(spec.prompts[0]) + spec.response_length)
    ahead = AsynchronousConfig(max_staleness=spec.max_staleness, recompute=spec.recompute)
    correction = CorrectionConfig(kind=Correction.tis if spec.max_staleness else Correction.none)
    rate = {"lr": spec.learning_rate, "min_lr": spec.learning_rate, "decay": Decay.constant, "warmup_steps": 0, "weight_decay": 0.0}
    sampling = SamplingConfig(max_response_length=spec.response_length)
    return TrainGRPO(
        run=RunConfig(directory=folder, seed=spec.seed, num_threads=spec.threads),
        model=ModelConfig(path=spec.model, packing=True, share_prompts=True, micro_batch_tokens=tokens),
        optimizer=OptimizerConfig(**rate),
        rollout=RolloutConfig(sampling=sampling, max_batch_size=spec.batch, asynchronous=ahead),
        algorithm=GRPOConfig(
            prompts_per_step=spec.prompts_per_step,
            group_size=spec.group_size,
            mini_batch_size=spec.prompts_per_step * spec.group_size,
            kl_coef=0.0,
            correction=correction,
        ),
    )


def make_algorithm(config: TrainGRPO, spec: Spec, topology) -> GRPO:
    """GRPO over a policy with the model's weights. Imports Megatron-Core."""
    from aligner.models import create
    from aligner.models.training.trainable import Training
    from aligner.online.async_rollout_source import AsyncRolloutSource
    from aligner.rewards.local import FunctionReward
    from aligner.rollout.create import create_engine

    architecture = create.read_architecture(config.model, vocab_size=0)

    def lower_half(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        time.sleep(spec.reward_seconds)
        return [sum(2 * int(token) < architecture.vocab_size for token in text.split()) / len(text.split()) for text in responses]

    def text_of(tokens) -> str:
        return " ".join(map(str, tokens))

    training = Training(
        optimizer=config.optimizer,
        total_steps=spec.steps,
        micro_batch_tokens=config.model.micro_batch_tokens,
        packing=True,
        share_prompts=True,
    )
    policy = create.create_policy(config.model, architecture, ParallelConfig(), topology, training)
    engine = create_engine(policy, config.rollout, eos_id=-1)
    task = OnlineTask(
        engine=engine,
        reference=None,
        judges=Scorers(reward=FunctionReward(lower_half, text_of, 60.0)),
        validation=Validation(sampling=config.rollout.sampling),
        topology=topology,
        train=[Prompt(id=index, tokens=tuple(tokens), source=f"prompt {index}") for index, tokens in enumerate(spec.prompts)],
        order=EpochSampler(len(spec.prompts), spec.prompts_per_step, spec.seed),
        decode=text_of,
        seed=spec.seed,
        max_response_length=spec.response_length,
    )
    settings = config.rollout.asynchronous
    rounds = AsyncRolloutSource(task, spec.group_size, settings, engine.gate, last=spec.steps) if settings.max_staleness else None
    return GRPO(config.algorithm, policy, task, rounds)


def thread_seconds() -> dict[str, float]:
    """CPU seconds of the main thread, and of the one that samples where there is one."""
    sampler = [thread.ident for thread in threading.enumerate() if thread.name.startswith("rollouts")]
    return {"main": time.thread_time(), "sampler": sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in sampler)}


def run(spec: Spec, folder: str) -> dict[str, float]:
    """Train, and return the figures."""
    from aligner.run.session import open_session

    config = make_config(spec, folder)
    rewards, waited, staleness, versions = [], [], [], []
    with open_session(config, config.run, config.parallel, component="actor") as session:
        algorithm = make_algorithm(config, spec, session.topology)
        for step in range(1, spec.steps + 1):
            if step == spec.warmup_steps + 1:
                started, cpu_started = time.perf_counter(), thread_seconds()
            clock = Clock()
            metrics = algorithm.step(step, clock).metrics
            rewards.append(metrics["rollout/reward"])
            waited.append(clock.seconds["time/generate"])
            staleness.append(metrics["rollout/staleness"] if spec.max_staleness else 0.0)
            versions.append(metrics["rollout/versions"] if spec.max_staleness else 1.0)
        seconds = time.perf_counter() - started
        cpu_seconds = {name: value - cpu_started[name] for name, value in thread_seconds().items()}
        algorithm.task.engine.shutdown()
        algorithm.task.judges.reward.close()
    count = spec.steps - spec.warmup_steps
    return {
        "seconds_per_step": seconds / count,
        "trainer_cpu_seconds_per_step": cpu_seconds["main"] / count,
        "sampler_cpu_seconds_per_step": cpu_seconds["sampler"] / count,
        "waited_per_step": statistics.mean(waited[spec.warmup_steps :]),
        "first_reward": statistics.mean(rewards[:NUM_AVERAGED]),
        "last_reward": statistics.mean(rewards[-NUM_AVERAGED:]),
        "staleness": statistics.mean(staleness[spec.warmup_steps :]),
        "versions": statistics.mean(versions[spec.warmup_steps :]),
    }


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: asynchronous_ours.py SPEC.json RESULT.json")
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    with tempfile.TemporaryDirectory() as folder:
        result = run(spec, folder)
    Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
