"""The actors that learn from which of their samples are the better ones: online DPO and rejection sampling."""

from __future__ import annotations

from aligner.algorithms.online_dpo import OnlineDPO
from aligner.algorithms.rejection_sampling import RejectionSampling
from aligner.jobs import columns
from aligner.jobs.announce import announced
from aligner.jobs.lengths import with_lengths
from aligner.jobs.moving_reference import CheckpointedReference
from aligner.jobs.online import build_task
from aligner.jobs.sampling_ahead import rounds_ahead
from aligner.jobs.session import session
from aligner.jobs.training import train_to_end
from aligner.schemas import TrainOnlineDPO, TrainRejectionSampling


def train_online_dpo(config: TrainOnlineDPO) -> int:
    """DPO on the policy's own samples; the reference is the model that the run starts from, or follows. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        settings = config.algorithm
        task, policy, tokenizer = build_task(here, config, with_reference=settings.needs_reference, num_prompts=settings.prompts_per_step)
        if publication is not None:
            publication.ready()
        frozen = task.reference
        reference = None if frozen is None else CheckpointedReference(here, policy, frozen, verify=config.checkpoint.verify)
        rounds = rounds_ahead(here, config, task, group_size=settings.group_size)
        algorithm = OnlineDPO(settings, policy, task, reference, rounds)
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.ONLINE_DPO)
        task.engine.shutdown()
        task.reward.close()
    return code


def train_rejection_sampling(config: TrainRejectionSampling) -> int:
    """Supervised fine-tuning on the best of the policy's own samples. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        config = with_lengths(config)
        task, policy, tokenizer = build_task(here, config, with_reference=False, num_prompts=config.algorithm.prompts_per_step)
        if publication is not None:
            publication.ready()
        rounds = rounds_ahead(here, config, task, group_size=config.algorithm.group_size)
        algorithm = RejectionSampling(config.algorithm, policy, task, rounds)
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=tokenizer, shown=columns.REJECTION_SAMPLING)
        task.engine.shutdown()
        task.reward.close()
    return code
