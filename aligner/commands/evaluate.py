"""`aligner eval`: what a model's responses are worth, as numbers with 95 % confidence intervals.

The interval of a share of independent answers is Wilson's (1927). Of means over prompts, whose responses are not independent, it is a
bootstrap over prompts: the 2.5 % and 97.5 % points of the means of RESAMPLES draws of as many prompts, with replacement.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from aligner.cluster.run_directory import REWARD_MODEL
from aligner.commands.generate import is_chat, read_prompts, responses, sampling_of
from aligner.commands.parts import EvalOptions
from aligner.data.collate import preference_batch
from aligner.data.config import Overlong, PreferenceDataConfig
from aligner.data.supervised import load_preferences
from aligner.data.tokenizer import Tokenizer
from aligner.endpoint.app import Endpoint
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.jobs.parts import load_model_files
from aligner.jobs.serving_policy import open_policy
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.online.validation import cut_share, pass_at_k
from aligner.parallel import launch, platform, topology
from aligner.parallel.topology import ParallelConfig
from aligner.protocols import RewardModel
from aligner.reporting.evaluations import Measure, markdown
from aligner.reporting.pages import publish_text
from aligner.rewards.config import Compare, NamedRewardConfig, RewardFunctionConfig
from aligner.rewards.judge import JudgeReward
from aligner.rewards.local import function_reward
from aligner.run.from_hub import fetch_one
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.settings.compose import from_yaml
from aligner.telemetry.run_files import RunFiles
from aligner.types import Rollout
from aligner.version import __version__

Z = 1.959964  # the 97.5 % point of the normal distribution
RESAMPLES = 2000
MIB = 1 << 20
CALL_SIZE = 64  # responses that a reward function scores in one call
WILSON, BOOTSTRAP, NORMAL = "Wilson", "bootstrap over prompts", "normal, lm-eval's standard error"


def evaluate(model: str, options: EvalOptions) -> int:
    """Measure what the options ask for; print it, and write it as JSON and Markdown. Raises ConfigError, DataError, AlignerError."""
    _check(options)
    measures: list[Measure] = []
    if options.data:
        measures += _against(model, options) if options.against else _scored(model, options)
    measures += _pairs(model, options) if options.pairs else []
    measures += _tasks(model, options) if options.tasks else []
    about = {"model": model, "aligner": __version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    record = {**about, "settings": settings, "measures": [asdict(one) for one in measures]}
    text = markdown(record)
    print(text, flush=True)
    output, run = options.output, RunFiles(Path(model))
    if output is None and run.config.is_file():
        output = run.evaluations / f"{about['time'].replace(':', '')}.json"
    if output is not None:
        publish_text(output, json.dumps(record, indent=2, ensure_ascii=False) + "\n", "the results")
        publish_text(output.with_suffix(".md"), text, "the results")
    return 0


def wilson(right: float, count: int) -> tuple[float, float]:
    """The interval of a share."""
    share, shift = right / count, Z * Z / count
    half = Z * math.sqrt(share * (1 - share) / count + shift / (4 * count))
    return max(0.0, (share + shift / 2 - half) / (1 + shift)), min(1.0, (share + shift / 2 + half) / (1 + shift))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean of independent values."""
    draw, given = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    means = [given[draw.integers(len(given), size=len(given))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _check(options: EvalOptions) -> None:
    if not (options.data or options.pairs or options.tasks):
        raise ConfigError("aligner eval: nothing to measure; give --data FILE with --reward or --judge, --pairs FILE, or --tasks A,B")
    if bool(options.data) != bool(options.reward or options.judge) or (options.reward and options.judge):
        raise ConfigError("aligner eval: --data goes with one of --reward and --judge")
    if options.against and (not options.judge or options.samples > 1):
        raise ConfigError("aligner eval: --against needs --judge, and one response of each model (--samples 1)")
    if options.output and options.output.suffix == ".md":
        raise ConfigError(f"--output {options.output}: names the JSON file, beside which a .md is written")
    if large := [k for k in options.k if k > options.samples]:
        raise ConfigError(f"--k {large[0]}: more than --samples {options.samples}; allowed: at most that")


def _scored(model: str, options: EvalOptions) -> list[Measure]:
    """Accuracy and pass@k by a reward function, or a judge's mean score."""
    with open_policy(model, max_batch_size=options.batch_size, seed=options.seed) as policy:
        rollouts = list(responses(policy, read_prompts(policy, options.data, options), options, sampling_of(options)))
        decode = policy.tokenizer.decode
    if options.judge:
        scorer: RewardModel = _judge(options, decode, Compare.nothing)
    else:
        scorer = function_reward(RewardFunctionConfig(path=options.reward), decode, "--reward")
    scores = _scores(scorer, rollouts)
    by_prompt = [scores[start : start + options.samples] for start in range(0, len(scores), options.samples)]
    groups = [given for own in by_prompt if (given := [score for score in own if not math.isnan(score)])]
    given = sum(map(len, groups))
    if not given:
        raise DataError(f"none of the {len(rollouts)} responses has a score")
    lost = f"{len(rollouts) - given} of {len(rollouts)} responses without a score are left out; " if given < len(rollouts) else ""
    note = f"{lost}{cut_share(rollouts):.1%} reached --max-tokens"
    means = [sum(scores) / len(scores) for scores in groups]
    found = [Measure.of("mean score" if options.judge else "mean reward", means, bootstrap(means), BOOTSTRAP, note=note)]
    return found if options.judge else [*_right(groups, options), *found]


def _right(groups: Sequence[Sequence[float]], options: EvalOptions) -> list[Measure]:
    right = [[score >= options.threshold for score in scores] for scores in groups]
    shares = [sum(own) / len(own) for own in right]
    if options.samples == 1:
        return [Measure.of("accuracy", shares, wilson(sum(shares), len(shares)), WILSON)]
    found = [Measure.of("accuracy", shares, bootstrap(shares), BOOTSTRAP, note=f"mean of {options.samples} responses to each prompt")]
    for k in sorted(set(options.k)) or [2**power for power in range(options.samples.bit_length())]:
        if values := [pass_at_k(len(own), sum(own), k) for own in right if len(own) >= k]:
            note = "1 - C(n - c, k) / C(n, k), Chen et al. 2021"
            found.append(Measure.of(f"pass@{k}", values, bootstrap(values), BOOTSTRAP, note=note))
    return found


def _against(model: str, options: EvalOptions) -> list[Measure]:
    """How often a judge finds the first model's response better; both responses to a prompt are a group of two."""
    sides: list[tuple[list[Rollout], Tokenizer]] = []
    for name in (model, options.against):
        with open_policy(name, max_batch_size=options.batch_size, seed=options.seed) as policy:
            prompts = read_prompts(policy, options.data, options)
            sides.append((list(responses(policy, prompts, options, sampling_of(options))), policy.tokenizer))
    (own, first), (others, second) = sides
    # The second model's ids, which another tokenizer may read, are told apart by their sign.
    theirs = [
        replace(other, prompt=one.prompt, response=tuple(-1 - token for token in other.response))
        for one, other in zip(own, others, strict=True)
    ]

    def decode(ids: Sequence[int]) -> str:
        return second.decode([-1 - token for token in ids]) if ids and ids[0] < 0 else first.decode(ids)

    rows = [rollout for pair in zip(own, theirs, strict=True) for rollout in pair]
    wins = [score for score in _scores(_judge(options, decode, Compare.group), rows, size=len(rows))[::2] if not math.isnan(score)]
    if not wins:
        raise DataError(f"none of the {len(own)} pairs of responses has a verdict of the judge")
    ties = wins.count(0.5)
    more = sum(win > 0.5 for win in wins)
    note = f"{more} wins, {ties} ties, {len(wins) - more - ties} losses, both orders asked; {len(own) - len(wins)} without a verdict"
    return [Measure.of(f"win rate against {options.against}", wins, bootstrap(wins), BOOTSTRAP, note=note)]


def _judge(options: EvalOptions, decode: Callable[[Sequence[int]], str], compare: Compare) -> JudgeReward:
    path = Path(options.judge or "")
    try:
        config = from_yaml(NamedRewardConfig, path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--judge {path}: {error}") from error
    if not config.judge.model or (compare is Compare.nothing and config.judge.compare is Compare.group):
        raise ConfigError(f"--judge {path}: needs judge.model, and judge.compare=group only with --against")
    if compare is Compare.group:
        config = replace(config, judge=replace(config.judge, compare=compare, opponents=0, rubric={}))
    kept = None if options.output is None else options.output.parent / f".{options.output.stem}.judge" / "0" / "judge.jsonl"
    return JudgeReward("judge", config, decode, kept)


def _scores(scorer: RewardModel, rollouts: Sequence[Rollout], *, size: int = CALL_SIZE) -> list[float]:
    """One per rollout; NaN for none."""
    try:
        parts = [scorer.score(rollouts[start : start + size]).result() for start in range(0, len(rollouts), size)]
    finally:
        scorer.close()
    return [value if ok else math.nan for part in parts for value, ok in zip(part.rewards.tolist(), part.valid.tolist(), strict=True)]


def _pairs(model: str, options: EvalOptions) -> list[Measure]:
    """How often a reward model scores the chosen response higher; a tie is wrong."""
    path = fetch_one("MODEL", model)
    run = RunFiles(path)
    if run.config.is_file() and not (path / "config.json").is_file():
        path = run.checkpoints / REWARD_MODEL if (run.checkpoints / REWARD_MODEL).is_dir() else run.export
    config, layout = ModelConfig(path=str(path)), ParallelConfig()
    if (head := create.head_of(config)) is None:
        raise ConfigError(f"MODEL={model}: no reward model, which --pairs needs; allowed: one with a head for scores")
    launch.initialize(platform.backend(), timeout_seconds=60.0, fingerprint="eval", environ={**os.environ, "ALIGNER_LAUNCH": "single"})
    place = topology.initialize(layout, seed=options.seed)
    tokenizer, architecture = load_model_files(config)
    scorer = create.create_reward_model(config, architecture, layout, place, create.training(config, None), head=head)
    how: dict[str, Any] = {"apply_chat_template": is_chat(tokenizer, options), "overlong": Overlong.drop}
    data = PreferenceDataConfig(train=str(options.pairs), max_length=create.context_length(config, architecture), **how)
    pairs, report = load_preferences(str(options.pairs), data, tokenizer)
    pairs, margins = pairs[: options.limit or None], list[float]()
    for start in range(0, len(pairs), options.batch_size):
        scores = scorer.scores(preference_batch(pairs[start : start + options.batch_size], tokenizer.pad_id))[:, 0].double()
        margins += (scores[0::2] - scores[1::2]).tolist()
    launch.shutdown()
    right = [float(margin > 0) for margin in margins]
    note = f"{sum(margin == 0 for margin in margins)} ties count as wrong; {report.summary()}"
    return [
        Measure.of("accuracy on pairs", right, wilson(sum(right), len(right)), WILSON, note=note),
        Measure.of("margin on pairs", margins, bootstrap(margins), BOOTSTRAP.replace("prompts", "pairs")),
    ]


def _tasks(model: str, options: EvalOptions) -> list[Measure]:
    """lm-eval's own client asks an endpoint of the model."""
    program = shutil.which(options.lm_eval)
    if program is None:
        raise ConfigError(
            f"--lm-eval {options.lm_eval}: no such program; install lm-eval[api] in an environment of its own, name its lm_eval"
        )
    key = secrets.token_hex(32)
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(model, max_batch_size=options.batch_size, seed=options.seed))
        endpoint = stack.enter_context(Endpoint(policy.served(seed=options.seed), Access(key), ServerConfig(max_request_bytes=64 * MIB)))
        folder = stack.enter_context(TemporaryDirectory())
        chat = is_chat(policy.tokenizer, options)
        kind, route = ("local-chat-completions", "chat/completions") if chat else ("local-completions", "completions")
        given = {"model": policy.name, "base_url": f"{endpoint.url}/v1/{route}", "num_concurrent": options.batch_size, "auth_token": key}
        given |= {"max_length": policy.live.max_sequence_length}
        given |= {"tokenizer_backend": "none" if chat else "remote", "tokenized_requests": not chat}
        asked = {"model": kind, "model_args": given, "tasks": options.tasks.split(","), "output_path": folder, "seed": options.seed}
        asked |= {"apply_chat_template": chat, "limit": options.limit or None}
        config = Path(folder, "config.yaml")  # the folder is this user's alone; arguments of programs are seen by all
        config.write_text(yaml.safe_dump(asked))
        environment = {**os.environ, "OPENAI_API_KEY": key}
        if subprocess.run([program, "run", "--config", str(config)], env=environment, check=False).returncode:
            raise AlignerError(f"{program} failed (its own message is above)")
        files = sorted(Path(folder).rglob("results*.json"))
        if not files:
            raise AlignerError(f"{program} has written no results")
        return [one for file in files for one in lm_eval_measures(json.loads(file.read_text(encoding="utf-8")))]


def lm_eval_measures(found: Mapping[str, Any]) -> list[Measure]:
    """The metrics of a results file of lm-eval (`results[task]["metric,filter"]`, and `metric_stderr,filter`)."""
    counts = {task: int(number.get("effective", 0)) for task, number in (found.get("n-samples") or {}).items()}
    measures = []
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, kept = name.partition(",")
            if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, (int, float)) or not kept:
                continue
            error = values.get(f"{metric}_stderr,{kept}")
            half = Z * error if isinstance(error, (int, float)) else None
            measures.append(
                Measure(
                    name=f"{task}: {metric}" + ("" if kept == "none" else f" ({kept})"),
                    value=float(value),
                    low=value - (half or 0.0),
                    high=value + (half or 0.0),
                    count=counts.get(task, 0),
                    interval="" if half is None else NORMAL,
                )
            )
    return measures
