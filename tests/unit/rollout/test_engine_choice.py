"""`rollout.engine=auto`: what is taken where, and the reason that is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hf_models import write

from aligner.errors import EngineError
from aligner.models.config import ModelConfig
from aligner.rollout import create
from aligner.rollout.config import AsynchronousConfig, EngineKind, RolloutConfig, VerifyRefit
from aligner.rollout.create import choose
from aligner.types import SamplingConfig


def config_of(*, sampling: dict | None = None, **fields) -> RolloutConfig:
    return RolloutConfig(engine=EngineKind.auto, sampling=SamplingConfig(**(sampling or {})), **fields)


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """A GPU and both packages; a test takes one away."""
    packages = {"tensorrt_llm", "vllm"}
    monkeypatch.setattr(create.platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(create, "find_spec", lambda name: object() if name in packages else None)
    return packages


NEVER = "tensorrt_llm (it has never been executed with this code)"
OTHERS = "; rollout.engine=NAME takes another"


def test_what_has_been_executed_is_taken(installed):
    assert str(choose(config_of(), tp=1)) == f"rollout.engine=auto: vllm; not {NEVER}{OTHERS}"
    installed.remove("tensorrt_llm")
    assert str(choose(config_of(), tp=1)) == f"rollout.engine=auto: vllm{OTHERS}"
    installed.remove("vllm")
    assert str(choose(config_of(), tp=1)) == f"rollout.engine=auto: megatron; not vllm (not installed){OTHERS}"
    installed.add("tensorrt_llm")
    assert str(choose(config_of(), tp=1)) == f"rollout.engine=auto: megatron; not vllm (not installed); not {NEVER}{OTHERS}"


def test_without_a_gpu_it_is_the_built_in_one(installed, monkeypatch):
    monkeypatch.setattr(create.platform, "device", lambda: torch.device("cpu"))
    found = choose(config_of(), tp=1)
    assert found.engine == EngineKind.megatron and found.reasons == ("vllm (it is for GPUs)", NEVER)


@pytest.mark.parametrize(
    ("config", "tp", "expected", "said"),
    [
        (config_of(), 2, "vllm", ""),
        (config_of(sampling={"repetition_penalty": 1.1}), 1, "vllm", ""),
        (config_of(sampling={"stop_strings": ["\n"]}), 1, "megatron", "sampling.stop_strings: not available with rollout.engine=vllm"),
        (config_of(sampling={"raw_logprobs": True}), 1, "megatron", "sampling.raw_logprobs: not available with rollout.engine=vllm"),
        (config_of(sampling={"temperature": 0.7, "min_response_length": 3}), 1, "megatron", "its log-probs would be at temperature 1"),
        (config_of(asynchronous=AsynchronousConfig(max_staleness=1)), 1, "megatron", "rollout.engine=vllm samples between training phases"),
        (config_of(offload=True), 1, "vllm", ""),
        (config_of(verify_refit=VerifyRefit.checksum), 1, "vllm", ""),
        (config_of(verify_refit=VerifyRefit.checksum), 2, "megatron", "reads no weights back from rollout.tp=2 ranks"),
        ({"batch_invariant": True}, 1, "megatron", "model.batch_invariant=true"),
        ({"own": "the model's delta nets need it"}, 1, "megatron", "the model's delta nets need it"),
    ],
)
def test_what_the_run_asks_for_decides(installed, config, tp, expected, said):
    found = choose(config_of(), tp=tp, **config) if isinstance(config, dict) else choose(config, tp=tp)
    assert found.engine.value == expected and said in str(found)


def test_a_run_samples_with_what_was_chosen_and_says_so(topology, make_model, capsys):

    engine = create.create_engine(make_model("policy"), config_of(sampling={"max_response_length": 4}), eos_id=2)
    assert engine.capabilities.name == "megatron"
    expected = f"rollout.engine=auto: megatron; not vllm (it is for GPUs){OTHERS}\n"
    if not torch.cuda.is_available():
        assert capsys.readouterr().out == expected
    engine.shutdown()


def test_ranks_that_find_different_engines_are_told(topology, make_model, monkeypatch):
    monkeypatch.setattr(create, "gather_objects", lambda own: [own, "rollout.engine=auto: vllm"])
    with pytest.raises(
        EngineError, match=r"megatron.* on rank 0, but on rank 1 rollout\.engine=auto: vllm: all nodes need the same packages"
    ):
        create.create_engine(make_model("policy"), config_of(), eos_id=2)


def test_the_preflight_names_it(tmp_path, installed):
    from aligner.commands.preflight.ranks import _chosen_engine

    model = ModelConfig()
    run = SimpleNamespace(sampler=config_of(), parallel=SimpleNamespace(tp=1), models=lambda: [SimpleNamespace(config=model)])
    assert _chosen_engine(run) == f"rollout.engine=auto: vllm; not {NEVER}{OTHERS}"
    write("qwen3_next", tmp_path / "model")
    model.path = str(tmp_path / "model")
    assert _chosen_engine(run).startswith("rollout.engine=auto: megatron; not vllm (the model's delta nets need the built-in engine)")
    model.path = str(tmp_path / "nowhere")
    assert _chosen_engine(run) == f"rollout.engine=auto: vllm; not {NEVER}{OTHERS}"
    run.sampler = RolloutConfig(engine=EngineKind.tensorrt_llm, offload=True)
    assert "rollout.offload=true with rollout.engine=tensorrt_llm (1.2.1) decodes without CUDA graphs" in _chosen_engine(run)
    run.sampler = RolloutConfig()
    assert _chosen_engine(run) == "" == _chosen_engine(SimpleNamespace(sampler=None))
