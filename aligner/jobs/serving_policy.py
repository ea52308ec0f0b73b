"""A policy that samples for callers in this process, without a training job: for `aligner serve`, `chat`, `generate` and `eval`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from aligner.data.tokenizer import Tokenizer, model_settings
from aligner.endpoint.requests import Model
from aligner.errors import CheckpointError, ConfigError
from aligner.jobs.parts import load_model_files
from aligner.models import create
from aligner.models.architecture.architecture import Architecture
from aligner.models.checkpoint.files import LATEST, is_complete, read_marker, resolve
from aligner.models.checkpoint.weights import LORA, QUANTIZATION, saved_quantization
from aligner.models.config import Dtype, LoraConfig, LoraTarget, ModelConfig, Part, Quantization
from aligner.models.modules.peft import CONFIG_FILE, WEIGHTS_FILE, projections
from aligner.models.training.policy import MegatronPolicy
from aligner.parallel import launch, platform, topology
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.rollout.live import LiveEngine
from aligner.run.from_hub import fetch_one
from aligner.telemetry.run_files import RunFiles
from aligner.types import LabeledBatch

START_SECONDS = 60.0


@dataclass(kw_only=True)
class OpenPolicy:
    """A policy and its engine, which samples in a thread of its own while this is open."""

    name: str
    tokenizer: Tokenizer
    live: LiveEngine
    policy: MegatronPolicy
    seed: int
    failure: str | None = None  # why the engine's thread has ended early
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def served(self, **how: Any) -> Model:
        """As an endpoint takes it; `how`: further fields."""
        return Model(name=self.name, tokenizer=self.tokenizer, live=self.live, score=self.score, **how)

    def score(self, rows: Sequence[Sequence[int]], count: int = 1) -> tuple[list[list[float]], list[list[list[tuple[int, float]]]]]:
        """Of texts, for every token but the first: its log-prob at temperature 1, and the `count` likeliest tokens with theirs."""
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), max(2, int(lengths.max())), dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        positions = torch.arange(tokens.shape[1])
        batch = LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=(positions > 0) & (positions < lengths[:, None]))
        with self._lock:
            found, (best, most) = self.policy.logprobs(batch), self.policy.topk(batch, count, below=self.tokenizer.max_token_id + 1)
        own = [line[1 : len(row)].tolist() for line, row in zip(found, rows, strict=True)]
        likeliest = torch.stack([best.double(), most.double()], dim=-1)  # ids are whole numbers below 2^53
        tops = [line[1 : len(row)].tolist() for line, row in zip(likeliest, rows, strict=True)]
        return own, [[[(int(token), p) for token, p in place] for place in line] for line in tops]


@contextmanager
def open_policy(
    model: str,
    *,
    name: str = "",
    max_batch_size: int = 32,
    context: int = 0,
    kv_cache_tokens: int = 0,
    dtype: str = Dtype.auto.value,
    images: bool = False,
    seed: int = 0,
    layout: Topology | None = None,
) -> Iterator[OpenPolicy]:
    """`model`: a directory as `model.path` names it or ORG/NAME of the Hub, an adapter of PEFT (on its base, its files unmerged), or a run
    (its newest policy). `name`: as answers call it (default: the directory's). `layout`: of this process, if it has made one already.

    Raises ConfigError, CheckpointError, or AlignerError of the Hub. Leaving it waits for the running responses, after an error for none.
    """
    config, architecture, tokenizer = _described(model, dtype=Dtype(dtype), context=context, images=images)
    layout = layout or _world()
    parallel, training = ParallelConfig(), create.training(config, None, vision=tokenizer.vision)
    policy = create.create_policy(config, architecture, parallel, layout, training)
    rollout = RolloutConfig(max_batch_size=max_batch_size, kv_cache_tokens=kv_cache_tokens)
    engine = create_engine(policy, rollout, tokenizer=tokenizer)
    named = name or Path(model).resolve().name
    opened = OpenPolicy(name=named, tokenizer=tokenizer, live=LiveEngine(engine), policy=policy, seed=seed)
    is_over = threading.Event()

    def sample() -> None:
        try:
            opened.live.run(is_over.is_set)
        except BaseException as error:
            opened.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        finally:
            opened.live.close()

    thread = threading.Thread(target=sample, name="engine", daemon=True)
    thread.start()
    try:
        yield opened
    except BaseException:
        opened.live.close()
        raise
    finally:
        is_over.set()
        thread.join()
        engine.shutdown()


@cache
def _world() -> Topology:
    """This process's own, as long as it lives: a process can have only one."""
    launch.initialize(
        platform.backend(), timeout_seconds=START_SECONDS, fingerprint="serving", environ={**os.environ, "ALIGNER_LAUNCH": "single"}
    )
    platform.select_device(0)
    atexit.register(launch.shutdown)
    return topology.initialize(ParallelConfig(), seed=0)


def _described(model: str, *, dtype: Dtype, context: int, images: bool) -> tuple[ModelConfig, Architecture, Tokenizer]:
    path, run = fetch_one("MODEL", model), None
    if (RunFiles(path).config).is_file():
        run = RunFiles(path)
        images = images or bool(yaml.safe_load(run.config.read_text()).get("model", {}).get("images"))
        path = next((one for one in (run.checkpoints / "policy", run.export, run.adapter) if one.is_dir()), path)
        if path == run.path:
            raise ConfigError(f"{run.path}: the run has no checkpoint of a policy and no export yet")
    base, lora, quantization, nested = path, LoraConfig(), Quantization.none, False
    if (path / CONFIG_FILE).is_file():
        settings = model_settings(path / CONFIG_FILE)
        base = fetch_one("base_model_name_or_path", str(settings.get("base_model_name_or_path") or ""))
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
            raise ConfigError(f"{path / CONFIG_FILE}: r={rank}, lora_alpha={alpha}, expected the rank and the scaling of an adapter")
        kinds = {"rslora": bool(settings.get("use_rslora")), "dora": bool(settings.get("use_dora"))}
        lora = LoraConfig(rank=rank, alpha=float(alpha), path=str(path), **kinds)
    elif (path / LATEST).exists() or is_complete(path):
        marker = read_marker(path := resolve(path))
        base = path
        if described := marker.get(LORA):
            targets = [LoraTarget(one) for one in described.pop("targets")]
            parts = [Part(one) for one in described.pop("parts", ["text"])]
            base, lora = Path(marker["base"]), LoraConfig(**described, targets=targets, parts=parts, path=str(path))
            if QUANTIZATION in marker:
                quantization, packed, nested = saved_quantization(marker)
                dtype = Dtype(str(packed).removeprefix("torch."))
    tokenizer = str(path) if base != path and (path / "tokenizer_config.json").is_file() else ""
    found_in = {"path": str(base), "tokenizer": tokenizer, "dtype": dtype, "lora": lora, "quantization": quantization}
    config = ModelConfig(**found_in, double_quantization=nested, seq_length=context, images=images)
    found, architecture = load_model_files(config, run=run)
    if (path / CONFIG_FILE).is_file():
        lora.targets = _targets(path, architecture)
    return config, architecture, found


def _targets(adapter: Path, architecture: Architecture) -> list[LoraTarget]:
    """Which layers an adapter of PEFT has pairs for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(adapter / WEIGHTS_FILE, "pt") as file:
            there = {".".join(name.split(".")[-4:-2]) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{adapter / WEIGHTS_FILE}: cannot be read: {error}") from error
    found = []
    for target in LoraTarget:
        try:
            names = {".".join(one.name.split(".")[-2:]) for one in projections(architecture, LoraConfig(rank=1, targets=[target]))}
        except ConfigError:  # not of this architecture
            continue
        if names and names <= there:
            found.append(target)
    if not found:
        raise ConfigError(f"{adapter}: an adapter of {', '.join(sorted(there))}, none of which is a layer that can have one here")
    return found
