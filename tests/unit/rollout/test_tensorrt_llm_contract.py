"""The recorded contracts, the version gate, the comparison with installed sources, and what surrounds the import of TensorRT-LLM."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import tensorrt_llm_diff  # noqa: E402
from fake_tensorrt_llm import installed  # noqa: E402

from aligner.errors import ConfigError, EngineError  # noqa: E402
from aligner.rollout.config import Sampler, TensorRTLLMConfig  # noqa: E402
from aligner.rollout.engine import EngineSampling, GenRequest  # noqa: E402
from aligner.rollout.tensorrt_llm.contract import Contract, gate, known_versions, load  # noqa: E402
from aligner.rollout.tensorrt_llm.requests import sampling_arguments, to_result  # noqa: E402
from aligner.rollout.tensorrt_llm.worker import answer as answer_of  # noqa: E402
from aligner.types import FinishReason, LogprobKind, SamplingConfig  # noqa: E402

REQUEST = GenRequest(index=3, tokens=(5, 6), seed=2**63 + 11)


def test_the_gate_knows_versions_without_importing_them(tmp_path):
    if find_spec("tensorrt_llm") is None:
        with pytest.raises(EngineError, match=r"tensorrt_llm is not installed.*Known versions: 1.2.1, 1.3.0rc24 \(draft\)"):
            gate(allow_drafts=True)
    with installed("1.2.1", tmp_path / "known"):
        assert gate(allow_drafts=False).version == "1.2.1"
    with installed("1.3.0rc24", tmp_path / "draft"):
        with pytest.raises(EngineError, match=r"contract of version 1.3.0rc24 is a draft.*allow_drafts=true"):
            gate(allow_drafts=False)
        assert gate(allow_drafts=True).version == "1.3.0rc24"
    information = tmp_path / "other" / "tensorrt_llm-1.4.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.4.0\n")
    sys.path.insert(0, str(information.parent))
    try:
        with pytest.raises(EngineError, match=r"version 1.4.0 of tensorrt_llm is not known; known are 1.2.1, 1.3.0rc24 \(draft\)"):
            gate(allow_drafts=True)
    finally:
        sys.path.remove(str(information.parent))


def write_package(contract: Contract, folder: Path) -> Path:
    """Sources in which everything of the contract holds."""
    files: dict[str, dict[str, list[str]]] = {}
    for symbol in contract.symbols.values():
        owner, _, name = symbol.name.rpartition(".")
        holder = owner if symbol.signature is not None or symbol.assigned else symbol.name
        body = files.setdefault(symbol.file, {}).setdefault(holder, [])
        if symbol.signature is not None:
            body.append(f"def {name}{symbol.signature}: ...")
        elif symbol.assigned:
            body.append(f"def set_{name}(self): self.{name} = 1")
        elif symbol.members is not None:
            body += [f"{key} = {value!r}" for key, value in symbol.members.items()]
        else:
            body += [f"{field}: int = 0" for field in symbol.fields]
    for file, holders in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ""
        for holder, body in holders.items():
            text += "\n".join(body) + "\n" if not holder else f"class {holder}:\n    pass\n" + "".join(f"    {line}\n" for line in body)
        path.write_text(text)
    return folder / "tensorrt_llm"


@pytest.mark.parametrize("version", known_versions())
def test_the_comparison_finds_what_changed(version, tmp_path, capsys):
    package = write_package(load(version), tmp_path)
    arguments = ["--contract", version, "--package", str(package)]
    assert tensorrt_llm_diff.main(arguments) == 0 and "entries of the contract" in capsys.readouterr().out

    def change(file: str, old: str, new: str) -> list[str]:
        path = package / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert tensorrt_llm_diff.main(arguments) == 1
        found = capsys.readouterr().out.splitlines()
        path.write_text(text)
        return found

    args, loader = "llmapi/llm_args.py", "_torch/pyexecutor/model_loader.py"
    assert change(args, "    max_num_tokens: int", "    max_tokens: int") == [
        "tensorrt_llm/llmapi/llm_args.py: TorchLlmArgs: field max_num_tokens is missing"
    ]
    reload = "(self, model, weights, allow_partial_loading=False)"
    wrong = "tensorrt_llm/_torch/pyexecutor/model_loader.py: ModelLoader.reload: "
    assert change(loader, reload, "(self, model, weights)") == [wrong + "argument allow_partial_loading is missing"]
    assert change(loader, reload, "(self, model, weights, mapper, allow_partial_loading=False)") == [
        wrong + "argument mapper is required, and not known"
    ]
    path = package / loader
    path.write_text(path.read_text().replace(reload, "(self, model, weights, allow_partial_loading=False, mapper=None, *, strict=True)"))
    assert tensorrt_llm_diff.main(arguments) == 0  # arguments that nobody has to give
    capsys.readouterr()
    path.write_text(path.read_text().replace(", mapper=None, *, strict=True", ""))
    assert change(loader, reload, "(self, weights, model, allow_partial_loading=False)") == [
        wrong + "its arguments come in the order ['weights', 'model', 'allow_partial_loading']"
    ]
    assert change("_torch/virtual_memory.py", "(*tags)", "(tags)")[0].endswith("release_with_tag: takes no *tags")
    assert change(loader, "def reload", "def load_again") == [wrong + "there is no such function"]
    assert change("executor/base_worker.py", "self.engine =", "self.executor =")[0].endswith("BaseWorker.engine: nothing is assigned to it")
    file = load(version).find("ExecutorMemoryType").file.removeprefix("tensorrt_llm/")
    assert change(file, "'model'", "'weights'")[0].endswith("is 'weights', not 'model'")
    (package / "llmapi/mpi_session.py").unlink()
    assert tensorrt_llm_diff.main(arguments) == 1
    assert "mpi_session.py: there is no such file (external_mpi_comm_available)" in capsys.readouterr().out


@pytest.mark.trtllm
def test_the_installed_package_keeps_its_contract(capsys):
    assert tensorrt_llm_diff.main([]) == 0, capsys.readouterr()


@pytest.mark.gpu
@pytest.mark.trtllm
def test_the_real_package_passes_its_smoke(tmp_path):
    """In a process of its own: importing the package starts MPI."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=1024, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16).save_pretrained(tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "tensorrt_llm_smoke.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_become_the_packages():
    sampling = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_response_length=9, stop_token_ids=[7, 4])
    assert sampling_arguments(sampling, REQUEST, max_tokens=6, eos_id=2, pad_id=2) == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,  # of 2^63 + 11: seeds are 63 bits wide
        "max_tokens": 6,
        "end_id": -1,
        "pad_id": 2,
        "stop_token_ids": [2, 4, 7],
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "detokenize": False,
    }
    gaps = sampling_arguments(EngineSampling(missing_ids=(3, 7)), REQUEST, max_tokens=6, eos_id=2, pad_id=2)
    assert gaps["bad_token_ids"] == [3, 7] and all(load(version).accepts("SamplingParams", "bad_token_ids") for version in known_versions())
    free = sampling_arguments(SamplingConfig(), REQUEST, max_tokens=6, eos_id=2, pad_id=2)
    assert free["temperature"] == 1.0 and free["top_p"] == 1.0 and "top_k" not in free and "min_p" not in free
    greedy = sampling_arguments(SamplingConfig(temperature=0.0, top_p=0.5), REQUEST, max_tokens=6, eos_id=2, pad_id=2)
    assert greedy["top_k"] == 1 and not {"temperature", "top_p", "seed"} & set(greedy)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stop_strings": ["\n\n"]}, "stop_strings"),
        ({"min_response_length": 2}, "min_response_length=2"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1.*after the penalty; allowed: 1.0"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"raw_logprobs": True, "temperature": 0.7}, "raw_logprobs=true.*temperature=1"),
    ],
)
def test_settings_that_it_cannot_follow_are_refused_by_name(settings, named):
    with pytest.raises(ConfigError, match=f"rollout.sampling.{named}"):
        TensorRTLLMConfig().check_sampling(SamplingConfig(**settings))


def test_settings_that_one_sampler_has():
    TensorRTLLMConfig().check_sampling(SamplingConfig(min_p=0.1, raw_logprobs=True))
    with pytest.raises(ConfigError, match="min_p=0.1.*sampler=torch"):
        TensorRTLLMConfig(sampler=Sampler.torch).check_sampling(SamplingConfig(min_p=0.1))


def answer(tokens, logprobs, reason="stop"):
    return answer_of(SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason))


def result_of(output, **sampling):
    return to_result(REQUEST, output, SamplingConfig(**sampling), kind=LogprobKind.sampled, eos_id=2, version=4)


def test_answers_become_results():
    one = SimpleNamespace
    result = result_of(answer([8, 2], [{8: one(logprob=-0.5), 1: one(logprob=-9.0)}, {2: one(logprob=-0.25)}]), raw_logprobs=True)
    assert result.logprobs == result.raw_logprobs == (-0.5, -0.25) and result.index == 3 and result.weight_version == 4
    assert result.finish_reason == FinishReason.stop
    assert result_of(answer([8, 2], [-0.5, -0.25], "length")).finish_reason == FinishReason.stop  # at the very limit
    assert result_of(answer([8, 9], [-0.5, -0.25], "length")).finish_reason == FinishReason.length
    with pytest.raises(EngineError, match="finish_reason='cancelled'"):
        result_of(answer([8, 9], [-0.5, -0.25], "cancelled"))
    with pytest.raises(EngineError, match="1 log-probs for the 2 tokens of request 3"):
        result_of(answer([8, 9], [-0.5]))


@pytest.mark.cpu
def test_smoke_passes_over_the_stand_in_and_notices_weights_that_stay(tmp_path, topology, hf_directory, capsys):
    from tensorrt_llm_smoke import Trial, main, run
    from transformers import AutoModelForCausalLM

    from aligner.rollout.config import RolloutConfig, TensorRTLLMConfig
    from aligner.rollout.tensorrt_llm.engine import TensorRTLLMEngine

    with installed("1.2.1", tmp_path):
        config = RolloutConfig(max_batch_size=8, offload=True, tensorrt_llm=TensorRTLLMConfig())
        engine = TensorRTLLMEngine(config, path=hf_directory("llama"), dtype=torch.float32, eos_id=0, max_sequence_length=64)
        engine.start()
        reference = AutoModelForCausalLM.from_pretrained(hf_directory("llama"), dtype=torch.float32)
        trial = Trial(reference, engine, temperature=0.8, tolerance=1e-4)
        assert run(trial, sleeps=True)
        said = capsys.readouterr().out
        assert said.count("ok ") == 4 and "8 greedy responses as before" in said
        stale = engine.load
        engine.load = lambda bucket: stale([(name, tensor.abs()) for name, tensor in bucket])
        assert not run(trial, sleeps=False)
        assert "FAIL  refit, all weights negated" in capsys.readouterr().out
        engine.shutdown()
    if find_spec("tensorrt_llm") is None:
        assert main([str(hf_directory("llama"))]) == 2 and "is not installed" in capsys.readouterr().err
