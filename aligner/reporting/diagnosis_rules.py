"""The rules of `diagnosis.py`: known failures of online alignment that no error reports (`docs/diagnosis.md`).

Thresholds are far from the values of healthy runs: act upon a finding. A run without one is not proven healthy.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from aligner.reporting.diagnosis import WINDOW, History, NotJudged, Rule, Series

ROUNDING = 1e-9  # of policy/approx_kl
LONG = 3 * WINDOW  # steps before a model that learns from scratch is judged
KL = ("policy/kl", "policy/ref_kl", "pairs/ref_kl")
ENTROPY = ("policy/entropy", "rollout/entropy")
VALIDATION = ("validation/accuracy", "validation/reward")
RULES: list[Rule] = []  # in the order of their functions below


def rule(title: str, *, cause: str, remedy: str) -> Callable[[Callable[[History], str]], Callable[[History], str]]:
    """Make a rule of a function, under the function's name."""

    def add(judge: Callable[[History], str]) -> Callable[[History], str]:
        RULES.append(Rule(name=judge.__name__, title=title, judge=judge, cause=cause, remedy=remedy))
        return judge

    return add


@rule(
    "entropy collapse",
    cause="the policy is certain of its tokens and tries nothing else: the learning rate is too high, or nothing keeps it broad",
    remedy="lower optimizer.lr, raise algorithm.clip_eps_high (clip-higher) or algorithm.kl_coef, or set algorithm.entropy_coef=0.001",
)
def entropy_collapse(history: History) -> str:
    entropy = history.of(*ENTROPY, least=2 * WINDOW)
    return entropy.course("nats per token") if entropy.now < 0.05 * entropy.start else ""


@rule(
    "the same response to many prompts",
    cause="one text is rewarded for every prompt: the reward does not read the prompt",
    remedy="make the reward depend on the prompt, and resume from a checkpoint before it with a higher algorithm.kl_coef",
)
def mode_collapse(history: History) -> str:
    same = history.of("rollout/same_response")
    return f"{same.now:.0%} of the prompts got the same response (steps {same.last_steps})" if same.now >= 0.8 else ""


@rule(
    "the reward rises while validation falls",
    cause="the reward is exploited (a reward model outside of what it was trained on), or the few training prompts are memorized",
    remedy="use the best checkpoint (checkpoint.best_metric), raise algorithm.kl_coef, fix the reward, or train on more prompts",
)
def validation_falls(history: History) -> str:
    """Compares medians of three validations: a difference between two single ones is noise."""
    held_out, reward = history.of(*VALIDATION, least=6), history.of("rollout/reward", least=2 * WINDOW)
    values, steps = held_out.values, held_out.steps
    smooth = [median(values[i : i + 3]) for i in range(len(values) - 2)]
    best = max(range(len(smooth)), key=smooth.__getitem__)
    noise = median(abs(one - other) for one, other in zip(values, values[1:], strict=False))
    if smooth[best] - smooth[-1] <= max(3 * noise, 0.1 * abs(smooth[best])):
        return ""
    until = [value for step, value in zip(reward.steps, reward.values, strict=True) if step <= steps[best + 1]][-WINDOW:]
    if not until or reward.now <= sorted(until)[-max(1, len(until) // 5)]:
        return ""
    return (
        f"{held_out.name} fell from {smooth[best]:.3g} (about step {steps[best + 1]}) to {smooth[-1]:.3g} (steps {steps[-3]}-{steps[-1]}), "
        f"while {reward.name} rose from {median(until):.3g} to {reward.now:.3g}"
    )


@rule(
    "responses grow to the length limit",
    cause="longer responses are rewarded, or the loss weighs their tokens less",
    remedy="penalise length (algorithm.shaping.overlong_buffer), set algorithm.aggregation=token_mean, or raise the limit",
)
def length_grows(history: History) -> str:
    cut, length = (history.of(name, least=2 * WINDOW) for name in ("rollout/truncated_fraction", "rollout/response_length"))
    grew = cut.now >= 0.5 and cut.now >= cut.start + 0.3 and length.now >= 1.1 * length.start
    return f"{length.course('tokens')}, and {cut.now:.0%} of the responses are cut, {cut.start:.0%} at the start" if grew else ""


@rule(
    "responses shrink to nothing",
    cause="saying little costs less than being wrong: a penalty on length, on errors or on the KL outweighs the reward",
    remedy="lower the penalty, give empty responses the lowest reward, or set rollout.sampling.min_response_length",
)
def length_shrinks(history: History) -> str:
    length = history.of("rollout/response_length", least=2 * WINDOW)
    empty = history.of("rollout/empty_fraction", least=2 * WINDOW)
    if empty.now >= 0.5 and empty.now > empty.start:
        return f"{empty.now:.0%} of the responses are empty (steps {empty.last_steps}), {empty.start:.0%} at the start"
    return length.course("tokens") if length.now <= 0.2 * length.start else ""


@rule(
    "most groups have no signal",
    cause="the prompts are far too easy or too hard for the policy, or the reward hardly distinguishes responses",
    remedy="choose prompts by difficulty, set algorithm.dynamic_sampling=true, raise algorithm.group_size, or grade the reward finer",
)
def no_signal(history: History) -> str:
    """A run that learns solves more and more groups: that alone is not a failure."""
    without, reward = history.of("rollout/groups_without_signal", least=2 * WINDOW), history.of("rollout/reward", least=2 * WINDOW)
    if without.now < 0.85 or (reward.rose and without.now < 0.95):
        return ""
    return f"{without.now:.0%} of the groups have equal rewards (steps {without.last_steps}), and {reward.course()}"


@rule(
    "the reward is constant",
    cause="the reward function returns the same for everything (it parses nothing, or has no answer to compare with), or all is solved",
    remedy="call the reward function on the lines of rollouts/*.jsonl, and check data.answer_field",
)
def constant_reward(history: History) -> str:
    reward, spread = history.of("rollout/reward"), history.of("rollout/reward_std")
    recent = reward.values[-WINDOW:]
    same = 1e-6 * max(1.0, abs(reward.now))
    if max(spread.values[-WINDOW:]) > same or max(recent) - min(recent) > same:
        return ""
    return f"every response got the reward {reward.now:.4g} (steps {reward.last_steps})"


@rule(
    "the clip fraction is outside 0.05-0.4",
    cause="if much is clipped, updates are too large or too many for one batch; if nothing is clipped or learned, they are too small",
    remedy="above 0.4 lower optimizer.lr, algorithm.num_epochs or the number of mini-batches; below 0.05 raise optimizer.lr",
)
def clip_fraction(history: History) -> str:
    """A run with small updates clips little: that alone is not a failure."""
    clipped, moved = history.of("policy/clip_fraction"), history.of("policy/approx_kl")
    if moved.now < ROUNDING:
        raise NotJudged("every batch has one update, of the policy that sampled it: its ratios are 1")
    if clipped.now > 0.4:
        return f"{clipped.now:.0%} of the tokens are clipped (steps {clipped.last_steps}): they teach nothing"
    reward = history.of("rollout/reward", least=5 * WINDOW)
    if clipped.now >= 0.05 or moved.now >= 1e-4 or reward.rose:
        return ""
    return f"{clipped.now:.2%} of the tokens are clipped, {moved.name} is {moved.now:.1e} (steps {moved.last_steps}), and {reward.course()}"


@rule(
    "the KL to the reference explodes",
    cause="nothing holds the policy: updates too large, or algorithm.kl_coef too small for the reward's size",
    remedy="resume from a checkpoint before it with a lower optimizer.lr, a higher algorithm.kl_coef, or algorithm.kl_target",
)
def kl_explodes(history: History) -> str:
    kl = history.of(*KL, least=2 * WINDOW)
    return kl.course("nats per token") if kl.now >= 2 or (kl.now >= 1 and kl.now >= 5 * kl.before) else ""


@rule(
    "the KL to the reference is negative",
    cause="the samples are not the policy's own: sampling is truncated or penalised, or engine and trainer differ",
    remedy="leave rollout.sampling.top_p, top_k and penalties off, run `aligner gap`, or use algorithm.kl_estimator=k3",
)
def kl_negative(history: History) -> str:
    kl = history.of("policy/kl", least=2 * WINDOW)
    recent = kl.values[-2 * WINDOW :]
    if max(recent) >= 0 or kl.now >= -1e-3:
        return ""
    return f"{kl.name} was below 0 in each of the last {len(recent)} steps, {kl.now:.3g} nats per token (steps {kl.last_steps})"


@rule(
    "the critic explains little of the returns",
    cause="the critic does not learn, or not as fast as the policy changes: its advantages are noise",
    remedy="raise critic.optimizer.lr or critic.num_epochs, start it from the reward model, or set algorithm.critic_warmup_steps",
)
def critic_explains_little(history: History) -> str:
    explained, spread = history.of("critic/explained_variance", least=LONG), history.of("rollout/reward_std", least=LONG)
    if spread.now < 0.1 * spread.start:
        raise NotJudged("rewards hardly differ any more: there is little to explain")
    best = max(explained.blocks)
    if explained.now >= 0.1 and explained.now >= best - 0.4:
        return ""
    return f"{explained.name} is {explained.now:.2f} (steps {explained.last_steps}); at best it was {best:.2f} over {WINDOW} steps"


@rule(
    "the value loss grows",
    cause="the critic diverges (learning rate too high), or the returns grow: a reward without bound, or a KL that explodes",
    remedy="lower critic.optimizer.lr, or bound the scores (algorithm.shaping)",
)
def value_loss_grows(history: History) -> str:
    loss = history.of("critic/loss", least=LONG)
    least = min(loss.blocks)
    if loss.now < 3 * least or loss.now < loss.start:
        return ""
    return (
        f"{loss.name} is {loss.now:.3g} (steps {loss.last_steps}), {loss.now / max(least, 1e-30):.1f} times its lowest over {WINDOW} steps"
    )


@rule(
    "sampler and trainer grow apart",
    cause="the engine has other weights or other arithmetic than the trainer, and the difference grows with training",
    remedy="run `aligner gap RUN`, set rollout.verify_refit=checksum and algorithm.correction.kind=tis",
)
def gap_grows(history: History) -> str:
    """Staleness of rollouts adds to the gap: it may be wider then."""
    gap = history.of("rollout/logprob_gap", least=2 * WINDOW)
    try:
        floor = 0.2 if history.of("rollout/staleness", least=1).now > 0 else 0.02
    except NotJudged:
        floor = 0.02
    return gap.course("nats per token") if gap.now >= max(floor, 3 * gap.start) else ""


@rule(
    "truncated or empty responses are rewarded",
    cause="the reward does not check that an answer exists and ends: the policy learns not to end, or not to answer",
    remedy="give such responses the lowest reward, or set algorithm.mask_truncated=true, or algorithm.shaping.overlong_buffer",
)
def unfinished_rewarded(history: History) -> str:
    reasons = [_rewarded(history, kind) for kind in ("truncated", "empty")]
    return " and ".join(filter(None, reasons))


def _rewarded(history: History, kind: str) -> str:
    """If 5% of responses are of this kind, and their reward exceeds that of ended ones by half of the rewards' spread."""
    share, spread, ended = (history.of(f"rollout/{name}") for name in (f"{kind}_fraction", "reward_std", "reward_ended"))
    if share.now < 0.05:
        return ""
    theirs = history.of(f"rollout/reward_{kind}")
    if theirs.now < ended.now + 0.5 * spread.now or not spread.now:
        return ""
    return (
        f"{kind} responses ({share.now:.0%}) got {theirs.now:.3g} on average, those that ended {ended.now:.3g} (steps {theirs.last_steps})"
    )


@rule(
    "a part of the reward never varies",
    cause="that part parses nothing, or is met or missed by every response: it teaches nothing",
    remedy="call it on the lines of rollouts/*.jsonl, fix it, or remove it from reward.functions",
)
def part_never_varies(history: History) -> str:
    constant = []
    for spread in history.below("reward_std/", least=2 * WINDOW):
        name = spread.name.removeprefix("reward_std/")
        part = history.of(f"reward/{name}")
        if max(spread.values) <= 1e-9 and _is_constant(part):
            constant.append(f"reward/{name} was {part.now:.4g} for every response of steps {part.steps[0]}-{part.steps[-1]}")
    return " and ".join(constant)


def _is_constant(series: Series) -> bool:
    return max(series.values) - min(series.values) <= 1e-6 * max(1.0, abs(series.now))


@rule(
    "responses repeat themselves",
    cause="the policy is caught in loops: a reward that counts what is repeated, an untrained start, or a sampling temperature too low",
    remedy="penalise repetition in the reward, raise rollout.sampling.temperature or algorithm.kl_coef",
)
def repetition(history: History) -> str:
    share = history.of("rollout/repeated_ngrams")
    return f"{share.now:.0%} of a response's 8-token sequences are repeated ones (steps {share.last_steps})" if share.now >= 0.5 else ""


@rule(
    "responses never end by themselves",
    cause="the model was not taught to end a turn: another chat template than its own, a base model, or a stop token that is not known",
    remedy="check data.apply_chat_template and rollout.sampling.stop_token_ids, train with SFT first, or allow longer responses",
)
def never_ends(history: History) -> str:
    cut = history.of("rollout/truncated_fraction")
    if min(cut.start, cut.now) < 0.9:
        return ""
    return f"{cut.start:.0%} of the responses were cut at the length limit from the start, and {cut.now:.0%} are (steps {cut.last_steps})"
