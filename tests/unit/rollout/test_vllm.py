"""The vLLM engine against a fake package with the names of vLLM 0.32 and 0.33, and against vLLM itself where it is installed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields, make_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from model_steps import adam, train
from own_models import CONFIGS, SIZES as OWN_SIZES, make_directory
from rollout_parts import sampled
from safetensors.torch import load_file

from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Architecture, Family, LoraConfig, LoraInit, LoraTarget, Quantization
from aligner.models.modules.lora import named_adapters
from aligner.models.modules.peft import export_adapters
from aligner.protocols import Replica
from aligner.rollout import create
from aligner.rollout.builtin.refit import negated
from aligner.rollout.config import EngineKind, Refit, RolloutConfig, VerifyRefit, VLLMConfig
from aligner.rollout.engine import ALL_MEMORY, EngineSampling, GenRequest, ListedWork
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.manifest import hf_manifest
from aligner.rollout.engine.work import WorkSharing
from aligner.rollout.live import LiveEngine, LiveRequest
from aligner.rollout.vllm import engine as wrapper
from aligner.rollout.vllm.engine import VLLMEngine
from aligner.types import FinishReason, LabeledBatch, LogprobKind, Prompt, SamplingConfig

SIZES = Architecture(num_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, ffn_hidden_size=12, vocab_size=11)
CONTEXT, EOS = 20, 2


# The fields of vLLM's `SamplingParams`, and the arguments of `vllm.LLM`, that are used; those with a default may be left out.
SamplingParams = make_dataclass(
    "SamplingParams",
    [
        *("temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty min_tokens max_tokens".split()),
        *("stop_token_ids ignore_eos seed logprobs detokenize output_kind".split()),
        ("logit_bias", dict, None),
    ],
    kw_only=True,
)
EngineSettings = make_dataclass(
    "EngineSettings",
    [
        *("model load_format dtype skip_tokenizer_init generation_config tensor_parallel_size max_model_len max_num_seqs".split()),
        *("max_num_batched_tokens kv_cache_memory_bytes enable_prefix_caching enforce_eager enable_sleep_mode logprobs_mode".split()),
        *("weight_transfer_config", "seed", ("distributed_executor_backend", str, "uni"), ("hf_overrides", dict, None)),
        *(("override_generation_config", dict, None), ("gpu_memory_utilization", float, 0.92)),
        *(("enable_lora", bool, False), ("max_loras", int, 1), ("max_lora_rank", int, 16), ("lora_target_modules", list, None)),
    ],
    kw_only=True,
)


class FusedModel(torch.nn.Module):
    """One layer's q, k and v, and an embedding, loaded by Hugging Face names. `layerwise` is whether a reload is under way: like vLLM's
    layers it holds on to what it is given and copies it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layerwise, self.given = False, []
        self.tensors = {"model.embed_tokens.weight": torch.zeros(11, 8), "model.layers.0.self_attn.qkv_proj.weight": torch.zeros(16, 8)}

    def named_parameters(self, *args, **kwargs):
        return iter(self.tensors.items())

    def parameters(self, recurse: bool = True):
        return iter(self.tensors.values())

    def load_weights(self, weights) -> set[str]:
        assert self.layerwise
        loaded, rows = set(), {"q_proj": slice(0, 8), "k_proj": slice(8, 12), "v_proj": slice(12, 16)}
        for name, tensor in weights:
            part = name.split(".")[-2]
            own = name.replace(part, "qkv_proj") if part in rows else name
            if own in self.tensors:
                self.given.append((self.tensors[own][rows.get(part, slice(None))], tensor))
                loaded.add(own)
        return loaded

    def set_layerwise(self, value: bool) -> None:
        for target, tensor in self.given:
            target.copy_(tensor)
        self.layerwise, self.given = value, []


MODELS = {
    "GraniteForCausalLM": SimpleNamespace(load_model_cls=lambda: SimpleNamespace(supports_lora=True)),
    "MiniMaxM2ForCausalLM": SimpleNamespace(load_model_cls=lambda: SimpleNamespace()),
}


class LoraManager:
    """vLLM's, of a model whose fused layers all take adapters: one slot, which an adapter fills from its folder."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, places: dict[str, tuple[str, slice]], rank: int) -> None:
        self.lora_index_to_id, self.modules = [None], {}
        for name, (fused, rows) in places.items():
            if name.endswith("_proj.weight"):
                layer = self.modules.setdefault(fused.removesuffix(".weight"), SimpleNamespace(lora_a_stacked=[], lora_b_stacked=[]))
                layer.lora_a_stacked.append(torch.zeros(1, 1, rank, 64))
                layer.lora_b_stacked.append(torch.zeros(1, 1, rows.stop - rows.start, rank))

    def add(self, request: SimpleNamespace) -> None:
        assert self.lora_index_to_id == [None]  # the former one is gone
        self.lora_index_to_id = [request.lora_int_id]
        config = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        assert config["r"] == config["lora_alpha"]
        for name, tensor in load_file(Path(request.lora_path) / "adapter_model.safetensors").items():
            prefix, part, kind = re.fullmatch(r"base_model\.model\.(.*)\.(\w+)\.lora_([AB])\.weight", name).groups()
            fused, parts = next(((f, p) for f, p in self.packed_modules_mapping.items() if part in p), (part, [part]))
            stacks = self.modules[f"{prefix}.{fused}"]
            stack = (stacks.lora_a_stacked if kind == "A" else stacks.lora_b_stacked)[parts.index(part)]
            stack.zero_()[0, 0, : tensor.shape[0], : tensor.shape[1]] = tensor


class WeightTransferEngineFactory:
    registry: dict[str, tuple[str, str]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str, class_name: str | None = None) -> None:
        if name in cls.registry:
            raise ValueError("already registered")
        cls.registry[name] = (module_path_or_cls, class_name)


class WeightTransferUpdateInfo:
    pass


class IPCWeightTransferEngine:
    def __init__(self, model) -> None:
        self.model, self.device = model, torch.device("cpu")

    def parse_update_info(self, update_dict):
        return self.update_info_cls(**update_dict)

    def start_weight_update(self) -> None:
        self.model.set_layerwise(True)

    def finish_weight_update(self) -> None:
        self.model.set_layerwise(False)


class Worker:
    """As vLLM's, it wants starts and finishes in turn, and an update that failed is over."""

    def __init__(self, model: FusedModel, backend: str) -> None:
        module, name = WeightTransferEngineFactory.registry[backend]
        self.engine, self.active = getattr(import_module(module), name)(model), False

    def start_weight_update(self) -> None:
        assert not self.active
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info: dict) -> None:
        assert self.active
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self) -> None:
        assert self.active
        self.engine.finish_weight_update()
        self.active = False


class LLMEngine:
    """Each step gives every request one token: its position + 3, or its seed where that is less than the vocabulary. Like vLLM on a GPU it
    is one step ahead: what is scheduled now is given by the next call."""

    def __init__(self) -> None:
        self.running, self.most, self.names, self.queue = {}, 0, set(), deque()
        self.ended: list[str] = []
        self.loras, self.asked, self.manager = [], [], None
        ends = {name: SimpleNamespace(shutdown=lambda name=name: self.ended.append(name)) for name in ("model_executor", "scheduler")}
        ends["scheduler"].has_requests = lambda: bool(self.running)
        finalizer = SimpleNamespace(detach=lambda: self.ended.append("detached"))
        self.engine_core = SimpleNamespace(_finalizer=finalizer, engine_core=SimpleNamespace(batch_queue=self.queue, **ends))

    def add_lora(self, lora_request: SimpleNamespace) -> bool:
        self.loras.append(lora_request.lora_name)
        self.manager.add(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.manager.lora_index_to_id.remove(lora_id)
        self.manager.lora_index_to_id.append(None)
        return True

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams, lora_request: SimpleNamespace | None = None) -> None:
        assert request_id not in self.names and prompt["type"] == "token" and params.max_tokens >= 1
        self.asked.append(lora_request and lora_request.lora_name)
        self.names.add(request_id)
        self.running[request_id] = (params, [])
        self.most = max(self.most, len(self.running))

    def step(self) -> list:
        torch.rand(1)  # as on the CPU
        if self.running:
            self.queue.append(list(self.running))
        return self._given(self.queue.popleft()) if len(self.queue) > 1 or not self.running else []

    def _given(self, names: list[str]) -> list:
        done = []
        for name in names:
            if name not in self.running:
                continue
            params, tokens = self.running[name]
            tokens.append(params.seed if params.seed < 11 else len(tokens) + 3)
            stopped = tokens[-1] in params.stop_token_ids
            if stopped or len(tokens) == params.max_tokens:
                likely = 1 + bool(params.logprobs)  # the drawn one, and the one after it
                logprobs = [{token + one: SimpleNamespace(logprob=-float(token + one)) for one in range(likely)} for token in tokens]
                reason = "stop" if stopped else "length"
                one = SimpleNamespace(token_ids=list(tokens), logprobs=logprobs, finish_reason=reason)
                done.append(SimpleNamespace(request_id=name, finished=True, outputs=[one]))
                del self.running[name]
        return done

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            del self.running[name]


class LLM:
    def __init__(self, **settings) -> None:
        torch.manual_seed(0)  # as vLLM does in the process
        assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["DO_NOT_TRACK"] == "1"
        self.settings = EngineSettings(**settings)
        if torch.cuda.is_available():  # vllm/v1/worker/utils.py: request_memory
            free, total = torch.cuda.mem_get_info()
            if free < math.ceil(total * self.settings.gpu_memory_utilization):
                raise ValueError("Free memory on device on startup is less than desired GPU memory utilization")
        self.model, self.prefixes_forgotten, self.llm_engine = FusedModel(), 0, LLMEngine()
        if self.settings.enable_lora:
            self.model.lora_manager = self.llm_engine.manager = LoraManager(self.model.places, self.settings.max_lora_rank)
        self.worker = Worker(self.model, self.settings.weight_transfer_config["backend"])

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None) -> list:
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def apply_model(self, func) -> list:
        return [func(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.prefixes_forgotten += 1
        return True

    def sleep(self, level: int = 1) -> None:
        raise AssertionError("on a CPU")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        raise AssertionError("on a CPU")


def tokens_input(prompt_token_ids: list[int]) -> dict:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}


@pytest.fixture
def fake_vllm(monkeypatch) -> dict[str, ModuleType]:
    """`import vllm` and its parts, by name."""
    contents = {
        "vllm": {"__version__": "0.34.1", "LLM": LLM, "SamplingParams": SamplingParams, "ModelRegistry": SimpleNamespace(models=MODELS)},
        "vllm.lora.request": {"LoRARequest": make_dataclass("LoRARequest", ["lora_name", "lora_int_id", "lora_path"], kw_only=True)},
        "vllm.inputs": {"tokens_input": tokens_input},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.engine.arg_utils": {"EngineArgs": EngineSettings},
        "vllm.v1.engine.llm_engine": {"LLMEngine": LLMEngine},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.distributed.parallel_state": {"destroy_model_parallel": lambda: None},
        "vllm.distributed.weight_transfer.base": {"WeightTransferUpdateInfo": WeightTransferUpdateInfo},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": WeightTransferEngineFactory},
        "vllm.distributed.weight_transfer.ipc_engine": {"IPCWeightTransferEngine": IPCWeightTransferEngine},
    }
    packages = {name.rsplit(".", depth)[0]: {} for name in contents for depth in range(1, name.count("."))}
    modules = {name: ModuleType(name) for name in packages | contents}
    for name, module in modules.items():
        module.__dict__.update(contents.get(name, {}))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # put back at the end of the test
    monkeypatch.setattr(WeightTransferEngineFactory, "registry", {})
    sys.modules.pop("aligner.rollout.vllm.weights", None)  # made of the fake's classes here, of vLLM's elsewhere
    yield modules
    sys.modules.pop("aligner.rollout.vllm.weights", None)


def make_engine(*, max_batch_size: int = 2, tp: int = 1, architecture: Architecture = SIZES, **sampling) -> VLLMEngine:
    settings = SamplingConfig(**({"max_response_length": 6} | sampling))
    config = RolloutConfig(sampling=settings, max_batch_size=max_batch_size, vllm=VLLMConfig(enforce_eager=True))
    model = {"path": Path("model"), "architecture": architecture, "dtype": torch.float32, "eos_id": EOS}
    return VLLMEngine(config, **model, max_sequence_length=CONTEXT, tp=tp, weight_bytes=hf_manifest(SIZES, torch.float32).num_bytes)


def started(**sampling) -> VLLMEngine:
    engine = make_engine(**sampling)
    engine.start()
    return engine


def weights() -> dict[str, torch.Tensor]:
    """Of the tensors that the fake model has."""
    manifest = hf_manifest(SIZES, torch.float32)
    names = ("embed_tokens", "q_proj", "k_proj", "v_proj")
    return {name: torch.randn(spec.shape) for name, spec in manifest.tensors.items() if any(part in name for part in names)}


def refit(engine: VLLMEngine, named: dict[str, torch.Tensor], version: int) -> None:
    engine.begin_refit(hf_manifest(SIZES, torch.float32))
    bucket = [(name, tensor.clone()) for name, tensor in named.items()]
    engine.load(bucket)
    for _, tensor in bucket:
        tensor.fill_(-7)  # the next bucket's
    engine.finish_refit(version)


def test_absence_is_an_error_that_says_what_to_do(fake_vllm, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="cannot be imported.*pip install"):
        make_engine().start()


class Changed:
    """Parts of vLLM as another version might have them."""

    def sleep(self) -> None: ...

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams, tenant: str) -> None: ...


@pytest.mark.parametrize(
    ("place", "now", "said"),
    [
        ("vllm.inputs:tokens_input", None, r"vllm\.inputs\.tokens_input \(module 'vllm\.inputs' has no attribute"),
        ("vllm.v1.worker.gpu_worker", None, r"vllm\.v1\.worker\.gpu_worker\.Worker\.start_weight_update \("),
        ("vllm:LLM.sleep", Changed.sleep, r"LLM\.sleep \(got an unexpected keyword argument 'level'\)"),
        ("vllm:LLM.wake_up", None, r"LLM\.wake_up \(type object 'LLM' has no attribute 'wake_up'\)"),
        ("vllm.v1.engine.llm_engine:LLMEngine.add_request", Changed.add_request, r"add_request \(missing a required argument: 'tenant'\)"),
        ("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory", None, "WeightTransferEngineFactory.register_engine"),
        ("vllm.engine.arg_utils:EngineArgs", WeightTransferUpdateInfo, r"EngineArgs \(got an unexpected keyword argument '\w+'\)"),
        ("vllm:SamplingParams", WeightTransferUpdateInfo, r"SamplingParams \(got an unexpected keyword argument 'temperature'\)"),
    ],
)
def test_a_version_is_taken_by_what_it_has_and_not_by_its_number(place, now, said, fake_vllm, monkeypatch):
    module, _, name = place.partition(":")
    *owner, last = name.split(".")
    if not name:
        monkeypatch.setitem(sys.modules, module, None)
    elif now is None:
        monkeypatch.delattr(getattr(fake_vllm[module], owner[0]) if owner else fake_vllm[module], last)
    else:
        monkeypatch.setattr(getattr(fake_vllm[module], owner[0]) if owner else fake_vllm[module], last, now)
    with pytest.raises(EngineError, match=f"vLLM, 0\\.34\\.1, does not match this engine .*{said}.*allowed: pip install"):
        make_engine().start()


@pytest.mark.parametrize("path", ["_finalizer", "engine_core.batch_queue", "engine_core.scheduler"])
def test_what_it_has_only_when_it_runs_is_looked_at_too(path, fake_vllm, monkeypatch):
    made = LLMEngine.__init__

    def init(self) -> None:
        made(self)
        owner = self.engine_core.engine_core if "." in path else self.engine_core
        delattr(owner, path.rpartition(".")[2])

    monkeypatch.setattr(LLMEngine, "__init__", init)
    with pytest.raises(EngineError, match=f"does not match this engine .*no attribute '{path.rpartition('.')[2]}'"):
        make_engine().start()


@pytest.mark.parametrize(
    ("sizes", "name", "told"),
    [
        ({"no_rope_layers": [0], "attention_temperature": 0.0}, "override_generation_config", {"attn_temperature_tuning": False}),
        ({"no_rope_layers": [0], "attention_temperature": 0.1}, "override_generation_config", {"attn_temperature_tuning": True}),
        ({"family": Family.cohere2, "sliding_window": 7}, "hf_overrides", {"sliding_window": 6}),  # one less than transformers' files say
        ({"family": Family.cohere2, "sliding_window": 0}, "hf_overrides", None),
        ({}, "override_generation_config", None),
    ],
)
def test_what_the_files_say_otherwise_is_told(sizes, name, told, fake_vllm):
    assert make_engine(architecture=replace(SIZES, **sizes))._settings().get(name) == told


def test_the_cache_has_the_size_that_the_sequences_need(fake_vllm):
    state = torch.get_rng_state()
    engine = started()
    assert torch.equal(torch.get_rng_state(), state)  # training's generator is as it was
    settings = engine._llm.settings
    # 2 sequences of one page of 128 tokens and one page more; keys and values of 1 layer, 1 group of 4 dimensions, 4 bytes each.
    assert settings.kv_cache_memory_bytes == 3 * 128 * 2 * 1 * 1 * 4 * 4
    assert (settings.max_model_len, settings.max_num_seqs, settings.logprobs_mode) == (20, 2, "raw_logprobs")
    assert not settings.enable_sleep_mode
    engine.sleep(ALL_MEMORY)  # nothing on a CPU
    engine.wake(ALL_MEMORY)
    engine.shutdown()
    engine.shutdown()


@pytest.mark.parametrize("tp", [1, 2])
def test_beside_a_trainer_it_asks_for_no_more_memory_than_it_needs(fake_vllm, monkeypatch, tp):
    """vLLM refuses to start if a part of the device is not free: 0.92 unless another is said."""
    weights, cache = hf_manifest(SIZES, torch.float32).num_bytes // tp, 3 * 128 * 2 * 1 * 1 * 4 * 4
    free = weights + cache + 100
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10 * (weights + cache)))
    monkeypatch.setattr(wrapper, "_generators_kept", nullcontext)  # it would look at the device
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # else it would ask which device this rank has
    engine = make_engine(tp=tp)
    engine.start()
    assert engine._llm.settings.gpu_memory_utilization == pytest.approx(0.1) and emptied
    free = weights + cache - 1
    with pytest.raises(
        EngineError, match=r"weights \(0\.0 GiB\) and key-value cache .* do not fit into the 0\.0 GiB .*rollout\.kv_cache_tokens"
    ):
        make_engine(tp=tp).start()


def test_a_refit_fills_the_fused_tensors_and_names_what_is_missing(fake_vllm):
    engine, named = started(), weights()
    refit(engine, named, 4)
    for name, tensor in named.items():
        assert torch.equal(engine.read_back(name), tensor), name
    assert engine.read_back("model.norm.weight") is None
    assert engine._llm.prefixes_forgotten == 1 and not engine._llm.model.layerwise
    del named["model.embed_tokens.weight"]
    with pytest.raises(EngineError, match=r"did not send: model\.embed_tokens\.weight of 2"):
        refit(engine, named, 5)


class OwnModel(FusedModel):
    """Like `FusedModel`, with the tensors of a model of transformers' files: q, k and v fused, and gate and up."""

    def __init__(self, files: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors, self.places = {}, {}
        for name, tensor in files.items():
            part = name.split(".")[-2]
            fused = name.replace(part, wrapper._FUSED.get(part, part))
            before = self.tensors.get(fused, tensor[:0])
            self.places[name] = (fused, slice(len(before), len(before) + len(tensor)))
            self.tensors[fused] = torch.cat([before, torch.zeros_like(tensor)])

    def load_weights(self, weights) -> set[str]:
        given = [(*self.places[name], tensor) for name, tensor in weights if name in self.places]
        self.given += [(self.tensors[fused][rows], tensor) for fused, rows, tensor in given]
        return {fused for fused, _, _ in given}


def own_engine(policy: Any, path: Path, monkeypatch, **more: Any) -> tuple[PhasedEngine, OwnModel]:
    made = OwnModel(dict(sorted(load_file(path / "model.safetensors").items(), key=lambda one: one[0].replace("q_proj", "a_proj"))))
    monkeypatch.setitem(globals(), "FusedModel", lambda: made)
    sampling = SamplingConfig(max_response_length=3)
    config = RolloutConfig(engine=EngineKind.vllm, max_batch_size=2, sampling=sampling, verify_refit=VerifyRefit.checksum, **more)
    return create.create_engine(policy, config, eos_id=EOS), made


@pytest.mark.parametrize("name", ["granite", "minimax_m2"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_refit_of_transformers_own_modules_has_the_files_names(name, lora, fake_vllm, load_policy, tmp_path_factory, monkeypatch):
    """Experts one by one, as in the files, though they are one tensor in the module; adapters merged; buckets cut between fused groups."""
    path = make_directory(tmp_path_factory)(name)
    adapters = {"lora": LoraConfig(rank=4)} if lora else {}
    policy = load_policy(path, optimizer=adam(), config=adapters, training={"total_steps": 10})
    monkeypatch.setattr(create, "MIB", 1024)  # buckets of a few tensors
    engine, made = own_engine(policy, path, monkeypatch, refit=Refit.merged, refit_bucket_mib=8)
    for steps in (range(0), range(2)):
        train(policy, steps)
        engine.refit(policy.version)
        sent = dict(policy.export_weights())
        assert sent.keys() == made.places.keys()
        for key, (fused, rows) in made.places.items():
            assert torch.equal(made.tensors[fused][rows].cpu(), sent[key].cpu()), key
    given = [rollout for part in engine.generate([Prompt(id=0, tokens=(3, 4), source="p")], [100]) for rollout in part]
    assert given[0].response == (3, 4, 5)
    made.places.pop("model.norm.weight")
    with pytest.raises(EngineError, match=r"of vLLM has no place for model\.norm\.weight"):
        engine.refit(policy.version)
    engine.shutdown()


def test_adapters_go_alone_and_the_weights_under_them_once(fake_vllm, load_policy, tmp_path_factory, monkeypatch, capsys):
    path = make_directory(tmp_path_factory)("granite")
    policy = load_policy(path, optimizer=adam(), config={"lora": LoraConfig(rank=3, alpha=4.0)}, training={"total_steps": 10})
    engine, made = own_engine(policy, path, monkeypatch)
    vllm, manager = engine.engine.foreign._llm, made.lora_manager
    assert (vllm.settings.max_loras, vllm.settings.max_lora_rank) == (1, 8) and "q_proj" in vllm.settings.lora_target_modules
    base = {name: tensor.clone() for name, tensor in policy.export_weights(merged=False)}
    whole, pairs = sum(tensor.nbytes for tensor in base.values()), sum(tensor.nbytes for _, tensor in export_adapters(policy.chunks))
    assert engine.refitted_bytes == whole + pairs
    train(policy, range(2))
    engine.refit(policy.version)
    assert engine.refitted_bytes == pairs < whole / 3
    for name, (fused, rows) in made.places.items():
        assert torch.equal(made.tensors[fused][rows].cpu(), base[name].cpu()), name
    sent = dict(export_adapters(policy.chunks))
    part = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"  # the second of three in one layer
    held = manager.modules["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[1][0, 0, :, :3]
    assert torch.equal(held.cpu(), (sent[part] * (4 / 3)).detach().cpu()) and held.any()
    list(engine.generate([Prompt(id=0, tokens=(3, 4), source="p")], [100]))
    assert vllm.llm_engine.loras == ["refit 1", "refit 2"] and vllm.llm_engine.asked == ["refit 2"]
    assert vllm.prefixes_forgotten == 3  # after the weights, and after each adapter
    with negated(policy.chunks):
        engine.refit(policy.version)
    assert engine.refitted_bytes == whole + pairs  # the weights were others
    engine.refit(policy.version)
    assert engine.refitted_bytes == whole + pairs and "merged" not in capsys.readouterr().out
    monkeypatch.setattr(manager, "add", lambda request: manager.lora_index_to_id.__setitem__(0, request.lora_int_id))
    train(policy, range(2, 3))
    with pytest.raises(EngineError, match=r"lora_\w\.weight.* tensors that were read back are not what was sent"):
        engine.refit(policy.version)
    with pytest.raises(EngineError, match="its last refit failed"):
        engine.generate([Prompt(id=0, tokens=(3, 4), source="p")], [100])
    engine.shutdown()


@pytest.mark.parametrize(
    ("name", "lora", "why"),
    [
        ("granite", {"rank": 4, "dora": True}, "model.lora.dora=true: vLLM has no DoRA"),
        ("granite", {}, "the policy has no adapters (model.lora.rank=0)"),
        ("granite", {"rank": 513}, "vLLM's adapters have a rank of at most 512, and these 513"),
        ("minimax_m2", {"rank": 4}, "vLLM's MiniMaxM2ForCausalLM takes none"),
    ],
)
def test_what_vllm_cannot_take_alone_is_merged_and_said(name, lora, why, fake_vllm, load_policy, tmp_path_factory, monkeypatch, capsys):
    path = make_directory(tmp_path_factory)(name)
    policy = load_policy(path, optimizer=adam(), config={"lora": LoraConfig(**lora)})
    with pytest.raises(ConfigError, match=rf"^rollout\.refit=adapters: {re.escape(why)}; allowed: auto, merged$"):
        own_engine(policy, path, monkeypatch, refit=Refit.adapters)
    engine, _ = own_engine(policy, path, monkeypatch)
    assert engine.refitted_bytes == sum(tensor.nbytes for _, tensor in policy.export_weights())
    said = f"rollout.refit=auto: merged, every refit sends all weights: {why}\n"
    assert (said in capsys.readouterr().out) is bool(lora)
    engine.shutdown()


def test_adapters_alone_are_vllms():
    for engine in (EngineKind.megatron, EngineKind.tensorrt_llm):
        with pytest.raises(ConfigError, match=rf"^rollout\.refit=adapters: rollout\.engine={engine.value} .*allowed: auto, merged, or"):
            RolloutConfig(engine=engine, refit=Refit.adapters)


def test_a_class_that_vllm_changes_stays_the_policys():
    """As vLLM's decorator does: `__init__` and `__call__` of the class itself are others afterwards."""
    import transformers

    def small() -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_config(transformers.SmolLM3Config(**(OWN_SIZES | CONFIGS["smollm3"][1])))

    policys, whole = small().model, wrapper.classes_of_transformers()
    kind, init = type(policys), type(policys).__init__

    def changed(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.do_not_compile = True

    kind.__init__ = changed
    kind.__call__ = lambda self, *given, **named: ("compiled", self.do_not_compile)
    theirs = small()
    wrapper.keep_apart(whole, theirs)
    assert theirs.model() == ("compiled", True) and isinstance(theirs.model, kind)
    assert policys(torch.tensor([[3, 4]])).last_hidden_state.shape == (1, 2, 32)
    assert small().model(torch.tensor([[3, 4]])).last_hidden_state.shape == (1, 2, 32)
    assert kind.__init__ is init and "__call__" not in vars(kind)


def test_a_refit_that_failed_leaves_the_update_and_another_succeeds(fake_vllm, monkeypatch):
    engine, named = started(), weights()
    monkeypatch.setattr(engine._llm.model, "load_weights", lambda given: {}[next(iter(given))[0]])
    engine.begin_refit(hf_manifest(SIZES, torch.float32))
    with pytest.raises(KeyError):
        engine.load(list(named.items()))
    assert not engine._llm.model.layerwise
    engine.abort_refit()
    monkeypatch.undo()
    engine.begin_refit(hf_manifest(SIZES, torch.float32))
    engine.abort_refit()  # another rank's failed
    assert not engine._llm.model.layerwise
    refit(engine, named, 1)
    assert all(torch.equal(engine.read_back(name), tensor) for name, tensor in named.items())


def test_what_vllms_model_ignores_is_named_and_what_it_computes_is_not_asked_for(fake_vllm):
    engine, named = started(), weights()
    computed = {"model.layers.0.self_attn.W_UV": torch.zeros(2)}  # as of latent attention, after an update
    model = engine._llm.model
    model.named_parameters = lambda: iter((model.tensors | ({} if model.layerwise else computed)).items())
    refit(engine, named, 1)
    engine.begin_refit(hf_manifest(SIZES, torch.float32))
    with pytest.raises(EngineError, match=r"FusedModel of vLLM has no place for lm_head\.weight"):
        engine.load([*named.items(), ("lm_head.weight", torch.zeros(11, 8))])


def test_only_what_shares_a_weight_with_another_is_packed_again(fake_vllm):
    """Models without an output layer of their own (Gemma 2, Cohere) share none; whatever it is called, a tied one does."""
    backend = import_module("aligner.rollout.vllm.weights").InProcessWeights
    packed = []

    def layer(name: str) -> torch.nn.Module:
        made = torch.nn.Linear(2, 2, bias=False)
        made.quant_method = SimpleNamespace(process_weights_after_loading=lambda given: packed.append(name if given is made else "another"))
        return made

    model = torch.nn.ModuleDict({"embed": layer("embed"), "other": layer("other"), "plain": torch.nn.Linear(2, 2)})
    model.set_layerwise = lambda value: None
    model["plain"].quant_method = SimpleNamespace(moe_kernel=object())
    backend(model).start_weight_update()
    assert model["plain"].quant_method.moe_kernel is None  # on the CPU experts are packed when their kernel is made
    backend(model).finish_weight_update()
    assert packed == []
    model["nested"] = torch.nn.ModuleDict({"tied": layer("tied"), "bare": torch.nn.Linear(2, 2, bias=False), "same": model["embed"]})
    model["nested"]["tied"].weight = model["nested"]["bare"].weight = model["embed"].weight
    backend(model).finish_weight_update()
    assert packed == ["tied"]


def test_nothing_of_a_generation_is_left_for_the_next_one(fake_vllm, monkeypatch):
    engine, sampling = started(), SamplingConfig(max_response_length=6)
    vllm_engine = engine._llm.llm_engine
    for _ in range(2):  # the same indices, under names that never come again
        requests = [GenRequest(index=i, tokens=(5,), seed=100, limit=i + 2) for i in range(3)]
        assert sum(len(part) for part in engine.generate(ListedWork(requests), sampling)) == 3
        assert not vllm_engine.queue
    stopped_early = engine.generate(ListedWork(requests), sampling)
    next(stopped_early)
    assert vllm_engine.queue and vllm_engine.running
    stopped_early.close()
    assert not vllm_engine.queue and not vllm_engine.running
    assert len(vllm_engine.names) == 8


def test_what_does_not_end_is_an_error_and_what_failed_is_not_waited_for(fake_vllm, monkeypatch):
    engine, requests = started(), [GenRequest(index=0, tokens=(5,), seed=100)]
    vllm_engine = engine._llm.llm_engine
    monkeypatch.setattr(wrapper, "DRAIN_SECONDS", 0.0)
    vllm_engine.engine_core.engine_core.scheduler.has_requests = lambda: True
    with pytest.raises(EngineError, match="vLLM was not done 0 s after the last response of a generation"):
        list(engine.generate(ListedWork(requests), SamplingConfig()))
    monkeypatch.setattr(vllm_engine, "step", lambda: {}["broken"])
    with pytest.raises(KeyError, match="broken"):
        list(engine.generate(ListedWork(requests), SamplingConfig()))
    assert not vllm_engine.running


def test_results_have_their_requests_limits_and_version(fake_vllm):
    engine = started()
    refit(engine, weights(), 7)
    requests = [
        GenRequest(index=0, tokens=(5, 6), seed=100),  # as long as the sampling allows
        GenRequest(index=1, tokens=(5,) * 18, seed=100),  # as the context allows
        GenRequest(index=2, tokens=(5,), seed=100, limit=1),  # as its own limit allows
        GenRequest(index=3, tokens=(5,), seed=EOS),
        GenRequest(index=4, tokens=(5,), seed=9),  # a stop token of this sampling
    ]
    state = torch.get_rng_state()
    sampling = SamplingConfig(max_response_length=6, stop_token_ids=[9])
    results = {result.index: result for part in engine.generate(ListedWork(requests), sampling) for result in part}
    assert torch.equal(torch.get_rng_state(), state)
    # Where nothing stops them, tokens are 3, 4, 5, ...: 9 would be the seventh.
    assert {i: r.tokens for i, r in results.items()} == {0: (3, 4, 5, 6, 7, 8), 1: (3, 4), 2: (3,), 3: (EOS,), 4: (9,)}
    assert results[0].logprobs == (-3.0, -4.0, -5.0, -6.0, -7.0, -8.0)
    reasons = {i: r.finish_reason for i, r in results.items()}
    assert reasons == dict.fromkeys((0, 1, 2), FinishReason.length) | dict.fromkeys((3, 4), FinishReason.stop)
    assert {r.weight_version for r in results.values()} == {7} and {r.kind for r in results.values()} == {LogprobKind.sampled}
    assert engine._llm.llm_engine.most == 2


def test_requests_of_other_threads_have_settings_of_their_own_leave_and_fail_alone(fake_vllm, topology):
    """As with the built-in engine, but the response comes as a whole."""
    engine = started()
    refit(engine, weights(), 7)
    engine.replica, engine.refit = Replica(index=0, count=1), lambda version: 0
    phased = PhasedEngine(engine, SamplingConfig(), WorkSharing(engine.replica, None), offload=False)
    phased.version = 7
    live, pieces = LiveEngine(phased), []

    def ask(seed: int = 100, tokens: tuple[int, ...] = (5, 6), on_tokens: Callable | None = None, top: int = 0, **sampling):
        how = SamplingConfig(**{"max_response_length": 6} | sampling)
        return live.submit(LiveRequest(tokens=tokens, seed=seed, sampling=how, on_tokens=on_tokens, top=top))

    whole, stopped, short = ask(on_tokens=lambda *piece: pieces.append(piece)), ask(stop_token_ids=[5]), ask(max_response_length=2)
    heated, named = ask(temperature=0.5, max_response_length=1), []
    likely = ask(max_response_length=2, top=1, on_tokens=lambda *piece: named.append(piece))
    wrong = {ask(stop_strings=["a"]): "stop_strings", ask(tokens=(5, 11)): "none of the model's"}
    leaves = ask(max_response_length=9)
    step = engine._llm.llm_engine.step

    def stepping() -> list:
        leaves.cancel()  # with the engine or not
        return step()

    engine._llm.llm_engine.step = stepping
    live.run(lambda: True)
    assert [one.result(0).tokens for one in (whole, stopped, short, heated)] == [(3, 4, 5, 6, 7, 8), (3, 4, 5), (3, 4), (3,)]
    assert pieces == [((3, 4, 5, 6, 7, 8), whole.result(0).logprobs, ())] and stopped.result(0).finish_reason == FinishReason.stop
    assert named == [((3, 4), [-3.0, -4.0], [[(3, -3.0)], [(4, -4.0)]])] and likely.result(0).tokens == (3, 4)
    assert (whole.result(0).kind, heated.result(0).kind) == (LogprobKind.sampled, LogprobKind.raw) and leaves.cancelled()
    for answer, message in wrong.items():
        with pytest.raises(EngineError, match=message):
            answer.result(0)
    assert not engine._llm.llm_engine.running and engine._llm.llm_engine.most == 2


def test_every_end_token_stops_and_ids_of_no_token_are_biased_away(fake_vllm):
    engine, request = started(), GenRequest(index=0, tokens=(5,), seed=1)
    given = engine._params(request, EngineSampling(stop_token_ids=[9, 4, 11, 400], missing_ids=(3, 7)))
    assert given.stop_token_ids == [EOS, 4, 9]  # of 11 rows: what the model has no row for cannot end a response
    assert given.logit_bias == {3: -100.0, 7: -100.0}
    assert engine._params(request, SamplingConfig()).logit_bias is None


def test_log_probs_are_of_the_kind_that_is_said_or_refused():
    assert make_engine().capabilities.logprobs == LogprobKind.sampled
    assert make_engine(temperature=0.7).capabilities.logprobs == LogprobKind.sampled  # vLLM is told to scale them
    assert make_engine(temperature=0.7, top_p=0.9).capabilities.logprobs == LogprobKind.raw
    for setting in ({"stop_strings": ["."]}, {"raw_logprobs": True}):
        with pytest.raises(ConfigError, match=f"sampling.{next(iter(setting))}.*rollout.engine=vllm"):
            make_engine(**setting)
    scaled = make_engine(temperature=0.7)
    with pytest.raises(ConfigError, match=r"sampling\.top_k=4: not available.*temperature=0\.7"):
        scaled._kind(SamplingConfig(top_k=4))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_the_fake_has_vllm_s_names():
    from vllm import SamplingParams as RealSamplingParams
    from vllm.engine.arg_utils import EngineArgs

    assert {f.name for f in fields(SamplingParams)} <= set(RealSamplingParams.__struct_fields__)
    assert {f.name for f in fields(EngineSettings)} <= {f.name for f in fields(EngineArgs)}


def policy_of(make_model: Callable, name: str, **config):
    """A policy of a family, with the sizes that vLLM's kernels want: heads of 32 dimensions."""
    from hf_models import HF_MODELS, SIZES as HF_SIZES
    from transformers import AutoConfig

    from aligner.models.families import architecture_from_hf
    from aligner.models.training.optimizer import OptimizerConfig

    own = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1} | (
        {"head_dim": 32} if "head_dim" in HF_MODELS[name] else {}
    )
    sizes = asdict(architecture_from_hf(AutoConfig.for_model(**(HF_SIZES | HF_MODELS[name] | own)).to_dict()))
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    training = {"temperature": 0.7, "micro_batch_size": 5}
    return make_model("policy", optimizer=optimizer, architecture=sizes, training=training, config=config)


def own_policy_of(load_policy: Callable, path: Path, name: str, **config):
    """A policy that is read from files, of transformers' own modules or Qwen 2, with the same sizes."""
    import transformers

    kind, more = CONFIGS.get(name, ("Qwen2Config", {"intermediate_size": 64}))
    wide = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(OWN_SIZES | wide | more))).save_pretrained(path)
    return load_policy(path, optimizer=adam(lr=1e-2), training={"temperature": 0.7, "micro_batch_size": 5}, config=config)


def real_engine(policy: Any, **more: Any) -> PhasedEngine:
    sampling = SamplingConfig(temperature=0.7, max_response_length=8)
    config = RolloutConfig(engine=EngineKind.vllm, sampling=sampling, max_batch_size=3, vllm=VLLMConfig(enforce_eager=True), **more)
    return create.create_engine(policy, config, eos_id=EOS)


PROMPTS = [Prompt(id=i, tokens=tuple(range(3, 6 + i)), source=f"prompt {i}") for i in range(5)]
SEEDS = [11, 12, 13, 14, 15]


def resampled(engine: PhasedEngine, policy: Any) -> tuple[LabeledBatch, torch.Tensor]:
    """After a refit: rows whose log-probs are the policy's, and these."""
    engine.refit(policy.version)
    rows = rollout_batch(sampled(engine, PROMPTS, SEEDS), 0)
    batch = LabeledBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=rows.loss_mask)
    torch.testing.assert_close(rows.rollout_logprobs, policy.logprobs(batch) * rows.loss_mask, rtol=0, atol=1e-4)
    return batch, rows.rollout_logprobs


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
# Gemma 2 and Cohere have no output layer of their own in vLLM, whose windows of Cohere 2 have one token more than transformers'; Nemotron
# has no gates. The experts come last: an engine's groups go with it, and those of a dense model have none for experts.
@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "gemma2", "cohere", "cohere2", "nemotron", "granite", "smollm3", "mixtral"])
def test_vllm_samples_with_the_policys_log_probs_before_and_after_a_step(family, make_model, load_policy, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")  # vLLM's requests have then our names
    policy = own_policy_of(load_policy, tmp_path, family) if family in CONFIGS else policy_of(make_model, family)
    engine = real_engine(policy, verify_refit=VerifyRefit.checksum)
    batch, before = resampled(engine, policy)
    policy.train_step(batch, sft_loss)
    early = engine.generate(PROMPTS, SEEDS)
    next(early)
    early.close()
    assert not torch.equal(before, resampled(engine, policy)[1])
    engine.shutdown()
    assert torch.distributed.is_initialized()


LORAS = {
    "every": LoraConfig(rank=4, alpha=6.0),  # of the five kinds of layers, and not a power of two
    "some": LoraConfig(rank=9, rslora=True, targets=[LoraTarget.q, LoraTarget.v, LoraTarget.fc2]),
    "pissa": LoraConfig(rank=2, init=LoraInit.pissa, targets=[LoraTarget.qkv, LoraTarget.proj]),
}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    ("family", "lora", "quantization"),
    [
        ("qwen2", "every", "none"),
        ("qwen2", "every", "nf4"),
        ("qwen2", "some", "int8"),
        ("qwen2_tied", "pissa", "none"),
        ("granite", "every", "none"),
    ],
)
def test_adapters_alone_reach_vllm_and_its_log_probs_are_the_policys(family, lora, quantization, make_model, load_policy, tmp_path, capsys):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    config = {"lora": LORAS[lora], "quantization": Quantization(quantization)}
    in_files = family in CONFIGS or quantization != "none"
    policy = own_policy_of(load_policy, tmp_path, family, **config) if in_files else policy_of(make_model, family, **config)
    engine = real_engine(policy, verify_refit=VerifyRefit.checksum)
    whole = sum(tensor.nbytes for _, tensor in policy.export_weights())
    pairs = [adapter for chunk in policy.chunks for _, adapter in named_adapters(chunk)]
    own = sum(parameter.nbytes for adapter in pairs for parameter in adapter.parameters())
    assert engine.refitted_bytes == whole + own  # the first time
    batch, before = resampled(engine, policy)
    assert engine.refitted_bytes == own < whole
    policy.train_step(batch, sft_loss)
    _, after = resampled(engine, policy)
    assert engine.refitted_bytes == own and not torch.equal(before, after)
    with negated(policy.chunks):
        _, other = resampled(engine, policy)
    assert engine.refitted_bytes == whole + own and not torch.equal(other, after)  # what is frozen was changed
    _, again = resampled(engine, policy)
    torch.testing.assert_close(again, after, rtol=0, atol=1e-5)
    assert "merged" not in capsys.readouterr().out
    engine.shutdown()


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed")
def test_the_extra_resolves_with_numpy_2():
    """`pip install 'aligner[vllm]'`, for a GPU; and not beside the extra with PyTriton."""
    setup = Path(__file__).parents[3] / "setup.py"

    def resolved(*extras: str) -> subprocess.CompletedProcess:
        options = [part for extra in extras for part in ("--extra", extra)]
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.12", *options, str(setup)]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    found = resolved("vllm")
    if "Failed to fetch" in found.stderr or "network" in found.stderr:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    versions = dict(line.split(" ")[0].split("==") for line in found.stdout.splitlines() if "==" in line and not line.startswith(" "))
    assert found.returncode == 0, found.stderr
    assert versions["numpy"].startswith("2.") and tuple(map(int, versions["vllm"].split(".")[:2])) >= (0, 32)
    assert resolved("vllm", "servers").returncode != 0


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_an_output_layer_that_vllms_model_has_not_is_an_error_and_not_left_out(make_model):
    with pytest.raises(EngineError, match=r"CohereForCausalLM of vLLM has no place for lm_head\.weight"):
        real_engine(policy_of(make_model, "cohere_untied"))
