"""Dynamic fine-tuning (Wu et al. 2025, 2508.05629): SFT whose tokens are weighted by their own probability, without its gradient."""

from dataclasses import replace
from pathlib import Path

from aligner.algorithms import sft
from aligner.loop.loop import Built
from aligner.telemetry.metrics import Mean
from aligner.types import LabeledBatch, LossOutput, TokenOutputs


def dft_loss(outputs: TokenOutputs, batch: LabeledBatch) -> LossOutput:
    """-sg(p) log p, summed over the tokens of the mask, and their count. Reads outputs.logprobs [B, S]."""
    logprobs = outputs.logprobs * batch.loss_mask
    total, count = -(logprobs.detach().exp() * logprobs).sum(), batch.loss_mask.sum()
    return LossOutput(total=total, count=count, metrics={"sft/loss": Mean(total=-logprobs.detach().sum(), count=count)})


class DFT(sft.SFT):
    """SFT's data and validation with another loss."""

    loss = staticmethod(dft_loss)


def build(job) -> Built:
    """`job` is an aligner.jobs.trains.TrainerJob."""
    train, validation = job.load(sft.load_supervised)
    policy = job.policy()
    return Built(algorithm=DFT(job.config.algorithm, policy, train=train, validation=validation, **job.common), model=policy.model)


RECIPE = replace(sft.RECIPE, name="dft", build=build, conf=Path(__file__).parent / "conf")
