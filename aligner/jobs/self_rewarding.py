"""Self-rewarding: the actor that learns from which of its responses it, or another judge, finds better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aligner.algorithms.iterations import Answer
from aligner.algorithms.judge import Judge, Judgement, Rubric, read_template, score_pattern
from aligner.algorithms.online import OnlineTask
from aligner.algorithms.self_rewarding import JudgedBy, SelfRewarding, SelfRewardingConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.questions import read_questions
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.jobs import columns
from aligner.jobs.announce import announced
from aligner.jobs.kept_files import KeptFiles
from aligner.jobs.lengths import with_lengths
from aligner.jobs.moving_reference import CheckpointedReference
from aligner.jobs.online import build_task, load_prompt_sets
from aligner.jobs.parts import load_model_files
from aligner.jobs.session import session
from aligner.jobs.training import train_to_end
from aligner.models import create
from aligner.schemas import TrainSelfRewarding
from aligner.types import Prompt


def train_self_rewarding(config: TrainSelfRewarding) -> int:
    """Iterations of sampling, judging and training; the reference is the policy at the beginning of each. Every rank calls it."""
    with session(config, config.run, config.parallel, component="actor") as here, announced(here, "actor") as publication:
        settings = config.algorithm
        tokenizer, architecture = load_model_files(config.model)
        config = with_judge_lengths(config, tokenizer)
        context = create.context_length(config.model, architecture)
        sets = load_prompt_sets(here, config, tokenizer)
        asking = ask_about(config, *sets, tokenizer=tokenizer, context=context) if settings.judge is JudgedBy.policy else None
        task, policy, files = build_task(here, config, with_reference=True, num_prompts=settings.batch_size, load=lambda _: sets)
        if publication is not None:
            publication.ready()
        folder = here.directory.path / "self_rewarding"
        algorithm = SelfRewarding(
            settings,
            policy,
            task,
            CheckpointedReference(here, policy, task.reference, verify=config.checkpoint.verify),
            KeptFiles(folder, Answer, stem="responses"),
            judge=None if asking is None else make_judge(settings, asking, task, context=context),
            judgements=None if asking is None else KeptFiles(folder, Judgement, stem="judgements"),
            rewarded=config.has_scorer,
            settings=said_by(config, asking),
        )
        here.say(algorithm.summary())
        code = train_to_end(here, config, algorithm, policy.model, tokenizer=files, shown=columns.SELF_REWARDING)
        task.engine.shutdown()
        task.reward.close()
    return code


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How the judge is asked. `ask(prompt, response)`: ids of its prompt; `read`: ids to text."""

    rubric: Rubric
    ask: Callable[[Prompt, Sequence[int]], Sequence[int]]
    read: Callable[[Sequence[int]], str]


def with_judge_lengths(config: TrainSelfRewarding, tokenizer: Tokenizer) -> TrainSelfRewarding:
    """The config with every length filled in; where the policy judges itself, so that its question and its answer fit too."""
    settings = config.algorithm
    if settings.judge is not JudgedBy.policy:
        return with_lengths(config)
    question = rubric_of(settings).ask("", "")
    styles = [PromptStyle(apply_chat_template=chat, add_bos=config.data.add_bos) for chat in {False, tokenizer.has_chat_template}]
    longest = max(len(encode_prompt(tokenizer, question, style)) for style in styles)
    return with_lengths(config, reserved=longest + settings.max_judgement_length)


def rubric_of(settings: SelfRewardingConfig) -> Rubric:
    """What the judge is asked. Raises ConfigError for a template that cannot be used."""
    return Rubric(
        template=read_template(settings.judge_template),
        pattern=score_pattern(settings.score_pattern),
        lowest=settings.lowest_score,
        highest=settings.highest_score,
    )


def ask_about(
    config: TrainSelfRewarding, train: Sequence[Prompt], validation: Sequence[Prompt], *, tokenizer: Tokenizer, context: int
) -> Asking:
    """The judge of responses to these prompts is asked as the policy is: through the chat template where they are.

    Raises ConfigError for a template that cannot be used, or that leaves no room for the longest response and a judgement of it.
    """
    questions = read_questions(config.data.train, config.data, train)
    if validation:
        questions |= read_questions(config.data.validation, config.data, validation)
    rubric = rubric_of(config.algorithm)
    style = PromptStyle(apply_chat_template=questions.are_chats, add_bos=config.data.add_bos)

    def ask(prompt: Prompt, response: Sequence[int]) -> list[int]:
        return encode_prompt(tokenizer, rubric.ask(questions.texts[prompt.source], tokenizer.decode(response)), style)

    check_room(config, len(encode_prompt(tokenizer, rubric.ask("", ""), style)), context)
    return Asking(rubric=rubric, ask=ask, read=tokenizer.decode)


def check_room(config: TrainSelfRewarding, template: int, context: int) -> None:
    """Raise ConfigError where a judge's prompt (with a template of so many tokens) and its judgement may not fit the model's context."""
    sizes = {
        "the judge's template": template,
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.sampling.max_response_length": config.rollout.sampling.max_response_length,
        "algorithm.max_judgement_length": config.algorithm.max_judgement_length,
    }
    if (longest := sum(sizes.values())) > context:
        parts = " + ".join(f"{name} ({size})" for name, size in sizes.items())
        raise ConfigError(f"{parts} = {longest}: longer than the model's context of {context} tokens")


def make_judge(settings: SelfRewardingConfig, asking: Asking, task: OnlineTask, *, context: int) -> Judge:
    """The policy as the judge. What is read back as text may have more tokens than it was sampled with: too long is not judged."""
    return Judge(
        asking.rubric,
        task.engine,
        ask=asking.ask,
        read=asking.read,
        sampling=settings.judge_sampling(),
        num_judgements=settings.num_judgements,
        longest=context - settings.max_judgement_length,
        beat=task.beat,
    )


def said_by(config: TrainSelfRewarding, asking: Asking | None) -> str:
    """All that decides on what is sampled and how it is scored, besides weights, prompts and seeds."""
    settings, reward, judged = config.algorithm, config.reward, None
    if asking is not None:
        rubric = asking.rubric
        scale = (rubric.template, rubric.pattern.pattern, rubric.lowest, rubric.highest)
        judged = (scale, settings.num_judgements, settings.judge_sampling())
    return repr((config.rollout.sampling, judged, reward.function, reward.functions, reward.model.path, reward.attribute_weights))
