"""A tiny tokenizer with prompts, the config of a run on them, and contexts of preflights that have met already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from pathlib import Path

import pytest
from torch.distributed import HashStore

from aligner.algorithms.registry import recipes
from aligner.commands.preflight.allocation import Allocation
from aligner.commands.preflight.framework import Context
from aligner.parallel.launch import LaunchSource, World
from aligner.planner.config import Device
from aligner.run.settings import JobRun
from aligner.settings.compose import compose

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= "


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer/` (one token per character, no chat template) and `prompts.jsonl` (8 sums with answers)."""
    from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("task")
    names = ["<pad>", "<eos>", *LETTERS]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in names[:2]])
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def composed(task: Path) -> dict[str, JobRun]:
    """The configs as they are composed, once: it takes a second."""
    base = [
        f"model.tokenizer={task / 'tokenizer'}",
        f"data.train={task / 'prompts.jsonl'}",
        *("model.architecture.num_layers=2", "model.architecture.hidden_size=32", "model.architecture.ffn_hidden_size=64"),
    ]
    reward = "reward.function.path=aligner.rewards.builtin:exact_match"
    return {"ppo": compose(recipes()["ppo"].config, "ppo", [*base, reward]), "sft": compose(recipes()["sft"].config, "sft", base)}


@pytest.fixture
def settings(composed: dict[str, JobRun], tmp_path: Path) -> Callable[..., JobRun]:
    """`settings("ppo", {"critic.server.port": 1})`: a config of the task with these values and a run directory under tmp_path."""

    def make(name: str, values: Mapping[str, object] | None = None) -> JobRun:
        job = deepcopy(composed[name])
        for key, value in ({"run.directory": str(tmp_path / "run")} | dict(values or {})).items():
            *path, field = key.split(".")
            section = reduce(lambda owner, part: owner.__getattribute__(part), path, job)
            section.__setattr__(field, value)
        return job

    return make


@pytest.fixture
def on_gpus(settings: Callable[..., JobRun]) -> JobRun:
    """A config that is planned for nodes of GPUs."""
    return settings("ppo", {"cluster.device": Device.gpu, "cluster.network_gb_per_second": 50.0, "cluster.gpu_memory_gib": 79.1})


@pytest.fixture
def context_of() -> Callable[..., Context]:
    """`context_of(job, nodes=("n0",))`: of rank 0 of as many ranks as there are nodes named, which have met."""

    def make(job: JobRun | None = None, nodes: Sequence[str] = ("n0",)) -> Context:
        size, local = len(nodes), list(nodes).count(nodes[0])
        world = World(rank=0, world_size=size, local_rank=0, local_world_size=local, source=LaunchSource.single)
        allocation = Allocation(world, HashStore(), nodes[0])
        allocation.nodes = tuple(nodes)
        allocation.begin("test", 5.0)
        return Context(allocation=allocation, name="ppo", overrides=(), job=job)

    return make
