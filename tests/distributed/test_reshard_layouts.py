"""Whatever the training layout and the rollout layout, the engine samples what a single process does, before and after training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.types import LabeledBatch

JOB = Path(__file__).parent / "reshard_job.py"
VOCAB, WIDTH = 61, 20
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {  # name: (processes, training layout, rollout tensor-parallel sizes, of which reads the parameters in place, models)
    "pp2": (2, {"pp": 2}, [0, 2], None, ["qwen2", "gpt2", "mixtral"]),
    "pp2_interleaved": (2, {"pp": 2, "vpp": 2}, [1], None, ["qwen2"]),
    "tp2": (2, SP, [0, 1], 0, ["qwen2", "gpt2"]),
    "dp2": (2, {}, [2], None, ["qwen2"]),
    "cp2": (2, {"cp": 2}, [0, 2], 0, ["qwen2"]),
    "ep2": (2, {"ep": 2}, [0, 2], None, ["mixtral"]),
    "tp2_experts": (2, SP | {"etp": 2}, [0, 1], 0, ["mixtral"]),
    "tp2_pp2": (4, SP | {"pp": 2}, [0, 1, 4], None, ["qwen2", "gpt2"]),
    "tp4": (4, {"tp": 4, "sequence_parallel": True}, [0, 2], None, ["qwen2"]),  # 2 key-value groups on 4 ranks: not readable in place
    "ep2_pp2": (4, {"ep": 2, "pp": 2}, [0, 4], None, ["mixtral"]),
    "tp2_ep2": (4, SP | {"ep": 2}, [2, 4], None, ["mixtral"]),
}


@pytest.fixture(scope="module")
def inputs() -> dict:
    """Prompts (one of them twice) with seeds, and a batch of labelled rows."""
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in (4, 11, 1, 7, 16)]
    lengths = torch.tensor([20, 9, 14, 6])
    positions = torch.arange(WIDTH)
    tokens = torch.randint(3, VOCAB, (4, WIDTH), generator=generator) * (positions < lengths[:, None])
    batch = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=(positions >= 3) & (positions < lengths[:, None]))
    return {"prompts": [*prompts, prompts[1]], "seeds": [1, 2, 3, 4, 5, 6], "batch": batch}


def architectures() -> dict:
    """Tied with biases on query, key and value; tied with learned positions and biases everywhere; untied experts."""
    from aligner.models.config import Activation, Architecture, Family, Normalization, PositionEmbedding

    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocab_size": VOCAB}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.25}
    gpt2 = {"position_embedding": PositionEmbedding.learned, "normalization": Normalization.layer_norm, "linear_bias": True}
    gpt2 |= {"gated_mlp": False, "activation": Activation.gelu_tanh, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
    return {
        "qwen2": Architecture(family=Family.qwen2, qkv_bias=True, num_key_value_heads=2, **sizes),
        "gpt2": Architecture(family=Family.gpt2, **gpt2, **sizes),
        "mixtral": Architecture(family=Family.mixtral, num_key_value_heads=2, **experts, **sizes),
    }


@pytest.fixture(scope="module")
def folder(topology, tmp_path_factory) -> Path:
    """Random models with order-one logits, as Hugging Face directories."""
    from aligner.models.config import ModelConfig
    from aligner.models.modules.build import build_language_model
    from aligner.models.weights import save_hf
    from aligner.parallel.topology import ParallelConfig

    path = tmp_path_factory.mktemp("models")
    for name, architecture in architectures().items():
        chunks = build_language_model(architecture, ModelConfig(), ParallelConfig(), load=False, seed=3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in chunks[0].named_parameters():
                if "bias" in key or "norm" in key:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        save_hf(chunks, path / name, writer=True)
    return path


@pytest.fixture(scope="module")
def expected(folder, topology, inputs) -> dict[str, dict]:
    """By model: what one process samples before and after the training step."""
    import reshard_job

    from aligner.losses.sft import sft_loss
    from aligner.parallel.topology import ParallelConfig

    results = {}
    for name in architectures():
        policy = reshard_job.make_policy(folder / name, topology, ParallelConfig())
        engine = reshard_job.make_engine(policy, 0)
        results[name] = {"rollouts": reshard_job.generate(engine, inputs)}
        policy.train_step(inputs["batch"], sft_loss)
        engine.refit(policy.version)
        results[name]["trained_rollouts"] = reshard_job.generate(engine, inputs)
        before, after = ([r[0] for r in results[name][key].values()] for key in ("rollouts", "trained_rollouts"))
        assert len(set(map(len, before))) > 1 and before != after, name  # the comparison is of something
    return results


def same(got: dict[int, tuple], expected: dict[int, tuple]) -> None:
    for seed, (response, logprobs, *rest) in got.items():
        assert (response, *rest) == (expected[seed][0], *expected[seed][2:]), seed
        assert logprobs == pytest.approx(expected[seed][1], abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rollout_layout_samples_the_single_processs_tokens(layout, folder, expected, inputs, run_distributed, tmp_path):
    nproc, parallel, rollout_tps, in_place, models = LAYOUTS[layout]
    torch.save(inputs | {"parallel": parallel, "rollout_tps": rollout_tps, "models": models}, tmp_path / "inputs.pt")
    run_distributed(JOB, nproc, folder, tmp_path, timeout=240)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(nproc)]
    for name in models:
        wanted = expected[name]
        for chosen in rollout_tps:
            tp = chosen or parallel.get("tp", 1)
            results = [rank[name, chosen] for rank in ranks]
            assert [r["replica"] for r in results] == [(rank // tp, nproc // tp, rank % tp == 0) for rank in range(nproc)]
            assert all(r["in_place"] == (chosen == in_place) and r["layers"] == 4 for r in results)
            for key in ("rollouts", "trained_rollouts"):
                assert sorted(seed for r in results[::tp] for seed in r[key]) == inputs["seeds"]  # each sampled by one replica
                for result in results:
                    same(result[key], wanted[key])
