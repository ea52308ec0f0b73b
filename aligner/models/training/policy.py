"""Models by what they compute: the policy (log-probs), the value model or critic (values), the reward model (scores)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from aligner.models.modules import heads
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.scalar_head import HeadGradient, ScalarHead
from aligner.models.training.forward import MicroBatch
from aligner.models.training.offload import LockedMemory
from aligner.models.training.trainable import Field, TrainableModel
from aligner.models.weights import export_hf
from aligner.parallel import platform
from aligner.protocols import Added, Loss
from aligner.telemetry.metrics import Metric
from aligner.types import (
    Batch,
    DistillationBatch,
    LabeledBatch,
    MaskedBatch,
    PreferenceBatch,
    Routes,
    StepBatch,
    TokenBatch,
    TokenOutputs,
    ValueBatch,
)


class _Trained(ABC):
    """A model with its outputs. Methods are collective over the component."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    def train_step(self, batch: Batch, loss: Loss, added: Sequence[Added] = ()) -> dict[str, Metric]:
        """One optimizer step on a loss of the model's outputs, and those `added`. Returns metrics over the global batches."""
        return self.model.train_step(batch, self._outputs, loss, added)

    def averaged(self) -> AbstractContextManager[None]:
        """See `TrainableModel.averaged`."""
        return self.model.averaged()

    @abstractmethod
    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        pass


class MegatronPolicy(_Trained):
    """`aligner.protocols.Policy` on a Megatron-Core language model."""

    def __init__(self, model: TrainableModel, *, temperature: float = 1.0) -> None:
        super().__init__(model)
        self.chunks, self.temperature = model.chunks, temperature

    @property
    def module(self) -> Chunk:
        """The whole model of a rank that holds it in one chunk."""
        return self.model.module

    @property
    def version(self) -> int:
        return self.model.version

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """log pi of the tokens in `loss_mask`, float32 [B, S] on the CPU, 0 elsewhere; no gradient, no dropout."""
        return self.model.run(batch, self._outputs, "logprobs")

    def per_token(self, batch: MaskedBatch, *names: str) -> dict[str, Tensor]:
        """What one pass gives of the tokens in `loss_mask`, as in `logprobs`: `logprobs`, `entropy` (in nats, of the distributions which
        they are of) and, of a policy with a head of values, the `values` of the states in which they were chosen."""
        return self.model.run_fields(batch, self._outputs, dict.fromkeys(names, Field(shape=tuple(batch.tokens.shape[1:]))))

    def topk(self, batch: MaskedBatch, k: int, *, below: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens in place of each in `loss_mask`, int64 [B, S, k], and their log-probs, float32; both 0 elsewhere.

        Of the tokens with ids less than `below`: a model may have embeddings that stand for none. On the CPU, likeliest first; no gradient,
        no dropout. Raises ConfigError where there are fewer tokens than `k`.
        """

        def outputs(hidden: Tensor, part: MicroBatch) -> TokenOutputs:
            module, mask = self.chunks[-1], part.host.loss_mask
            return heads.topk_outputs(module, hidden, part.placement, mask=mask, k=k, below=below, temperature=self.temperature)

        shape = (batch.tokens.shape[1], k)
        found = self.model.run_fields(
            batch, outputs, {"topk_tokens": Field(shape=shape, dtype=torch.int64), "topk_logprobs": Field(shape=shape)}
        )
        return found["topk_tokens"], found["topk_logprobs"]

    def named_logprobs(self, batch: DistillationBatch) -> TokenOutputs:
        """What a loss of a DistillationBatch reads, without gradient: logprobs, and topk_logprobs of the teacher's tokens, on the CPU."""
        shape = tuple(batch.teacher_tokens.shape[1:])
        return TokenOutputs(
            **self.model.run_fields(batch, self._outputs, {"logprobs": Field(shape=shape[:1]), "topk_logprobs": Field(shape=shape)})
        )

    def export_weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Stream of (Hugging Face name, full tensor), one at a time, with adapters in the weights if `merged`."""
        return export_hf(self.chunks, merged=merged)

    def sleep(self) -> None:
        """Move what only training needs to host memory until the next `train_step`, where the optimizer's config asks for it."""
        self.model.sleep()

    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        module, batch, mask = self.chunks[-1], part.batch, part.host.loss_mask
        common = {"tokens": batch.tokens, "mask": mask, "temperature": self.temperature if part.added is None else 1.0}
        if isinstance(batch, DistillationBatch):
            return heads.named_outputs(module, hidden, part.placement, named=batch.teacher_tokens, **common)
        outputs = heads.token_outputs(module, hidden, part.placement, **common)
        if module.value_gradient is None or part.added is not None:
            return outputs
        seen = hidden.detach() if module.value_gradient is HeadGradient.detached else hidden
        return replace(outputs, values=heads.value_outputs(module, seen, part.placement, mask=mask).values)


class ReferencePolicy:
    """The policy as it was at construction, or at `renew`: its weights wait in host memory and are put in the module's place for a pass.

    One set of activations and one module serve both; the frozen copy costs host memory only, and device memory during the pass. Of a policy
    with adapters only they are kept, since nothing else changes: new ones have B = 0, so that the reference is the adapters switched off.
    `whole`: everything is kept, for weights that training leaves alone and `restore` does not. Its routers choose their own experts.
    """

    def __init__(self, policy: MegatronPolicy, *, whole: bool = False) -> None:
        self._policy = policy
        self._whole = whole
        self._memory = LockedMemory()
        self._weights = self._memory.like(self._parameters())
        self.renew()

    def logprobs(self, batch: MaskedBatch) -> Tensor:
        """As `MegatronPolicy.logprobs`, under the frozen weights."""
        return self.logprobs_of([batch])[0]

    def logprobs_of(self, batches: Sequence[MaskedBatch]) -> list[Tensor]:
        """As `logprobs` of each batch; the frozen weights are brought once."""
        with self._in_place():
            return [self._policy.logprobs(_own_routes(batch)) for batch in batches]

    def topk(self, batch: MaskedBatch, k: int, *, below: int) -> tuple[Tensor, Tensor]:
        """As `MegatronPolicy.topk`, under the frozen weights."""
        with self._in_place():
            return self._policy.topk(_own_routes(batch), k, below=below)

    def renew(self) -> None:
        """Freeze the policy's current weights instead."""
        for frozen, parameter in zip(self._weights, self._parameters(), strict=True):
            frozen.copy_(parameter.detach(), non_blocking=True)
        platform.synchronize()

    def restore(self, load: Callable[[Sequence[Chunk]], None]) -> None:
        """Freeze the weights that `load` fills the module with instead; the policy's own are untouched. Collective where `load` is."""
        with self._in_place():
            load(self._policy.chunks)
            self.renew()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        parameters = self._parameters()
        current = [p.data for p in parameters]
        try:
            for parameter, frozen in zip(parameters, self._weights, strict=True):
                parameter.data = frozen.to(parameter.device, non_blocking=True)
            yield
        finally:
            with torch.no_grad():
                for parameter, data in zip(parameters, current, strict=True):
                    parameter.data = data

    def _parameters(self) -> list[Tensor]:
        self._policy.model.settle()
        chunks = self._policy.chunks
        held = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad or self._whole or not chunk.lora.is_on]
        return [tensor for p in held for tensor in (p, *linear_weight(p).storage[1:])]


def _own_routes(batch: MaskedBatch) -> MaskedBatch:
    return replace(batch, extras={name: extra for name, extra in batch.extras.items() if name != Routes.name})


class MegatronValueModel(_Trained):
    """A critic: a transformer with a scalar head, trained on returns. Values are aligned with the token that is chosen in the state."""

    def values(self, batch: TokenBatch) -> Tensor:
        """Float32 [B, S] on the CPU; position 0 and padding are 0. No gradient."""
        return self.model.run(batch, self._outputs, "values")

    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        module, batch = self.model.chunks[-1], part.host
        if isinstance(batch, ValueBatch):
            return heads.value_outputs(module, hidden, part.placement, mask=batch.loss_mask)
        positions = torch.arange(batch.tokens.shape[1])
        mask = (positions > 0) & (positions < batch.lengths[:, None])
        return heads.value_outputs(module, hidden, part.placement, mask=mask)


ScoredBatch = TokenBatch | PreferenceBatch | LabeledBatch


class MegatronRewardModel(_Trained):
    """Scores of whole sequences (prompt and response), or of their steps, by a linear head on the last token, the mean of all, or the ends
    of steps."""

    @property
    def head(self) -> ScalarHead:
        return self.model.chunks[-1].head

    def scores(self, batch: ScoredBatch) -> Tensor:
        """Float32 [B, K] on the CPU. No gradient."""
        return self.model.run(batch, self._outputs, "scores")

    def step_scores(self, batch: StepBatch) -> Tensor:
        """Float32 [B, S] on the CPU: of the steps that end at the tokens in `loss_mask`; 0 elsewhere. No gradient."""
        return self.model.run(batch, self._outputs, "step_scores")

    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        module, batch = self.model.chunks[-1], part.host
        if isinstance(batch, StepBatch):
            return heads.step_outputs(module, hidden, part.placement, mask=batch.loss_mask)
        return heads.score_outputs(module, hidden, part.placement, lengths=batch.lengths, width=batch.tokens.shape[1])
