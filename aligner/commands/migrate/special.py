"""Transforms of one framework, or of the two that share transformers' TrainingArguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aligner.commands.migrate.tables import VALUE_HEAD, Entry, as_text
from aligner.commands.migrate.transforms import Context, Meaning, as_fraction, data, listed, model, to_ours, warmup_share


def _sampled(context: Context) -> float:
    """TRL's generation_batch_size: responses that are sampled at a time."""
    if context.number("generation_batch_size"):
        return context.number("generation_batch_size")
    times = context.number("steps_per_generation") or context.number("gradient_accumulation_steps") or 1
    return times * context.product(["per_device_train_batch_size", "ranks"])


def _updates(context: Context) -> float:
    """Optimizer steps of a round of TRL's GRPO."""
    an_update = context.product(["per_device_train_batch_size", "gradient_accumulation_steps", "ranks"])
    return max(1.0, _sampled(context) / an_update) * (context.number("num_iterations") or 1)


def _nemo_prompts(context: Context, samples: float) -> int:
    """Prompts of a step, from its responses."""
    return max(1, int(samples // (context.first("trainer.reinforce.num_rollouts_per_prompt", "model.rs.num_rollouts_per_prompt") or 1)))


def _dschat_step(context: Context) -> float:
    """Responses that are sampled with one policy: a round, or all rounds whose gradients are added up to an update."""
    sampled = context.product(["per_device_generation_batch_size", "generation_batches", "ranks"])
    return max(sampled, context.product(["per_device_training_batch_size", "gradient_accumulation_steps", "ranks"]))


DERIVED: Mapping[str, Callable[[Context], float]] = {  # what tables use as factors besides keys
    "prompts of a round (TRL)": lambda context: max(1, int(_sampled(context) // (context.number("num_generations") or 1))),
    "updates of a round (TRL)": _updates,
    "prompts of a step (NeMo REINFORCE)": lambda context: _nemo_prompts(context, context.number("model.reinforce.num_rollout_samples")),
    "prompts of a step (NeMo RS)": lambda context: _nemo_prompts(context, context.number("model.rs.num_rollout_samples")),
    "rollouts of a step (DeepSpeed-Chat)": _dschat_step,
}


def trl_groups(entry: Entry, value: Any, context: Context) -> Meaning:
    prompts = max(1, int(_sampled(context) // value))
    return Meaning(settings={"algorithm.group_size": int(value), "algorithm.prompts_per_step": prompts})


def trl_epsilon(entry: Entry, value: Any, context: Context) -> Meaning:
    """Both bounds, unless the upper one has a key of its own."""
    bounds = entry.ours if context.value("epsilon_high") is None else entry.ours[:1]
    return Meaning(settings=dict.fromkeys(bounds, value))


_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"path": "aligner.rewards.maths:maths", "arguments": {"timeout_seconds": 2.0}},
    "think_format_reward": {"path": "aligner.rewards.format:sections", "arguments": {"tags": ["think"]}},
}


def trl_rewards(entry: Entry, value: Any, context: Context) -> Meaning:
    """Functions that come with TRL, or importable ones (`package.module.name`), which work unchanged."""
    weights = context.value("reward_weights") or []
    rewards, unknown = {}, []
    for number, given in enumerate(listed(value)):
        module, _, name = str(given).removeprefix("trl.rewards.").rpartition(".")
        reward = {"path": f"{module}:{name}"} if module else dict(_REWARDS.get(name, {}))
        if reward:
            rewards[name] = reward | ({"weight": float(weights[number])} if number < len(weights) else {})
        else:
            unknown.append(name)
    if unknown:
        context.ask(f"reward_funcs: {', '.join(unknown)} of TRL has no counterpart: reward.functions.NAME.path, also in TRL's form")
    own = [name for name in rewards if name in _REWARDS]
    note = f"the nearest to {', '.join(own)} (docs/rewards.md)" if own else "works unchanged: docs/rewards.md"
    if len(rewards) == 1 and not unknown and not weights:
        (reward,) = rewards.values()
        return Meaning(settings={f"reward.function.{key}": one for key, one in reward.items()}, differs=bool(own), note=note)
    return Meaning(settings={"reward.functions": rewards} if rewards else {}, differs=bool(own or unknown), note=note if rewards else "")


def trl_correction(entry: Entry, value: Any, context: Context) -> Meaning:
    if value is not True:
        return Meaning(settings={"algorithm.correction.kind": "none"})
    level, _, what = str(context.value("vllm_importance_sampling_mode")).partition("_")
    settings = {"algorithm.correction.kind": "tis" if what == "truncate" else "icepop", "algorithm.correction.level": level}
    settings |= {"algorithm.correction.high": context.number("vllm_importance_sampling_clip_max")}
    if what != "truncate":
        settings["algorithm.correction.low"] = context.number("vllm_importance_sampling_clip_min")
    return Meaning(settings=settings, note="truncate cuts weights off, mask sets weights outside the bounds to 0")


def trl_mixture(entry: Entry, value: Any, context: Context) -> Meaning:
    """TRL's `datasets`: [{path, name, split}, ...]."""
    parts = [one.get("path") if isinstance(one, dict) else one for one in listed(value)]
    return data(entry, [part for part in parts if part], context)


def scheduler_arguments(entry: Entry, value: Any, context: Context) -> Meaning:
    """transformers' lr_scheduler_kwargs, of which only a floor of the learning rate exists here."""
    if not isinstance(value, dict) or not value:
        return Meaning(note="nothing to carry over")
    settings = {}
    if "min_lr_rate" in value:
        settings["optimizer.min_lr"] = context.number("learning_rate") * value["min_lr_rate"]
    if "min_lr" in value:
        settings["optimizer.min_lr"] = value["min_lr"]
    others = [name for name in value if name not in ("min_lr", "min_lr_rate")]
    return Meaning(settings=settings, differs=bool(others), absent=not settings, note=f"not here: {', '.join(others)}" if others else "")


def warmup(entry: Entry, value: Any, context: Context) -> Meaning:
    """transformers' warmup_steps: a share if it is below 1."""
    if isinstance(value, float) and 0 < value < 1:
        return warmup_share(entry, value, context)
    return to_ours(entry, int(value))


def trl_test_split(entry: Entry, value: Any, context: Context) -> Meaning:
    """A split of the same data set, if that is on the Hub: a file has no splits."""
    name = context.value("dataset_name")
    if as_text(context.value("eval_strategy")) in ("null", "no", "false") or not isinstance(name, str):
        return Meaning(note="nothing is validated")
    found = data(Entry(key=entry.key, ours=entry.ours), name, context)
    return Meaning(note="a file has no splits") if found.settings["data.validation"] == name else found


def eval_strategy(entry: Entry, value: Any, context: Context) -> Meaning:
    if as_text(value) in ("no", "false"):
        return to_ours(entry, 0)
    if as_text(value) == "steps":
        return Meaning(part=True, note="loop.validate_every, from eval_steps; needs data.validation")
    return Meaning(differs=True, note="at the end of each epoch there; loop.validate_every counts steps: set it")


def report_to(entry: Entry, value: Any, context: Context) -> Meaning:
    names = [as_text(one) for one in listed(value)]
    settings: dict[str, Any] = {}
    if "wandb" in names or "all" in names:
        settings["logging.wandb_project"] = "huggingface"
    if "none" in names or "null" in names:
        settings["logging.tensorboard"] = False
    note = "the project is W&B's default there" if "logging.wandb_project" in settings else ""
    note = "logging.mlflow_tracking_uri" if "mlflow" in names else note
    known = ("wandb", "all", "none", "null", "tensorboard", "mlflow")
    found = _loggers([name for name in names if name not in known], settings, note)
    found.differs = found.differs or "mlflow" in names
    return found


def verl_loggers(entry: Entry, value: Any, context: Context) -> Meaning:
    names = {str(one) for one in listed(value)}
    settings = {"logging.tensorboard": True} if "tensorboard" in names else {}
    return _loggers(sorted(names - {"console", "wandb", "tensorboard"}), settings)


def _loggers(others: list[str], settings: dict[str, Any], note: str = "") -> Meaning:
    """`others` have no counterpart here."""
    return Meaning(settings=settings, differs=bool(others), note=f"no such logger here: {', '.join(others)}" if others else note)


def wandb_key(entry: Entry, value: Any, context: Context) -> Meaning:
    """OpenRLHF's --use_wandb KEY: secrets are not settings here."""
    if context.value("wandb_project") is not None:
        return Meaning(part=True, note="part of logging.wandb_project; the key is W&B's own environment variable WANDB_API_KEY")
    settings = {"logging.wandb_project": f"openrlhf_train_{context.recipe}"}
    return Meaning(settings=settings, note="the key is W&B's own environment variable WANDB_API_KEY")


def warmup_share_online(entry: Entry, value: Any, context: Context) -> Meaning:
    """OpenRLHF's share of all updates. entry.factors: prompts of a step, responses of an update and of a prompt, episodes, epochs."""
    if not value:
        return to_ours(entry, 0)
    if not context.examples:
        return as_fraction(entry, value)
    _, an_update, samples, episodes, passes = (context.number(key) or 1 for key in entry.factors)
    total = context.examples * samples // an_update * episodes * passes
    return to_ours(entry, math.ceil(total * value), f"{value:g} of {total:g} optimizer steps")


def _asked_reward(context: Context, path: str, form: str) -> Meaning:
    """A reward function in another form, which the user must adapt."""
    context.ask(f"reward.function.path={path}: the function takes (prompts, responses, answers) here: docs/rewards.md")
    return Meaning(differs=True, note=f"{form} there, f(prompts, responses, answers) here: reward.function.path")


def remote_reward(entry: Entry, value: Any, context: Context) -> Meaning:
    """An address, or a file with a function."""
    text = str(value[0] if isinstance(value, list) else value)
    if text.endswith(".py"):
        return _asked_reward(context, f"{text}:NAME", "reward_func(queries, prompts, labels)")
    settings: dict[str, Any] = {"reward.functions": {"remote": {"url": text}}}
    if context.recipe == "ppo":
        settings["reward.serve"] = False
    return Meaning(settings=settings, differs=True, note="the endpoint gets requests of another form: docs/rewards.md")


def verl_reward(entry: Entry, value: Any, context: Context) -> Meaning:
    name = context.value("custom_reward_function.name")
    return _asked_reward(context, f"{value}:{name}", "compute_score(data_source, solution_str, ground_truth)")


def openrlhf_correction(entry: Entry, value: Any, context: Context) -> Meaning:
    if value is not True:
        return Meaning(note="nothing to carry over")
    kind = as_text(context.value("is_correction_type") or "tis")
    bounds = context.value("vllm_is_truncated_threshold")
    low, high = bounds if isinstance(bounds, list) else (0.5, bounds if isinstance(bounds, int | float) else 5.0)
    if kind == "seq-mask-tis":
        note = "there is no such correction here: tis, icepop and mis, of tokens or whole responses (docs/agreement.md)"
        return Meaning(absent=True, note=note)
    ours: dict[str, Any] = {"algorithm.correction.kind": kind, "algorithm.correction.high": float(high)}
    return Meaning(settings=ours | ({"algorithm.correction.low": float(low)} if kind == "icepop" else {}))


VERL_CRITIC_LAYOUT = [f"critic.megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")]


def verl_placement(entry: Entry, value: Any, context: Context) -> Meaning:
    """All models on the GPUs of the one that trains, each in a layout of its own. entry.factors: a reward model."""
    layout = (*VERL_CRITIC_LAYOUT, "critic.ulysses_sequence_parallel_size")
    if context.recipe != "ppo" or all(context.value(key) in (None, 1) for key in layout):
        return one_process(entry, value, context)
    servers = ["critic", *(["reward"] if _has_reward_model(entry, context) else [])]
    ranks = context.known_ranks()
    return Meaning(settings={"placement": "colocated"} | {f"{name}.num_processes": ranks for name in servers}, note=entry.note)


def one_process(entry: Entry, value: Any, context: Context) -> Meaning:
    """All models in one process there. entry.factors: a reward model."""
    rewards = _has_reward_model(entry, context)
    found = _together(context, rewards=rewards) | ({"reward.num_processes": context.known_ranks()} if rewards else {})
    return Meaning(settings=found, note=entry.note) if found else Meaning()


def _has_reward_model(entry: Entry, context: Context) -> bool:
    return any(context.value(key) not in (None, False, "") for key in entry.factors)


def trl_reward_model(entry: Entry, value: Any, context: Context) -> Meaning:
    """A critic of its own starts from the reward model too."""
    return model(replace(entry, ours=entry.ours[:1] if context.value(VALUE_HEAD) else entry.ours), value, context)


def trl_value_coef(entry: Entry, value: Any, context: Context) -> Meaning:
    if context.value(VALUE_HEAD):
        return to_ours(entry, value)
    note = "the critic has its own optimizer (critic.optimizer.lr), so its loss needs no weight"
    return Meaning(absent=True, note=note, severity="cosmetic")


def _together(context: Context, *, rewards: bool) -> dict[str, Any]:
    """The critic in the actor's processes, a reward model's server on the same GPUs, and what is not needed in host memory."""
    is_head = bool(context.value(VALUE_HEAD))
    found: dict[str, Any] = {"critic.kind": "head" if is_head else "model"} if context.recipe == "ppo" else {}
    if rewards:
        return found | {"placement": "colocated"}
    moved = ("optimizer.offload", *(() if is_head else ("critic.optimizer.offload",)), "rollout.offload")
    return found and found | dict.fromkeys(moved, True)


def openrlhf_placement(entry: Entry, value: Any, context: Context) -> Meaning:
    """All on the same GPUs, which matters here if there is more than a policy."""
    rewards = context.value("reward_pretrain") is not None
    if value is not True or not (context.recipe == "ppo" or rewards):
        return Meaning(note="without servers the actor's processes do everything" if value is True else "")
    if context.value("async_train") is True:
        return Meaning(differs=True, note="asynchronous rollouts need their own GPUs: placement=separate")
    return Meaning(settings=_together(context, rewards=rewards))


def data_prefix(entry: Entry, value: Any, context: Context) -> Meaning:
    """NeMo's {train: [...], validation: [...], test: [...]}, or a single file."""
    if not isinstance(value, dict):
        return data(Entry(key=entry.key, ours=["data.train"]), value, context) if value else Meaning(note="not set")
    found = Meaning(note=entry.note)
    for split in ("train", "validation"):
        if value.get(split):
            one = data(Entry(key=entry.key, ours=[f"data.{split}"]), value[split], context)
            found.settings |= one.settings
            found.differs, found.note = found.differs or one.differs, one.note or found.note
    return found


def of_factors(entry: Entry, value: Any, context: Context) -> Meaning:
    """The product of entry.factors alone."""
    return to_ours(entry, int(context.product(entry.factors)))


def constant_steps(entry: Entry, value: Any, context: Context) -> Meaning:
    """NeMo's last steps, at min_lr; they count optimizer steps."""
    rounds = context.number("trainer.sft.max_steps")
    if not value or rounds <= 0:
        note = "the last steps are at min_lr there: optimizer.decay_steps ends the decay before the run's end" if value else ""
        return Meaning(differs=bool(value), note=note)
    names = ("model.ppo.num_rollout_samples", "model.reinforce.num_rollout_samples", "model.rs.num_rollout_samples")
    samples = context.first(*names)
    total = rounds * max(1, samples // (context.number("model.global_batch_size") or 1)) if samples else rounds
    if total > value:
        return Meaning(settings={"optimizer.decay_steps": int(total - value)}, note="the decay ends that many steps before the run")
    return Meaning(
        differs=True,
        note=f"the run has {total:g} optimizer steps, so all are near min_lr there: set optimizer.lr to it with optimizer.decay=constant",
    )


def verl_wandb(entry: Entry, value: Any, context: Context) -> Meaning:
    if "wandb" in listed(context.value("trainer.logger") or []):
        return to_ours(entry, value)
    return Meaning(note="W&B is not among the loggers")


def verl_dict_keys(entry: Entry, value: Any, context: Context) -> Meaning:
    """The way from another key's field inwards: here a name with dots."""
    way = [context.value(entry.key.replace("_dict_keys", "_key")), *listed(value)]
    return to_ours(entry, ".".join(map(str, way)), "a nested field")


def below_one(entry: Entry, value: Any, context: Context) -> Meaning:
    """A ratio is above 0, so that a bound of 1 - 1 and less has no effect."""
    if value >= 1:
        return to_ours(entry, 0.999, "no lower bound there; the nearest value here", differs=True)
    return to_ours(entry, value)


def verl_warmup(entry: Entry, value: Any, context: Context) -> Meaning:
    """Its schedulers take a step after a whole training step."""
    return to_ours(entry, max(0, int(value * _verl_updates(entry, context))), "training steps there, updates here")


def verl_warmup_share(entry: Entry, value: Any, context: Context) -> Meaning:
    """Rounded down to training steps."""
    return warmup_share(entry, value, context, whole=int, updates=_verl_updates(entry, context))


def _verl_updates(entry: Entry, context: Context) -> int:
    """Updates of a training step, of the actor or, if it has sizes of its own, the critic."""
    names = ["critic", "actor_rollout_ref.actor"][not entry.key.startswith("critic.") :]
    an_update, passes = (int(context.first(*(f"{name}.{key}" for name in names)) or 1) for key in ("ppo_mini_batch_size", "ppo_epochs"))
    return passes * max(1, int(context.number("data.train_batch_size")) // an_update if context.recipe != "sft" else 1)


def dschat_split(entry: Entry, value: Any, context: Context) -> Meaning:
    """Shares of steps 1, 2 and 3; a step that has all of them learns from the same records here."""
    shares = [float(part) for part in str(value).split(",")]
    own = shares[{"sft": 0, "ppo": 2}.get(context.recipe, 1)] if len(shares) == 3 else 0
    return Meaning(absent=own != sum(shares))
