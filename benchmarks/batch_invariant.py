"""What `model.batch_invariant` costs on one CPU thread, and what it is for: CPU time of generation, log-prob pass and training step with it
and without, and how far sampler and trainer are from each other.

    python benchmarks/batch_invariant.py [--size small] [--prompts 8] [--group 4] [--prompt 64] [--response 64]

The ordinary engine computes in torch here (`rollout.kernels=torch`), or with its compiled kernels too (`auto`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from random_model import EOS, SIZES, random_prompts, write_model

ROUNDS = 2  # of each, one after the other; the least counts


def timed(action) -> tuple[float, object]:
    """(CPU seconds, result)."""
    started = time.process_time()
    result = action()
    return time.process_time() - started, result


def measure(path: Path, prompts, topology, response: int, *, batch_invariant: bool, kernels: str) -> dict[str, float]:
    """CPU seconds of each phase, and the largest gap between the two log-probs of a token."""
    import torch

    from aligner.data.collate import rollout_batch
    from aligner.losses.sft import sft_loss
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel.topology import ParallelConfig
    from aligner.rollout.config import Kernels, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.types import SamplingConfig

    config = ModelConfig(path=str(path), batch_invariant=batch_invariant)
    training = Training(optimizer=OptimizerConfig(), micro_batch_size=4)
    policy = create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(), topology, training)
    sampling = SamplingConfig(max_response_length=response, min_response_length=response)
    rollout = RolloutConfig(sampling=sampling, max_batch_size=len(prompts), kernels=Kernels(kernels))
    engine = create_engine(policy, rollout, eos_id=EOS)
    seeds = list(range(len(prompts)))
    generation, rollouts = timed(lambda: [one for part in engine.generate(prompts, seeds) for one in part])
    batch = rollout_batch(rollouts, 0)
    logprob_pass, logprobs = timed(lambda: policy.logprobs(batch))
    gap = float((logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max())
    step, _ = timed(lambda: policy.train_step(batch, sft_loss))
    assert not batch_invariant or torch.equal(logprobs, batch.rollout_logprobs)
    return {"generation": generation, "logprobs": logprob_pass, "train_step": step, "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    for name, default in (("prompts", 8), ("group", 4), ("prompt", 64), ("response", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    import torch

    from aligner.parallel import launch
    from aligner.parallel.topology import ParallelConfig, initialize
    from aligner.types import Prompt

    torch.set_num_threads(1)
    launch.initialize("gloo", timeout_seconds=60, fingerprint="benchmark", environ={"ALIGNER_LAUNCH": "single"})
    topology, size = initialize(ParallelConfig(), seed=1), SIZES[options.size]
    rows = random_prompts(size, count=options.prompts, length=options.prompt, seed=2)
    unique = [Prompt(id=number, tokens=tuple(row), source="random") for number, row in enumerate(rows)]
    prompts = [prompt for prompt in unique for _ in range(options.group)]
    kinds = {"invariant": (True, "torch"), "ordinary, torch": (False, "torch"), "ordinary, kernels": (False, "auto")}
    with tempfile.TemporaryDirectory() as directory:
        write_model(size, Path(directory), positions=options.prompt + options.response, seed=3)
        runs = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, (batch_invariant, kernels) in kinds.items():
                run = measure(Path(directory), prompts, topology, options.response, batch_invariant=batch_invariant, kernels=kernels)
                runs[kind].append(run)
    least = {kind: {name: min(run[name] for run in found) for name in found[0]} for kind, found in runs.items()}
    print(json.dumps(least, indent=1))
    for other in list(kinds)[1:]:
        ratios = {name: round(least["invariant"][name] / least[other][name], 2) for name in ("generation", "logprobs", "train_step")}
        print(f"invariant / {other}: {ratios}")
    launch.shutdown()


if __name__ == "__main__":
    main()
