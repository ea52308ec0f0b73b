"""Loads Hugging Face models into one layout, compares log-probs with transformers' and the exported tensors with those that were read.

usage: weights_job.py PARALLEL_JSON FOLDER NAME...

FOLDER holds one directory per model, `expected.pt` (log-probs by model name) and `tokens.pt`; each model is written again to
FOLDER/out/NAME. An assertion that fails on any rank fails the job.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from aligner.parallel import launch

TOLERANCE = 2e-5


def batch_of(tokens: torch.Tensor):
    from aligner.types import LabeledBatch

    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return LabeledBatch(tokens=tokens, lengths=torch.full((tokens.shape[0],), tokens.shape[1]), loss_mask=mask)


def can_run(parallel) -> bool:
    """gloo gathers only parts of one size; with expert tensor and expert parallelism together Megatron-Core sends others."""
    return torch.cuda.is_available() or parallel.ep == 1 or parallel.etp == 1


def stream_without_hoarding(chunks) -> list[tuple[str, torch.Tensor]]:
    """Copies of the exported tensors; an export itself holds those of one parameter (at most three) besides this rank's own."""
    from aligner.models.weights import export_hf

    own = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}
    copies, seen = [], []
    for key, tensor in export_hf(chunks):
        copies.append((key, tensor.clone()))
        if tensor.untyped_storage().data_ptr() not in own:
            seen.append(weakref.ref(tensor))
        deadline = time.monotonic() + 10  # gloo's thread may hold a tensor a little longer than the call that waited for it
        while (alive := sum(reference() is not None for reference in seen)) > 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert alive <= 3
    return copies


def check_policy(folder: Path, name: str, dtype, parallel, topology) -> None:
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.families import weight_names
    from aligner.models.training.trainable import Training
    from aligner.models.weights import save_hf

    config = ModelConfig(path=str(folder / name), make_vocab_divisible_by=8, dtype=dtype)
    architecture = read_architecture(config, vocab_size=0)
    policy = create_policy(config, architecture, parallel, topology, Training(optimizer=None, micro_batch_size=2))
    source = {key: t.to(policy.chunks[0].config.params_dtype) for key, t in load_file(folder / name / "model.safetensors").items()}
    streamed = stream_without_hoarding(policy.chunks)
    table = weight_names(architecture)
    assert [key for key, _ in streamed] == [hf for key in table.names(architecture) for hf in table.find(key).hf_names], name
    assert {key for key, _ in streamed} == source.keys(), name
    for key, tensor in streamed:
        assert tensor.dtype == source[key].dtype and torch.equal(tensor, source[key]), f"{name}: {key}"
    if dtype != Dtype.float32:
        return
    save_hf(policy.chunks, folder / "out" / name, writer=dist.get_rank() == 0)
    if can_run(parallel):
        logprobs = policy.logprobs(batch_of(torch.load(folder / "tokens.pt")))
        difference = (logprobs - torch.load(folder / "expected.pt")[name]).abs().max()
        assert difference < TOLERANCE, f"{name}: {difference}"


def check_value_model(folder: Path, name: str, parallel, topology) -> None:
    """A head that the files lack, written, and read again into the same layout."""
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.create import create_value_model, read_architecture
    from aligner.models.training.trainable import Training
    from aligner.models.weights import export_hf, save_hf

    path = folder / name
    config = ModelConfig(path=str(path), make_vocab_divisible_by=8, dtype=Dtype.float32)
    architecture = read_architecture(config, vocab_size=0)
    first = create_value_model(config, architecture, parallel, topology, Training(optimizer=None, micro_batch_size=2))
    for chunk in first.model.chunks:
        if chunk.post_process:
            with torch.no_grad():
                chunk.score_head.bias.fill_(0.25)
    target = folder / "out" / f"value_{name}"
    save_hf(first.model.chunks, target, writer=dist.get_rank() == 0)
    dist.barrier()
    config = ModelConfig(path=str(target), make_vocab_divisible_by=8, dtype=Dtype.float32)
    again = create_value_model(config, architecture, parallel, topology, Training(optimizer=None, micro_batch_size=2))
    if can_run(parallel):
        batch = batch_of(torch.load(folder / "tokens.pt"))
        values = first.values(batch)
        assert values.abs().max() > 0.1 and torch.equal(again.values(batch), values)
    names = [key for key, _ in export_hf(again.model.chunks)]
    assert names[-2:] == ["score_head.bias", "score_head.weight"] and "lm_head.weight" not in names


def check_reward_model(folder: Path, name: str, parallel, topology) -> None:
    """Exported from this layout for transformers to score with; what it scores here is beside it."""
    from aligner.models.config import Dtype, ModelConfig
    from aligner.models.create import create_reward_model, read_architecture
    from aligner.models.modules.scalar_head import ScalarHead
    from aligner.models.training.trainable import Training
    from aligner.models.weights import save_hf
    from aligner.types import TokenBatch

    config = ModelConfig(path=str(folder / name), make_vocab_divisible_by=8, dtype=Dtype.float32)
    head, frozen = ScalarHead(outputs=("good", "long")), Training(optimizer=None, micro_batch_size=2)
    reward = create_reward_model(config, read_architecture(config, vocab_size=0), parallel, topology, frozen, head=head)
    target = folder / "out" / f"reward_{name}"
    save_hf(reward.model.chunks, target, writer=dist.get_rank() == 0)
    tokens = torch.load(folder / "tokens.pt")
    scores = reward.scores(TokenBatch(tokens=tokens, lengths=torch.full((tokens.shape[0],), tokens.shape[1])))
    if dist.get_rank() == 0:
        torch.save(scores, target / "scores.pt")


def main() -> None:
    settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    launch.initialize("gloo", timeout_seconds=60, fingerprint="weights")
    from aligner.models import weights
    from aligner.models.config import Dtype
    from aligner.parallel.topology import ParallelConfig, initialize

    weights.SLICE_BYTES = 1000  # the columns of these small tensors are gathered in several slices too
    parallel = ParallelConfig(**settings)
    topology = initialize(parallel, seed=11)
    layouts = {name: parallel for name in sys.argv[3:]}
    layouts |= {name: replace(parallel, etp=1) for name in layouts if name not in ("mixtral", "qwen3_moe")}  # no experts to split
    for name, layout in layouts.items():
        check_policy(folder, name, Dtype.float32, layout, topology)
    last = sys.argv[-1]
    check_policy(folder, last, Dtype.bfloat16, layouts[last], topology)
    check_value_model(folder, last, layouts[last], topology)
    if "llama" in layouts:
        check_reward_model(folder, "llama", layouts["llama"], topology)
    launch.shutdown()


if __name__ == "__main__":
    main()
