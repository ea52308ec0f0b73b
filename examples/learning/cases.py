"""The cases of examples/learning: which recipe, with what settings, has to raise the reward by how much.

All get the same 20,480 sampled responses to the same prompts, one learning rate and its schedule, and the loss of their paper (the files of
conf/grpo/algorithm). They differ in how these responses are spread over updates: methods that reuse a batch take 256 responses in four
updates, so that clips, gates and ratios have work to do; methods that are on-policy by definition take one update on 128.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 0.10  # of the mean reward on held-out prompts; before it is 0.17, and the standard error of a measurement below 0.02
MAX_RESPONSE_LENGTH = 4
LEARNING_RATE = 3e-4

COMMON = (
    *("model.micro_batch_size=64", "model.make_vocab_divisible_by=2"),
    *(f"optimizer.lr={LEARNING_RATE}", f"optimizer.min_lr={LEARNING_RATE / 10}", "optimizer.weight_decay=0", "optimizer.warmup_steps=10"),
    "data.max_prompt_length=8",
    *("rollout.max_batch_size=256", f"rollout.sampling.max_response_length={MAX_RESPONSE_LENGTH}"),
    "reward.function.path=aligner.rewards.builtin:exact_match",
    *("loop.table_every=40", "logging.tensorboard=false", "logging.progress=plain"),
)
REUSED = ("algorithm.prompts_per_step=32", "algorithm.mini_batch_size=64", "loop.max_steps=80")
ON_POLICY = ("algorithm.mini_batch_size=128", "loop.max_steps=160")
ONE_PER_PROMPT = ("algorithm.group_size=1", "algorithm.prompts_per_step=128")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run from the common start: `recipe` is a file of conf/, `settings` come after COMMON."""

    name: str
    recipe: str = "grpo"
    settings: tuple[str, ...] = ()
    margin: float = MARGIN


def _preset(name: str, *settings: str) -> Case:
    """A critic-free case of the estimator or objective in conf/grpo/algorithm/<name>.yaml."""
    return Case(name=name, settings=(f"algorithm={name}", *settings))


_PPO = Case(
    name="ppo",
    recipe="ppo",
    settings=(
        *("algorithm.rollouts_per_step=256", "algorithm.mini_batch_size=64", "loop.max_steps=80"),
        "reward.serve=false",
        *("critic.model.micro_batch_size=64", "critic.model.make_vocab_divisible_by=2", "critic.mini_batch_size=64"),
        *("critic.optimizer.lr=1e-3", "critic.optimizer.min_lr=1e-4", "critic.optimizer.weight_decay=0"),
        "critic.optimizer.warmup_steps=10",
    ),
)
_ONLINE_DPO = Case(
    name="online_dpo",
    recipe="online_dpo",
    settings=("algorithm.prompts_per_step=32", "algorithm.group_size=8", "loop.max_steps=80"),
)
_REJECTION_SAMPLING = Case(
    name="rejection_sampling",
    recipe="rejection_sampling",
    settings=("algorithm.prompts_per_step=32", "algorithm.keep=4", "algorithm.min_reward=1", "loop.max_steps=80"),
)

CASES = (
    _PPO,
    _preset("grpo", *REUSED),
    _preset("dr_grpo", *REUSED),
    # Groups without a signal are sampled anew, three rounds a step and more: fewer steps for as many responses.
    _preset(
        *("dapo", *REUSED, "algorithm.group_size=8", "algorithm.shaping.overlong_buffer=1", "algorithm.exhausted=fill", "loop.max_steps=24")
    ),
    _preset("gspo", *REUSED),
    Case(name="gspo_token", settings=("algorithm=gspo", "algorithm.objective=gspo_token", *REUSED)),
    _preset("cispo", *REUSED),
    _preset("gmpo", *REUSED),
    _preset("sapo", *REUSED),
    _preset("rloo", "algorithm.prompts_per_step=32", *ON_POLICY),
    # Half of the responses are the greedy ones that are the baseline.
    _preset("remax", "algorithm.prompts_per_step=64", "algorithm.mini_batch_size=64", "loop.max_steps=160"),
    _preset("reinforce", *ONE_PER_PROMPT, *ON_POLICY),
    _preset("reinforce_pp", "algorithm.prompts_per_step=256", "algorithm.mini_batch_size=64", "loop.max_steps=80"),
    _preset("reinforce_pp_baseline", *REUSED),
    # Credit per turn; here every response is one turn.
    Case(name="per_turn", settings=("algorithm.advantage_estimator=per_turn", *REUSED)),
    Case(name="gigpo", settings=("algorithm.advantage_estimator=gigpo", "algorithm.step_weight=0.5", *REUSED)),
    Case(name="grpo_async", settings=("rollout.asynchronous.max_staleness=1", "algorithm.correction.kind=tis", *REUSED)),
    _ONLINE_DPO,
    _REJECTION_SAMPLING,
)
