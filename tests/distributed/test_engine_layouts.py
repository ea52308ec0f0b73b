"""Generation over two tensor-parallel ranks is the single process's; two replicas agree on results and on errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_job import converse, generate  # noqa: E402

from aligner.types import LabeledBatch

JOB = Path(__file__).parent / "engine_job.py"
VOCAB, WIDTH = 61, 20


@pytest.fixture(scope="module")
def inputs() -> dict:
    """Prompts (one of them twice) with seeds, and a batch of labelled rows."""
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in (4, 11, 1, 7, 16)]
    lengths = torch.tensor([20, 9, 14, 6])
    positions = torch.arange(WIDTH)
    mask = (positions >= 3) & (positions < lengths[:, None])
    tokens = torch.randint(3, VOCAB, (4, WIDTH), generator=generator) * (positions < lengths[:, None])
    batch = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask)
    return {"prompts": [*prompts, prompts[1]], "seeds": [1, 2, 3, 4, 5, 6], "batch": batch}


@pytest.fixture(scope="module")
def directory(topology, tmp_path_factory) -> Path:
    """A random model with order-one logits, as a Hugging Face directory."""
    from aligner.models.config import Architecture, Family, ModelConfig
    from aligner.models.modules.build import LanguageModel
    from aligner.models.weights import save_hf
    from aligner.parallel.topology import ParallelConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 48}
    architecture = Architecture(family=Family.qwen2, vocab_size=VOCAB, max_position_embeddings=64, qkv_bias=True, **sizes)
    module = LanguageModel(architecture, ModelConfig(), ParallelConfig(), load=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():  # all of them: what a fresh model holds depends on the tests that ran before
            around, spread = (parameter, 0.3) if "bias" in name or "norm" in name else (0.0, 0.25)
            parameter.copy_(around + spread * torch.randn(parameter.shape, generator=generator))
    path = tmp_path_factory.mktemp("model")
    save_hf([module], path, writer=True)
    return path


@pytest.fixture(scope="module")
def make_policy(directory, topology):
    """`make_policy(batch_invariant=...)`: in this one process."""
    from aligner.models.config import ModelConfig
    from aligner.models.create import create_policy, read_architecture
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel.topology import ParallelConfig

    def make(**fields):
        config = ModelConfig(path=str(directory), **fields)
        optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
        training = Training(optimizer=optimizer, total_steps=4, micro_batch_size=2, temperature=0.9)
        return create_policy(config, read_architecture(config, vocab_size=0), ParallelConfig(), topology, training)

    return make


@pytest.fixture(scope="module")
def expected(make_policy, inputs) -> dict:
    """The same by this one process."""
    from aligner.losses.sft import sft_loss

    policy = make_policy()
    first = {"rollouts": generate(policy, inputs), "logprobs": policy.logprobs(inputs["batch"])}
    metrics = policy.train_step(inputs["batch"], sft_loss)
    first |= {"metrics": {name: metric.value() for name, metric in metrics.items()}}
    first |= {"trained_rollouts": generate(policy, inputs), "trained_logprobs": policy.logprobs(inputs["batch"])}
    return first | {"episodes": converse(policy, inputs)}


def _run(run_distributed, tp: int, directory: Path, output: Path, inputs: dict) -> list[dict]:
    torch.save(inputs, output / "inputs.pt")
    run_distributed(JOB, 2, tp, directory, output, timeout=240)
    return [torch.load(output / f"tp{tp}_rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_tensor_parallel_generation_is_the_single_processs(run_distributed, directory, expected, make_policy, inputs, tmp_path):
    ranks = _run(run_distributed, 2, directory, tmp_path, inputs)
    lengths = {len(response) for response, _, _ in expected["rollouts"].values()}
    assert len(lengths) > 2 and expected["rollouts"] != expected["trained_rollouts"]  # the comparison is of something
    for got in ranks:
        for divisor in (8, 128):
            for name in ("rollouts", "trained_rollouts"):
                assert got[divisor][name].keys() == expected[name].keys()
                for seed, (response, logprobs, reason) in expected[name].items():
                    assert got[divisor][name][seed][0] == response and got[divisor][name][seed][2] == reason
                    assert got[divisor][name][seed][1] == pytest.approx(logprobs, abs=1e-4)
            for name in ("logprobs", "trained_logprobs"):
                torch.testing.assert_close(got[divisor][name], expected[name], rtol=0, atol=1e-4)
            assert got[divisor]["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    for divisor in (8, 128):  # conversations are kept on the leading rank
        leader, follower = (got[divisor]["episodes"] for got in ranks)
        assert leader.keys() == expected["episodes"].keys() and not follower
        for seed, (response, logprobs, *others) in expected["episodes"].items():
            assert leader[seed][0] == response and list(leader[seed][2:]) == others
            assert leader[seed][1] == pytest.approx(logprobs, abs=1e-4)
    assert max(turns for *_, turns, _ in expected["episodes"].values()) == 3
    alone = make_policy(batch_invariant=True)
    rollouts = generate(alone, inputs)
    for exact in (got["batch_invariant"] for got in ranks):  # to the bit, whatever the number of ranks
        assert exact["rollouts"] == rollouts and torch.equal(exact["logprobs"], alone.logprobs(exact["batch"]))
        assert exact["grad_norms"] == pytest.approx([exact["grad_norms"][0]] * 2, rel=1e-4)


def test_two_replicas_agree_on_results_and_on_errors(run_distributed, directory, expected, inputs, tmp_path):
    for got in _run(run_distributed, 1, directory, tmp_path, inputs):
        collected = got["collected"]
        assert [rollout.seed for rollout in collected.rollouts] == inputs["seeds"]
        for rollout, reward in zip(collected.rollouts, collected.rewards.tolist(), strict=True):
            response, logprobs, reason = expected["rollouts"][rollout.seed]
            assert (rollout.response, rollout.finish_reason.value, reward) == (response, reason, len(response))
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert len(collected.replica_stats) == 2 and min(share.tokens for share in collected.replica_stats) > 0
        assert sum(share.tokens for share in collected.replica_stats) == collected.rewards.sum()
        torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
        torch.testing.assert_close(got["one"], expected["logprobs"][:1], rtol=0, atol=1e-5)
        assert got["small"] == "a training batch of 1 is smaller than the 2 data-parallel replicas"
        assert "the gradient of optimizer step 1 is not finite (its norm on rank 1: nan, the loss of" in got["nan"]
        assert got["skipped"] == 1
        assert "writing a checkpoint failed: Object of type object is not JSON serializable" in got["unwritable"]
        assert "optimizer step 1 was made and left 1 of " in got["spoilt"] and "final_layernorm.weight: inf on rank 1)" in got["spoilt"]
        assert "rank 1: 1 of " in got["unsound"] and "tensors of the weights are not finite; nothing is saved" in got["unsound"]
        assert "latest names step_000001, which is not a complete checkpoint" in got["latest"]
    assert not (tmp_path / "checkpoints" / "step_000001").exists()
