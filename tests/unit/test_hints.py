"""Keys of other projects and typing errors: which setting is named for them, in each recipe; and errors that name keys as typed."""

from __future__ import annotations

import pytest

from aligner.algorithms.registry import recipes
from aligner.errors import ConfigError
from aligner.jobs.start import program
from aligner.settings.compose import compose, from_yaml
from aligner.settings.explain import hint, synonyms
from aligner.settings.schema import SchemaKey, schema_keys


@pytest.fixture(scope="module")
def keys() -> dict[str, list[SchemaKey]]:
    return {name: list(schema_keys(recipe.config)) for name, recipe in recipes().items()}


def test_names_come_from_the_tables_of_migrate_too(keys) -> None:
    assert hint("trainer.per_device_train_batch_size", keys["sft"]) == "did you mean model.micro_batch_size?"  # TRL's
    assert hint("ppo_micro_batch_size_per_gpu", keys["grpo"]) == "did you mean model.micro_batch_size?"  # synonyms.yaml's
    assert hint("algorithm.val_numbering", keys["sft"]).startswith("see --help")
    everywhere = [name for table in synonyms().values() for name in table]
    assert len(everywhere) - len(set(everywhere)) < 20  # names that several projects have; the first counts
    assert not synonyms()["migrate"].keys() & {name for project, table in synonyms().items() if project != "migrate" for name in table}


# typed: what is said in sft, dpo, grpo, ppo ("": the recipe has none)
LR = ("optimizer.lr",) * 4
NONE_IN_TWO = ("", "")
TABLE = {
    "learning_rate": LR,
    "actor_rollout_ref.actor.optim.lr": LR,
    "optimzer.lr": LR,
    "critic.optim.lr": (*LR[:3], "critic.optimizer.lr"),
    "critic_learning_rate": ("", "", "", "critic.optimizer.lr"),
    "beta": ("", "algorithm.beta", "algorithm.kl_coef", "algorithm.kl_coef"),
    "trainer.ppo.initial_policy_kl_penalty": (*NONE_IN_TWO, "algorithm.kl_coef", "algorithm.kl_coef"),
    "model.dpo.ref_policy_kl_penalty": ("", "algorithm.beta", "", ""),
    "model.ppo.length_params.max_length": (*("data.max_length",) * 2, *("rollout.sampling.max_response_length",) * 2),
    "data.max_response_length": (*NONE_IN_TWO, *("rollout.sampling.max_response_length",) * 2),
    "temperature": (*NONE_IN_TWO, *("rollout.sampling.temperature",) * 2),
    "validaton.temperature": (*NONE_IN_TWO, *("validation.temperature",) * 2),
    "model.tensor_model_parallel_size": ("parallel.tp",) * 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (*("parallel.tp",) * 2, *("rollout.tp",) * 2),
    "critic.ppo_micro_batch_size_per_gpu": (*("model.micro_batch_size",) * 3, "critic.model.micro_batch_size"),
    "train_batch_size": (*("algorithm.batch_size",) * 2, *("algorithm.mini_batch_size",) * 2),
    "data.train_batch_size": (*("algorithm.batch_size",) * 2, "algorithm.prompts_per_step", "algorithm.rollouts_per_step"),
    "clip_ratio": (*NONE_IN_TWO, *("algorithm.clip_eps_low and algorithm.clip_eps_high",) * 2),
    "lambd": ("", "", "", "algorithm.gae_lambda"),
    "gradient_checkpointing": ("model.recompute=full",) * 4,
    "use_vllm": (*NONE_IN_TWO, *("rollout.engine=vllm",) * 2),
    "loss_type": ("", "algorithm.loss", *("algorithm.aggregation",) * 2),
}


@pytest.mark.parametrize("typed", TABLE)
def test_the_setting_that_is_meant(typed: str, keys) -> None:
    for recipe, meant in zip(("sft", "dpo", "grpo", "ppo"), TABLE[typed], strict=True):
        said = hint(typed, keys[recipe])
        if meant:
            assert said.partition(" (")[0] == f"did you mean {meant}?", recipe
        else:
            assert said.startswith("this recipe has no ") and said.endswith("; see --help"), f"{recipe}: {said}"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("gradient_accumulation_steps", "there is no such setting: it follows from"),
        ("trainer.total_epochs", "did you mean loop.epochs?"),
        ("min_prompt_length", "see --help"),  # nothing of another meaning for being spelled like it
        ("optimizer.max_lr", "see --help optimizer"),
        ("dataset.nothing", "see --help"),
        ("loop.max_stepps", "did you mean loop.max_steps?"),
        ("algorithm.groupsize", "did you mean algorithm.group_size?"),
        ("weight_decy", "did you mean optimizer.weight_decay?"),
        ("reward_model.model.path", "did you mean reward.model.path?"),
        ("optimizer.learing_rate", "did you mean optimizer.lr?"),  # a typing error for another project's name
        ("learning_rates", "did you mean optimizer.lr?"),
        ("folder.path", "see --help"),  # several settings end with path, none of them in such a section
    ],
)
def test_other_hints(typed: str, said: str, keys) -> None:
    assert hint(typed, keys["grpo"]).startswith(said)


def test_all_unknown_keys_at_once(tmp_path) -> None:
    """Of the command line, of a preset of the user's own, and of the values of a dict; what is known has no say in it."""
    own = tmp_path / "own" / "algorithm"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("kl_beta: 0.1\ngroup_size: 4\nnested: {deep: 1}\n")
    schema = recipes()["grpo"].config
    given = ["data.train=x", f"hydra.searchpath=[file://{tmp_path / 'own'}]", "algorithm=mine", "loop.max_steps=-1"]
    with pytest.raises(ConfigError) as caught:
        compose(schema, "grpo", [*given, "learning_rate=1", "+trainer={ppo: {max_steps: 3}}", "reward.functions.a={pathh: b}"])
    first, *lines = str(caught.value).split("\n  ")
    assert first == "5 unknown settings"
    assert lines == [
        "learning_rate in 'learning_rate=1': did you mean optimizer.lr?",
        "trainer.ppo.max_steps in '+trainer={ppo: {max_steps: 3}}': did you mean loop.max_steps?",
        "reward.functions.a.pathh in 'reward.functions.a={pathh: b}': did you mean reward.functions.a.path?",
        f"algorithm.kl_beta in {own / 'mine.yaml'}: did you mean algorithm.kl_coef?",
        f"algorithm.nested.deep in {own / 'mine.yaml'}: see --help algorithm",
    ]


def test_all_unknown_keys_of_a_saved_config() -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(recipes()["sft"].config, "optimizer: {learning_rate: 1}\nbeta: 2\n", ["data.trian=x"])
    lines = str(caught.value).split("\n  ")
    assert [line.partition(":")[0] for line in lines] == ["3 unknown settings", "optimizer.learning_rate", "beta", "data.trian"]


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("critic.server.port=-1", "critic.server.port=-1: must be from 1 to 65535"),
        ("reward.server.host=''", "reward.server.host='': give an address"),
        ("critic.server.idle_seconds=0", "critic.server.idle_seconds=0.0: must be above 0"),
        ("reward.server.tls_key=k", "reward.server.tls_certificate='', tls_key='k': give both"),
        ("critic.server.stuck_limit_seconds=1", "critic.server.stuck_limit_seconds=1.0: must be at least round_limit_seconds=15.0"),
        ("local_launcher.num_failure_lines=0", "local_launcher.num_failure_lines=0: must be at least 1"),
        ("validation.scorer.timeout_seconds=0", "validation.scorer.timeout_seconds=0.0: must be finite and above 0"),
        ("reward.functions.a.weight=1", "reward.functions.a: no source: a reward requires exactly one of"),
        ("reward.functions.a.path=a:b reward.functions.a.weight=nan", "reward.functions.a.weight=nan: must be a finite number"),
        ("critic.parallel.vpp=2", "critic.parallel.vpp=2: the interleaved schedule needs critic.parallel.pp > 1"),
        ("reward.parallel.tp_comm_overlap=true", "reward.parallel.tp_comm_overlap=true: needs reward.parallel.sequence_parallel=true"),
        ("critic.model.share_prompts=true", "critic.model.share_prompts=true: needs critic.model.packing=true"),
        ("critic.model.lora.path=x", "critic.model.lora.path=x: needs critic.model.lora.rank"),
        ("reward.model.architecture.num_layers=0", "reward.model.architecture.num_layers=0: "),
        ("critic.optimizer.lr=100", "critic.optimizer.lr=100.0, min_lr="),
        ("optimizer.lr=1e30 optimizer.min_lr=0", "optimizer.lr=1e+30, min_lr=0.0: need 0 <= min_lr <= lr and 0 < lr <= 10"),
        ("critic.optimizer.beta1=1", "critic.optimizer.beta1=1.0: must be at least 0 and below 1"),
        ("optimizer.beta2=-0.1", "optimizer.beta2=-0.1: must be at least 0 and below 1"),
        ("optimizer.eps=0", "optimizer.eps=0.0: must be above 0"),
        ("optimizer.weight_decay=2e6", "optimizer.weight_decay=2000000.0: must not be negative, and lr * weight_decay must be below 1"),
        (f"run.seed={2**63}", f"run.seed={2**63}: must be a number of 64 bits"),
        ("run.seed=-1", "run.seed=-1: must be from 0 to 9223372036854775807"),
        ("num_processes=-1", "num_processes=-1: must be at least 1"),
        ("model.architecture.rope_theta=0", "model.architecture.rope_theta=0.0: must be finite and above 0"),
        ("model.architecture.norm_eps=-1", "model.architecture.norm_eps=-1.0: must be finite and not negative"),
        ("reward.functions.a.url=http://x reward.functions.a.num_threads=0", "reward.functions.a.num_threads=0: must be at least 1"),
        ("guard.logprob_gap.patience=0", "guard.logprob_gap.patience=0: must be at least 1"),
        ("algorithm.shaping.scale=0", "algorithm.shaping.scale=0.0: must be above 0"),
        ("rollout.sampling.min_p=2", "rollout.sampling.min_p=2.0: "),
        ("rollout.tensorrt_llm.start_seconds=0", "rollout.tensorrt_llm.start_seconds=0.0: must be above 0"),
    ],
)
def test_errors_name_keys_as_typed(setting: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(recipes()["ppo"].config, "", ["data.train=x", *setting.split()])
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["optimizer.lr", "=", "1e-5"], "'optimizer.lr = 1e-5': a setting is written without spaces around '=': optimizer.lr=1e-5"),
        (["optimizer.lr=", "1e-5"], "optimizer.lr=1e-5"),
        (["run.seed=1", "optimizer.lr", "=1e-5"], ": optimizer.lr=1e-5"),
        (["optimizer.lr"], "'optimizer.lr' is not a setting: settings are written key=value"),
        (["loop.max_steps=ten"], "loop.max_steps: 'ten' is not a whole number"),
        (["optimizer.lr=[1]"], "optimizer.lr: '[1]' is not a number"),
        (["run.export_hf=perhaps"], "run.export_hf: 'perhaps' is not true or false"),
        (["model.dtype=bf16"], "did you mean bfloat16?"),
        (["model.dtype=torch.float16"], "did you mean float16?"),
        (["model.lora.targets=[o_proj]"], "did you mean proj?"),
        (["model.lora.targets=[q_proj]"], "did you mean q (qkv: of q, k and v)?"),
        (["model.lora.targets=[expert]"], "did you mean experts?"),
    ],
)
def test_overrides_as_newcomers_type_them(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(recipes()["sft"].config, "sft", ["data.train=x", *texts])
    assert said in str(caught.value)


def test_options_of_argparse_are_answered_with_the_setting(capsys) -> None:
    with pytest.raises(SystemExit):
        program("sft")(["--model_name_or_path", "X", "--bf16", "True", "--learning-rate=1e-5"], program="aligner train sft")
    said = capsys.readouterr().err
    assert (
        "did you mean model.path=X?" in said and "did you mean model.dtype=bfloat16?" in said and "did you mean optimizer.lr=1e-5?" in said
    )
