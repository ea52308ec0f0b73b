"""`rollout.engine=auto`: what is taken where, and the reason that is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hf_models import write

from aligner.errors import EngineError
from aligner.models.config import ModelConfig
from aligner.rollout import choice
from aligner.rollout.choice import choose
from aligner.rollout.config import AsynchronousConfig, EngineKind, RolloutConfig, VerifyRefit
from aligner.rollout.vllm import KNOWN_VERSIONS
from aligner.types import SamplingConfig


def config_of(*, sampling: dict | None = None, **fields) -> RolloutConfig:
    return RolloutConfig(engine=EngineKind.auto, sampling=SamplingConfig(**(sampling or {})), **fields)


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """A GPU and both packages, in versions that are known; a test takes one away or gives it another version."""
    known = [name for name in choice.tensorrt_llm_contract.known_versions() if not choice.tensorrt_llm_contract.load(name).draft]
    versions = {"tensorrt_llm": known[-1], "vllm": f"{KNOWN_VERSIONS[0]}+cu130"}
    monkeypatch.setattr(choice.platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(choice, "version", versions.__getitem__)
    monkeypatch.setattr(choice.tensorrt_llm_contract, "version", versions.__getitem__)
    return versions


def test_the_first_that_is_installed_is_taken(installed):
    assert str(choose(config_of(), tp=1)) == "rollout.engine=auto: tensorrt_llm"
    del installed["tensorrt_llm"]
    assert str(choose(config_of(), tp=1)) == "rollout.engine=auto: vllm; not tensorrt_llm (not installed)"
    del installed["vllm"]
    assert str(choose(config_of(), tp=1)) == "rollout.engine=auto: megatron; not tensorrt_llm (not installed); not vllm (not installed)"


def test_without_a_gpu_it_is_the_built_in_one(installed, monkeypatch):
    monkeypatch.setattr(choice.platform, "device", lambda: torch.device("cpu"))
    found = choose(config_of(), tp=1)
    assert found.engine == EngineKind.megatron and found.reasons == ("tensorrt_llm (it is for GPUs)", "vllm (it is for GPUs)")


def test_delta_nets_are_left_to_the_built_in_one(installed):
    found = choose(config_of(), tp=1, delta_nets=True)
    assert found.engine == EngineKind.megatron and all("the model's delta nets are" in reason for reason in found.reasons)


def test_versions_that_are_not_known_are_left_out(installed):
    installed["tensorrt_llm"] = "0.1.0"
    found = choose(config_of(), tp=1)
    assert found.engine == EngineKind.vllm and "version 0.1.0 of tensorrt_llm is not known" in found.reasons[0]
    installed["vllm"] = "9.9.9"
    found = choose(config_of(), tp=1)
    assert found.engine == EngineKind.megatron and "version 9.9.9 is not known to work" in found.reasons[1]


@pytest.mark.parametrize(
    ("config", "tp", "expected", "said"),
    [
        (config_of(), 2, "tensorrt_llm", ""),
        (config_of(sampling={"repetition_penalty": 1.1}), 1, "vllm", "rollout.sampling.repetition_penalty=1.1: not with"),
        (
            config_of(sampling={"stop_strings": ["\n"]}),
            1,
            "megatron",
            "rollout.sampling.stop_strings: not available with rollout.engine=vllm",
        ),
        (config_of(sampling={"raw_logprobs": True}), 1, "megatron", "rollout.sampling.raw_logprobs=true: it gives log-probs of one kind"),
        (config_of(sampling={"temperature": 0.7, "min_response_length": 3}), 1, "megatron", "its log-probs would be at temperature 1"),
        (config_of(asynchronous=AsynchronousConfig(max_staleness=1)), 1, "megatron", "rollout.engine=vllm samples between training phases"),
        (config_of(offload=True), 1, "tensorrt_llm", ""),
    ],
)
def test_what_the_run_asks_for_decides(installed, config, tp, expected, said):
    found = choose(config, tp=tp)
    assert found.engine.value == expected and said in str(found)


def test_bit_identical_log_probs_are_the_built_in_ones(installed):
    found = choose(config_of(), tp=1, batch_invariant=True)
    assert found.engine == EngineKind.megatron and all("model.batch_invariant=true" in reason for reason in found.reasons)


def test_checksums_of_a_split_model(installed):
    config = config_of(verify_refit=VerifyRefit.checksum)
    found = choose(config, tp=2)
    assert found.engine == EngineKind.megatron and "reads no weights back from rollout.tp=2 ranks" in found.reasons[1]
    assert choose(config, tp=1).engine == EngineKind.tensorrt_llm


def test_a_run_samples_with_what_was_chosen_and_says_so(topology, make_model, capsys):
    from aligner.rollout.create import create_engine

    engine = create_engine(make_model("policy"), config_of(sampling={"max_response_length": 4}), eos_id=2)
    assert engine.capabilities.name == "megatron"
    expected = "rollout.engine=auto: megatron; not tensorrt_llm (it is for GPUs); not vllm (it is for GPUs)\n"
    if not torch.cuda.is_available():
        assert capsys.readouterr().out == expected
    engine.shutdown()


def test_ranks_that_find_different_engines_are_told(topology, make_model, monkeypatch):
    from aligner.rollout import create

    monkeypatch.setattr(create, "gather_objects", lambda own: [own, "rollout.engine=auto: vllm"])
    with pytest.raises(
        EngineError, match=r"megatron.* on rank 0, but on rank 1 rollout\.engine=auto: vllm: all nodes need the same packages"
    ):
        create.create_engine(make_model("policy"), config_of(), eos_id=2)


def test_the_preflight_names_it(tmp_path, installed):
    from aligner.jobs.preflight.ranks import _chosen_engine

    model = ModelConfig()
    run = SimpleNamespace(rollout=config_of(), parallel=SimpleNamespace(tp=1), models=lambda: [SimpleNamespace(config=model)])
    assert _chosen_engine(run) == "rollout.engine=auto: tensorrt_llm"
    write("qwen3_next", tmp_path / "model")
    model.path = str(tmp_path / "model")
    assert _chosen_engine(run).startswith("rollout.engine=auto: megatron; not tensorrt_llm (the model's delta nets are sampled from by")
    model.path = str(tmp_path / "nowhere")
    assert _chosen_engine(run) == "rollout.engine=auto: tensorrt_llm"
    run.rollout = RolloutConfig()
    assert _chosen_engine(run) == "" == _chosen_engine(SimpleNamespace())
