"""A plan refuses what a run refuses before it reads data or weights, in the same words; both get the same settings."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.algorithms.registry import recipes
from aligner.commands.plan import command as plan
from aligner.errors import ConfigError
from aligner.jobs import samples as online_job, serves as serving, trains as trainer_job, writes as writer_job
from aligner.planner.estimate import check
from aligner.settings.compose import compose

JOBS = {  # what the ranks of a component of a plan do
    "actor": (online_job, lambda recipe, config: online_job.train(recipe, config)),
    "trainer": (trainer_job, lambda recipe, config: trainer_job.train(recipe, config)),
    "writer": (writer_job, lambda recipe, config: writer_job.write(recipe, config)),
    "critic": (serving, lambda recipe, config: serving.serve_critic(config)),
}
RUNS = {  # the components of a recipe's plan
    **dict.fromkeys(("grpo", "spin"), {"actor"}),
    "ppo": {"actor", "critic"},
    **dict.fromkeys(("sft", "dpo", "distill", "steerlm2"), {"trainer"}),
    **dict.fromkeys(("teacher_logprobs", "generate", "annotate", "constitution"), {"writer"}),
}
CONTEXT = 64
TRTLLM, VLLM = "rollout.engine=tensorrt_llm", "rollout.engine=vllm"
SHARED = ["model.share_prompts=true", "model.packing=true", "model.micro_batch_tokens=64", "parallel.cp=2"]
OVERLAP = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_comm_overlap=true"]
REFUSED = [
    ("grpo", "actor", [TRTLLM, "rollout.tp=8", "rollout.verify_refit=checksum"], "rollout.verify_refit=checksum:"),
    ("grpo", "actor", [TRTLLM, "rollout.sampling.repetition_penalty=1.1"], "rollout.sampling.repetition_penalty=1.1: not with"),
    ("grpo", "actor", [TRTLLM, "rollout.sampling.raw_logprobs=true"], "rollout.sampling.raw_logprobs=true: rollout.engine=tensorrt_llm"),
    ("grpo", "actor", [VLLM, "rollout.sampling.raw_logprobs=true"], "rollout.sampling.raw_logprobs: not available with"),
    ("grpo", "actor", [VLLM, "rollout.tp=2", "rollout.verify_refit=checksum"], "rollout.verify_refit=checksum: rollout.engine=vllm reads"),
    ("grpo", "actor", ["rollout.tp=3"], "rollout.tp=3: does not divide the 8 ranks of this component; allowed: 1, 2, 4, 8"),
    ("grpo", "actor", ["rollout.tp=8", "model.architecture.ffn_hidden_size=100"], "rollout.tp=8: does not divide the model's"),
    ("grpo", "actor", ["parallel.tp=3"], "parallel.tp=3 does not divide the 8 ranks of this component; allowed: 1, 2, 4, 8"),
    ("grpo", "actor", ["algorithm.mini_batch_size=4"], "algorithm.mini_batch_size=4: smaller than the 8 data-parallel replicas"),
    ("grpo", "actor", ["data.max_prompt_length=60"], "data.max_prompt_length=60 + rollout.sampling.max_response_length=8: longer than"),
    ("grpo", "actor", SHARED, "model.share_prompts=true: sequences that are"),
    ("grpo", "actor", ["parallel.pp=4"], "parallel.pp=4: does not divide the model's num_layers=2; allowed: 1, 2"),
    ("ppo", "critic", ["critic.mini_batch_size=60"], "critic.mini_batch_size=60: the last mini-batch of 64 rollouts has 4"),
    ("ppo", "critic", ["critic.parallel.tp=3"], "critic.parallel.tp=3 does not divide the 8 ranks of this component"),
    ("ppo", "actor", [VLLM, "rollout.sampling.stop_strings=[x]"], "rollout.sampling.stop_strings: not available with rollout.engine=vllm"),
    ("spin", "actor", ["data.max_length=65"], "data.max_length=65: longer than the model's context of 64 tokens"),
    ("spin", "actor", ["algorithm.batch_size=4"], "algorithm.batch_size=4: smaller than the 8 data-parallel replicas"),
    ("sft", "trainer", ["data.max_length=65"], "data.max_length=65: longer than the model's context of 64 tokens"),
    ("sft", "trainer", ["algorithm.batch_size=4"], "algorithm.batch_size=4: smaller than the 8 data-parallel replicas"),
    ("sft", "trainer", OVERLAP, "parallel.tp_comm_overlap=true"),
    ("dpo", "trainer", ["algorithm.batch_size=4"], "algorithm.batch_size=4: smaller than the 8 data-parallel replicas"),
    ("teacher_logprobs", "writer", ["data.max_length=65"], "data.max_length=65: longer than the model's context of 64 tokens"),
    ("generate", "writer", [VLLM, "rollout.sampling.stop_strings=[x]"], "rollout.sampling.stop_strings: not available with"),
    ("annotate", "writer", ["data.max_length=65"], "data.max_length=65: longer than the model's context of 64 tokens"),
    ("constitution", "writer", [TRTLLM, "rollout.sampling.stop_strings=[x]"], "rollout.sampling.stop_strings=['x']: not with"),
]


def overrides_of(recipe: str, task: Path, directory: Path) -> list[str]:
    """Settings of a run that nothing is wrong with, on 8 ranks; its data is not there."""
    sizes = ["num_layers=2", "hidden_size=64", "num_attention_heads=8", "num_key_value_heads=8", "ffn_hidden_size=96", "vocab_size=48"]
    given = [f"model.architecture.{size}" for size in (*sizes, f"max_position_embeddings={CONTEXT}")]
    given += [f"model.tokenizer={task / 'tokenizer'}", f"run.directory={directory}", "num_processes=8", "data.train=not-there.jsonl"]
    has = {key: hasattr(recipes()[recipe].config(), key) for key in ("rollout", "reward", "critic")}
    given += ["data.max_prompt_length=8", "rollout.sampling.max_response_length=8"] if has["rollout"] else []
    given += ["reward.function.path=aligner.rewards.builtin:length"] if has["reward"] else []
    given += ["critic.num_processes=8", "algorithm.rollouts_per_step=64", "algorithm.mini_batch_size=64"] if has["critic"] else []
    given += ["data.max_history_length=8"] if recipe == "constitution" else []
    return given + (["data.max_length=32"] if hasattr(recipes()[recipe].config().data, "max_length") else [])


def first_refusal(recipe: str, component: str, config: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the component's own job says at its start, of ranks that are only said to be there."""
    module, job = JOBS[component]

    @contextmanager
    def session(config, run, parallel, **_):
        parallel.check_world(8)
        topology = SimpleNamespace(world_size=8, rank=0, dp_size=8 // parallel.replica_size)
        directory = SimpleNamespace(first_day=date.today)
        yield SimpleNamespace(topology=topology, is_first=True, say=lambda text: None, directory=directory)

    @contextmanager
    def announced(*_, **__):
        yield None

    monkeypatch.setattr(module, "open_session", session)
    monkeypatch.setattr(module, "announced", announced, raising=False)
    with pytest.raises(ConfigError) as refused:
        job(recipes()[recipe], config)
    return str(refused.value)


@pytest.mark.parametrize(("recipe", "component", "settings", "message"), REFUSED)
def test_a_plan_says_what_the_run_would(recipe, component, settings, message, task, tmp_path, monkeypatch) -> None:
    config = compose(recipes()[recipe].config, recipe, [*overrides_of(recipe, task, tmp_path), *settings])
    monkeypatch.setattr("aligner.jobs.samples.check_installed", lambda rollout: None)  # as if the engine's package were here
    said = first_refusal(recipe, component, config, monkeypatch)
    assert said.startswith(message)
    with pytest.raises(ConfigError) as planned:
        plan.components(config)
    # Lengths are those of all components: the shortest of their contexts decides.
    assert str(planned.value) == (said if "context of" in said else f"{component}: {said}")


@pytest.mark.parametrize("recipe", RUNS)
def test_good_settings_are_planned(recipe: str, task: Path, tmp_path: Path) -> None:
    config = compose(recipes()[recipe].config, recipe, overrides_of(recipe, task, tmp_path))
    assert {one.name for one in plan.components(config)} == RUNS[recipe]


def test_a_plan_is_of_the_settings_that_the_run_gets() -> None:
    """`parallel.tp=1` was planned without sequence parallelism, and the run refused it."""
    for load in (plan.load, lambda name, settings: compose(recipes()["sft"].config, name, ["data.train=x", *settings])):
        with pytest.raises(ConfigError, match="^parallel.sequence_parallel=true: needs parallel.tp > 1"):
            load("sft_70b", ["parallel.tp=1"])
    both = ["parallel.tp=1", "parallel.sequence_parallel=false", "parallel.tp_comm_overlap=false", "data.train=x"]
    assert plan.load("sft_70b", both) == compose(recipes()["sft"].config, "sft_70b", both)


@pytest.mark.parametrize("layout", [["rollout.tp=2"], ["parallel.tp=2"], ["parallel.pp=2", "rollout.tp=2"]])
def test_rollouts_ahead_have_no_collectives_of_their_own_on_gpus(layout, task, tmp_path, monkeypatch) -> None:
    """Two threads that issue NCCL's kernels in no common order can deadlock; gloo's wait on the host."""
    settings = [*overrides_of("grpo", task, tmp_path), "rollout.asynchronous.max_staleness=1", *layout]
    message = "rollout.asynchronous.max_staleness=1: with rollout.tp=2 the sampler's and the trainer's collectives"

    def planned(*more: str) -> None:
        (actor,) = plan.components(compose(recipes()["grpo"].config, "grpo", [*settings, *more]))
        check(actor)

    planned()
    with pytest.raises(ConfigError, match=f"actor: {message}.*allowed on GPUs: rollout.tp=1, or 0"):
        planned("cluster.device=gpu")
    planned("cluster.device=gpu", "rollout.tp=1")
    planned("cluster.device=gpu", "rollout.asynchronous.max_staleness=0")
    monkeypatch.setattr(online_job.platform, "backend", lambda: "nccl")
    assert first_refusal("grpo", "actor", compose(recipes()["grpo"].config, "grpo", settings), monkeypatch).startswith(message)


def test_a_replica_of_tensorrt_llm_is_on_one_node(task, tmp_path) -> None:
    settings = [*overrides_of("grpo", task, tmp_path), TRTLLM, "rollout.tp=4", "cluster.device=gpu"]
    with pytest.raises(ConfigError, match="^actor: rollout.tp=4: a replica of .* must be on one node.*cluster.gpus_per_node=2"):
        plan.components(compose(recipes()["grpo"].config, "grpo", [*settings, "cluster.gpus_per_node=2"]))
    (actor,) = plan.components(compose(recipes()["grpo"].config, "grpo", [*settings, "cluster.gpus_per_node=4"]))
    assert actor.engine_holds_weights


def test_a_plan_in_8_bits_is_by_the_recipe_of_the_clusters_gpus():
    """28928 / 8 is 3616: 113 times 32, as Blackwell's scales want, and no whole number of Hopper's 128."""
    narrow = ["model.tokenizer=not-read", "parallel.tp=8", "parallel.pp=4", "model.architecture.ffn_hidden_size=28928", "model.fp8=true"]
    with pytest.raises(ConfigError, match=r"^model.fp8_recipe=auto \(here blockwise\): has no exchange for parallel.tp_comm_overlap"):
        plan.components(plan.load("sft_70b", narrow))
    narrow.append("parallel.tp_comm_overlap=false")
    with pytest.raises(
        ConfigError, match=r"^model.fp8_recipe=auto \(here blockwise\): ffn_hidden_size on a rank is 3616, not a multiple of 128"
    ):
        plan.components(plan.load("sft_70b", narrow))
    for more in (["cluster=dgx_b200"], ["model.fp8_recipe=tensorwise"], ["model.architecture.ffn_hidden_size=28672"]):
        (component,) = plan.components(plan.load("sft_70b", [*narrow, *more]))
        assert component.model.fp8
    with pytest.raises(ConfigError, match=r"^model.fp8=true: the cluster's GPUs have no 8-bit matrix products"):
        plan.components(plan.load("sft_70b", [*narrow, "cluster=dgx_a100"]))
