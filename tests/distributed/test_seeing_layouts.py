"""Rows with no, one and two images in every layout: the single process's log-probs, losses, gradients (the tower's too) and two steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_models import assert_close, assert_metrics, exported, gradients, train_step
from model_steps import save
from own_models import VISION
from ranks import joined, laid_out
from vision_models import write_seeing
from vision_rows import Rows

from aligner.data.collate import rollout_batch
from aligner.data.tokenizer import load_tokenizer
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import policy_loss
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, Implementation, LoraConfig, LoraTarget, ModelConfig, Quantization
from aligner.models.create import create_policy, read_architecture
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.trainable import Training
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Images, PolicyBatch, Prompt, SamplingConfig
from aligner.types.batches import of_kind

SP = {"tp": 2, "sequence_parallel": True}
PACKED = {"packing": True, "micro_batch_tokens": 64}
QLORA = {"quantization": Quantization.nf4, "lora": LoraConfig(rank=4, targets=[LoraTarget(one) for one in ("qkv", "proj", "fc1", "fc2")])}
SHARED = PACKED | {"share_prompts": True}
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")  # the last has delta nets, which context parallelism does not split
MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe")
OTHERS = ("qwen2_vl", *MIXTURES)
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {  # (models, fields of ParallelConfig, of ModelConfig)
    "tp2": (NAMES, {"tp": 2}, {}),
    "tp2_sp": ((*NAMES, "qwen2_vl"), SP, {}),
    "tp2_sp_ep2": (MIXTURES, SP | {"ep": 2}, {}),
    "ep2_packed": (MIXTURES, {"ep": 2}, PACKED),
    "tp2_sp_packed_recompute": (NAMES, SP, PACKED | {"recompute": "full"}),
    "tp2_shared_prompts": (NAMES[:2], {"tp": 2}, SHARED),
    "cp2": ((*NAMES[:2], "qwen3_vl_moe"), {"cp": 2}, {}),
    "cp2_packed": ((*NAMES[:2], *OTHERS[:2]), {"cp": 2}, PACKED),
    "pp2": ((*NAMES, *OTHERS), {"pp": 2}, {}),
    "pp2_packed_recompute": (NAMES[:2], {"pp": 2}, PACKED | {"recompute": "full"}),
    "dp2": (NAMES, {}, {}),
}


def start(directory: Path, topology: Any, parallel: dict[str, Any], fields: dict[str, Any]) -> tuple[Rows, Any]:
    rows, sizes = Rows(directory.name, directory), {"make_vocab_divisible_by": 8, "logits_chunk_size": 16, "micro_batch_size": 1}
    model = ModelConfig(path=str(directory), dtype=Dtype.float32, images=True, freeze=[], **(sizes | fields))
    packed = {name: fields[name] for name in SHARED if name in fields}
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0, clip_grad=0.5, eps=1e-4, distributed=False)
    training = Training(optimizer=optimizer, total_steps=10, micro_batch_size=1, sees=rows.vision, **packed)
    return rows, create_policy(model, read_architecture(model, vocab_size=0), ParallelConfig(**parallel), topology, training)


def sample(rows: Rows, policy: Any, tp: int) -> dict[int, tuple[int, ...]]:
    """Responses to the rows, from the engine's weights in this or another layout."""
    images = [{"images": Images.of(own)} if own else {} for own in rows.images]
    prompts = [Prompt(tokens=tuple(own), id=row, source="test", extras=images[row]) for row, own in enumerate(rows.tokens)]
    sampling = SamplingConfig(max_response_length=8)
    engine = create_engine(policy, RolloutConfig(max_batch_size=3, tp=tp, sampling=sampling), eos_id=rows.end)
    own = {one.prompt.id: tuple(one.response) for part in engine.generate(prompts, list(range(len(prompts))), sampling) for one in part}
    return {row: response for part in gather_objects(own) for row, response in part.items()}


def train(directory: Path, topology: Any, parallel: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    rows, policy = start(directory, topology, parallel, fields)
    found: dict[str, Any] = {"logprobs": policy.logprobs(rows.batch()), "first": train_step(policy, rows.batch(), sft_loss)}
    found["gradients"] = gradients(policy.model.chunks)
    found |= {"second": train_step(policy, rows.batch(), sft_loss), "weights": exported(policy.model.chunks)}
    return found | {"responses": [sample(rows, policy, tp) for tp in (0, *([1] if parallel.get("tp") else []))]}


def in_every_layout(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    with joined():
        for layout, (names, parallel, fields) in LAYOUTS.items():
            with laid_out(parallel, seed=1) as topology:
                found |= {(layout, name): train(folder / name, topology, parallel, fields) for name in names}
        return found if dist.get_rank() == 0 else {}


def packed(folder: Path) -> dict[str, Any]:
    with joined(), laid_out({"tp": 2}, seed=1) as topology:
        found = train(folder / "nf4", topology, {"tp": 2}, QLORA)
        return found if dist.get_rank() == 0 else {}


def uneven(directory: Path, topology: Any) -> dict[str, Any]:
    """Two steps on six rows, of which three replicas get three images, none, and two."""
    rows, policy = start(directory, topology, {}, {"micro_batch_size": 2})
    for name in ("tokens", "images"):
        own = getattr(rows, name)
        setattr(rows, name, [own[row] for row in (0, 2, 1, 1, 3, 3)])
    found: dict[str, Any] = {"first": train_step(policy, rows.batch(), sft_loss), "second": train_step(policy, rows.batch(), sft_loss)}
    return found | {"weights": exported(policy.model.chunks), "responses": sample(rows, policy, 0)}


def grpo(directory: Path, topology: Any, fields: dict[str, Any], saved: Path) -> dict[str, Any]:
    """Two steps on two responses each to questions with one, no, two and one images, sampled at a temperature of 1, the second by a model
    that continues from a checkpoint: of three replicas one gets two of the eight rows."""
    rows, policy = start(directory, topology, {}, fields)
    tokenizer, sampling = load_tokenizer(directory).seeing(rows.vision), SamplingConfig(max_response_length=8)
    engine = create_engine(policy, RolloutConfig(max_batch_size=3, sampling=sampling), tokenizer=tokenizer)
    prompts = [prompt for prompt in rows.prompts() for _ in range(2)]
    own = {one.seed: one for part in engine.generate(prompts, list(range(len(prompts))), sampling) for one in part}
    gathered = {seed: one for part in gather_objects(own) for seed, one in part.items()}
    sampled = rollout_batch([gathered[seed] for seed in range(len(prompts))], rows.end)
    noise = torch.randn(2, *sampled.tokens.shape, generator=torch.Generator().manual_seed(3))
    advantages, reference = noise[0][:, :1] * sampled.loss_mask, sampled.rollout_logprobs + 0.1 * noise[1]
    batch = of_kind(PolicyBatch, sampled, old_logprobs=sampled.rollout_logprobs, advantages=advantages, ref_logprobs=reference)
    clip = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.1}
    loss = partial(policy_loss, aggregation=Aggregation.sequence_mean, **clip)
    found: dict[str, Any] = {"logprobs": policy.logprobs(batch), "first": train_step(policy, batch, loss)}
    found |= {"gradients": gradients(policy.model.chunks), "responses": [one.response for _, one in sorted(gathered.items())]}
    checkpoint_of_first = save(policy, saved, 1)
    _, policy = start(directory, topology, {}, fields)
    checkpoint.load(policy.model, checkpoint_of_first)
    return found | {"sampler": sampled, "second": train_step(policy, batch, loss), "weights": exported(policy.model.chunks)}


OWN = {"implementation": Implementation.transformers}
GRPO = {"layers here": ("qwen3_vl", {}), "packed": ("qwen2_5_vl", PACKED), "own modules": ("qwen3_vl", OWN)}


def on_three(folder: Path, saved: Path) -> dict[str, dict[str, Any]]:
    with joined(), laid_out({}, seed=1) as topology:
        found = {name: uneven(folder / name, topology) for name in NAMES}
        found |= {kind: grpo(folder / name, topology, fields, saved / kind) for kind, (name, fields) in GRPO.items()}
        return found if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose first stages of two have all layers behind which DeepStack adds something."""
    made = tmp_path_factory.mktemp("seeing")
    layers = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"layer_types": ["linear_attention", "full_attention"] * 2})
    for name in (*NAMES, *OTHERS):
        write_seeing(name, made / name, num_hidden_layers=4, **layers.get(name, {}))
    kind, text, tower, more = VISION["qwen3_vl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VISION, "qwen3_vl", (kind, text, tower | {"out_hidden_size": 128}, more))
        write_seeing("qwen3_vl", made / "nf4", hidden_size=128, intermediate_size=128, num_attention_heads=8)
    return made


@pytest.fixture(scope="module")
def one(folder: Path, topology) -> dict[str, dict[str, Any]]:
    return {name: train(folder / name, topology, {}, {}) for name in (*NAMES, *OTHERS)}


@pytest.fixture(scope="module")
def many(folder: Path, on_ranks) -> dict[tuple[str, str], dict[str, Any]]:
    return on_ranks(in_every_layout, 2, folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_equal_the_single_process(layout: str, one, many) -> None:
    for name in LAYOUTS[layout][0]:
        expected, got = one[name], many[layout, name]
        torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=1e-5, atol=2e-5)
        for step in ("first", "second"):
            assert_metrics(got[step], expected[step])
        for responses in got["responses"]:
            assert responses == expected["responses"][0]
        assert sum("visual" in tensor for tensor in got["gradients"]) > 20
        for kind, atol in (("gradients", 1e-5), ("weights", 1e-5)):
            assert_close(got[kind], expected[kind], atol=atol)


def test_a_packed_text_part_over_two_ranks_equals_the_single_process(folder: Path, topology, on_ranks) -> None:
    expected, got = train(folder / "nf4", topology, {}, QLORA), on_ranks(packed, 2, folder)[0]
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    for step in ("first", "second"):
        assert_metrics(got[step], expected[step])
    assert_close(got["gradients"], expected["gradients"], atol=1e-5)
    assert_close(got["weights"], expected["weights"], atol=1e-5)
    assert got["responses"] == expected["responses"] * 2


@pytest.fixture(scope="module")
def three(folder: Path, on_ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return on_ranks(on_three, 3, folder, tmp_path_factory.mktemp("three"))[0]


@pytest.mark.parametrize("name", NAMES)
def test_three_replicas_with_uneven_images_equal_the_single_process(name: str, folder: Path, topology, three) -> None:
    got, expected = three[name], uneven(folder / name, topology)
    for step in ("first", "second"):
        assert_metrics(got[step], expected[step])
    assert_close(got["weights"], expected["weights"], atol=1e-5)
    assert got["responses"] == expected["responses"]


@pytest.mark.parametrize("kind", GRPO)
def test_grpo_on_three_replicas_samples_trains_and_resumes_as_one(kind: str, folder: Path, topology, three, tmp_path: Path) -> None:
    got, (name, fields) = three[kind], GRPO[kind]
    expected = grpo(folder / name, topology, fields, tmp_path)
    assert got["responses"] == expected["responses"]
    for found in (got, expected):
        torch.testing.assert_close(found["sampler"].rollout_logprobs, found["logprobs"] * found["sampler"].loss_mask, rtol=0, atol=2e-5)
    for step in ("first", "second"):
        assert_metrics(got[step], expected[step])
    assert sum("visual" in tensor for tensor in got["gradients"]) > 20 and expected["first"]["optim/grad_norm"] > 0.01
    assert_close(got["gradients"], expected["gradients"], atol=1e-5)
    assert_close(got["weights"], expected["weights"], atol=1e-5)
