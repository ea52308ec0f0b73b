"""Settings for reading and cutting data: one config per use. Light: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from aligner.data.mixture import as_sources, check_mixture
from aligner.data.templates import check_template
from aligner.errors import ConfigError, check_numbers
from aligner.hub.names import Files


class BadLines(str, Enum):
    """How to treat unusable records."""

    fail = "fail"  # list all of them in one error before training starts
    skip = "skip"  # leave them out, count and report them


class Overlong(str, Enum):
    """How to treat an example longer than `max_length` tokens, or a prompt longer than `max_prompt_length`."""

    drop = "drop"  # leave it out and count it
    truncate = "truncate"  # cut it and count it: an example loses its end, its end token too; a prompt its beginning
    refuse = "refuse"  # treat it like any other bad record


class Learn(str, Enum):
    """Which text of a supervised record is trained on."""

    responses = "responses"  # every assistant turn, with its end token
    last_response = "last_response"  # the last assistant turn alone
    everything = "everything"  # prompts too, all but the first token


class RecordForm(str, Enum):
    """A published form of records (docs/data.md); `aligner.data.forms` has the fields of each."""

    auto = "auto"  # recognised by its fields
    prompt_response = "prompt_response"
    prompt_completion = "prompt_completion"  # TRL's
    messages = "messages"  # OpenAI's
    text = "text"
    input_output = "input_output"  # NeMo-Aligner's
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    steerlm = "steerlm"  # NeMo-Aligner's chats
    pair = "pair"  # {prompt?, chosen, rejected}: TRL's, HH's, UltraFeedback's binarized
    nemo_pair = "nemo_pair"  # NeMo-Aligner's
    ultrafeedback = "ultrafeedback"
    helpsteer = "helpsteer"
    helpsteer2_preference = "helpsteer2_preference"
    helpsteer3 = "helpsteer3"
    steps = "steps"


class Thinking(str, Enum):
    """How to treat an assistant's thinking: the field `reasoning_content`, and `<think>...</think>` in its text."""

    template = "template"  # the chat template decides; many omit the thinking of earlier turns
    keep = "keep"  # in every turn; a record whose thinking the template omits is bad
    drop = "drop"  # in no turn


class SpecialText(str, Enum):
    """How to read special tokens that frame turns (begin, end, padding, what the chat template writes) and stand in a record's text."""

    plain = "plain"  # as text, and count the records
    refuse = "refuse"  # as a bad record
    keep = "keep"  # as the tokens, and count the records


# The least value of lengths, in tokens, which may also be 0 (the model's context length), and of numbers.
_LEAST_LENGTH = {"max_length": 2, "max_prompt_length": 1, "max_history_length": 1}
_MOST = {"max_pixels": 89478485, "max_per_record": 16, "frames": 16}  # Pillow's limit; `aligner.types.extras.MOST_IMAGES`
_LEAST = {"num_workers": 0, "num_validation_prompts": 1, "num_responses": 0}


def _refuse_unused(config: Any, why: str, *names: str) -> None:
    """Raise ConfigError for an inherited setting that nothing reads, if it differs from its default."""
    for name in names:
        value, default = (getattr(one, "value", one) for one in (getattr(config, name), type(config).__dataclass_fields__[name].default))
        if value != default:
            raise ConfigError(f"data.{name}={value}: {why}; allowed: {default or repr('')}")


def _require_whole_prompts(overlong: Overlong) -> None:
    if overlong is Overlong.truncate:
        raise ConfigError("data.overlong=truncate: complete prompts are written into the records; allowed: drop, refuse")


@dataclass(kw_only=True, slots=True)
class ImageConfig:
    """Images of records, for models that see (docs/data.md)."""

    root: str = ""  # the directory that paths of images begin at, and may not leave; empty: begin at the data file's, and may lead anywhere
    max_pixels: int = 33554432  # width times height of one image: a larger one makes its record unusable
    max_per_record: int = 16  # images of one record; more make it unusable
    frames: int = 8  # of a video: as many images at most, evenly taken from its first to its last

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"data.images.{name} is {value}, allowed: 1 to {most}")


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Settings of all data.

    `train` and `validation` are each a jsonl, json or parquet file, a directory of them, a data set of the Hugging Face Hub,
    `ORG/NAME[@REVISION][:SPLIT]` / `ORG/NAME[@REVISION]:CONFIG:SPLIT`, or the same after `datasets:`, also of a directory.
    """

    train: Any = "???"  # required: a jsonl, json or parquet file, a directory, ORG/NAME[@REV][:SPLIT], datasets:NAME, or a list of sources
    validation: Any = ""  # data to validate on, in the same forms as `train`; empty: none
    from_hub: ClassVar[Mapping[str, Files]] = {"train": Files.data, "validation": Files.data}
    overlong: Overlong = Overlong.drop  # longer examples: drop (and count), truncate (an example's end, a prompt's beginning) or refuse
    bad_lines: BadLines = BadLines.fail  # unusable records: fail: list them and do not start; skip: drop and count them
    mixture_temperature: float = 1.0  # T: sources without weights get shares like size^(1/T); 1: as one data set, larger: more equal shares
    cache: str = ""  # directory of tokenized data, which later runs find and map into memory; empty: tokenized into memory by every process
    num_workers: int = 0  # processes that tokenize, with data.cache; 0: as many as CPUs, at most 16
    chat_template: str = ""  # chatml, llama3, ... (docs/data.md), a file that ends in .jinja, or tokenizer:NAME; empty: the tokenizer's own
    thinking: Thinking = Thinking.template  # of assistant turns: as the template has it, keep or drop
    special_text: SpecialText = SpecialText.plain  # turn marks (<|im_end|>, </s>) in a record's text: plain text, refuse or keep as tokens
    images: ImageConfig = field(default_factory=ImageConfig)

    def __post_init__(self) -> None:
        self.train = as_sources(self.train, "data.train")
        self.validation = as_sources(self.validation, "data.validation")
        check_mixture(self)
        for one in fields(self):
            value, kind = getattr(self, one.name), type(one.default)
            if issubclass(kind, Enum) and not isinstance(value, kind):
                raise ConfigError(f"data.{one.name} is {value!r}, allowed: {', '.join(kind.__members__)} (of {kind.__name__})")
            if one.name in _LEAST_LENGTH and 0 != value < _LEAST_LENGTH[one.name]:
                raise ConfigError(
                    f"data.{one.name} is {value}, allowed: at least {_LEAST_LENGTH[one.name]}, or 0 (the model's context length)"
                )
            if one.name in _LEAST and value < _LEAST[one.name]:
                raise ConfigError(f"data.{one.name} is {value}, allowed: at least {_LEAST[one.name]}")
        form, field_name = getattr(self, "form", RecordForm.auto), getattr(self, "prompt_field", "")
        if field_name and form is not RecordForm.auto:
            raise ConfigError(f"data.form={form.value} and data.prompt_field={field_name}: allowed: one of the two")
        if self.num_workers and not self.cache:
            raise ConfigError(f"data.num_workers={self.num_workers}: requires data.cache, where the processes write what they tokenize")
        check_template(self.chat_template)


@dataclass(kw_only=True, slots=True)
class PromptDataConfig(DataConfig):
    """Prompts for online RL."""

    num_validation_prompts: int = 128  # the number of validation prompts: the first usable ones
    max_prompt_length: int = 0  # tokens; 0: context length minus max_response_length (docs/data.md)
    prompt_field: str = ""  # name of the field with the prompt; empty: `prompt`, `messages`, `text` or `instruction`, whichever is there
    form: RecordForm = RecordForm.auto  # the form of the records (docs/data.md); auto: recognised by their fields
    answer_field: str = ""  # name of the field with the reference answer; a.b: b inside of a; empty: `answer`, and others (docs/data.md)
    apply_chat_template: bool = False  # wrap a plain-text prompt as one user message
    add_bos: bool | None = None  # begin plain text with the begin token: null: the tokenizer's default; a chat template has its own


@dataclass(kw_only=True, slots=True)
class ExampleDataConfig(DataConfig):
    """Common settings of training examples."""

    max_length: int = 0  # tokens of an example; 0: the model's context length


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(ExampleDataConfig):
    """Prompts with responses; `max_length` counts prompt, response and end token."""

    prompt_field: str = ""  # with response_field: their names; empty: messages, prompt/response, input/output or instruction/input/output
    response_field: str = ""  # name of the field with the response; with prompt_field
    form: RecordForm = RecordForm.auto  # the form of the records (docs/data.md); auto: recognised by their fields
    learn: Learn = Learn.responses  # the trained text: every response, only the last response, or everything but the first token
    apply_chat_template: bool = False  # wrap a plain-text prompt and response as a user and an assistant message
    add_bos: bool | None = None  # begin plain text with the begin token: null: the tokenizer's default; a chat template has its own

    def __post_init__(self) -> None:
        ExampleDataConfig.__post_init__(self)
        if bool(self.prompt_field) != bool(self.response_field):
            raise ConfigError(
                f"data.prompt_field is {self.prompt_field!r} and data.response_field is {self.response_field!r}, "
                "allowed: both named or both empty"
            )


@dataclass(kw_only=True, slots=True)
class PretrainingConfig:
    """Text that a policy learns besides its own samples (`algorithm.pretraining_coef`): the records of SFT, of a prompt with a response the
    response, of a plain text all. They are read with the chat template, cache and other settings of `data`; longer ones are cut."""

    train: str = ""  # a jsonl, json or parquet file, a directory, ORG/NAME[@REV][:SPLIT] or datasets:NAME; with algorithm.pretraining_coef
    batch_size: int = 32  # examples beside each update of the policy
    max_length: int = 0  # tokens of an example; 0: the model's context length
    from_hub: ClassVar[Mapping[str, Files]] = {"train": Files.data}

    def __post_init__(self) -> None:
        check_numbers(self, "pretraining", at_least_1=("batch_size",))
        if self.max_length and self.max_length < 2:
            raise ConfigError(f"pretraining.max_length={self.max_length}: must be at least 2, or 0 (the model's context length)")

    def reading(self, data: DataConfig) -> SFTDataConfig:
        """How the records are read in a run with this `data`."""
        names = ("bad_lines", "cache", "num_workers", "chat_template", "thinking", "special_text", "images")
        shared = {name: getattr(data, name) for name in names}
        return SFTDataConfig(train=self.train, max_length=self.max_length, overlong=Overlong.truncate, **shared)


@dataclass(kw_only=True, slots=True)
class PreferenceDataConfig(ExampleDataConfig):
    """Chosen and rejected responses; `max_length` applies to each of them."""

    form: RecordForm = RecordForm.auto  # the form of the records (docs/data.md); auto: recognised by their fields
    apply_chat_template: bool = False  # wrap a plain-text prompt as one user message
    add_bos: bool | None = None  # begin plain text with the begin token: null: the tokenizer's default; a chat template has its own


@dataclass(kw_only=True, slots=True)
class UnpairedDataConfig(PreferenceDataConfig):
    """Responses judged good or bad: `{prompt, response, preference}`, or pairs, which are two responses each."""


@dataclass(kw_only=True, slots=True)
class DistillationDataConfig(ExampleDataConfig):
    """A teacher's log-probs of examples. `train`, `validation` are directories that `teacher_logprobs` wrote, or files of NeMo-Aligner's
    `{tokens, labels, loss_mask, topk_logits, topk_token_ids}`."""

    def __post_init__(self) -> None:
        ExampleDataConfig.__post_init__(self)
        _refuse_unused(self, "a teacher's log-probs are read from files unchanged", "cache", "thinking", "special_text")


@dataclass(kw_only=True, slots=True)
class DemonstrationDataConfig(SFTDataConfig):
    """Prompts with given responses, to compare the policy's own with. A prompt is never cut: `overlong=truncate` drops it."""

    max_prompt_length: int = 0  # tokens; 0: context length minus max_response_length (docs/data.md)
    learn: Learn = Learn.last_response

    def __post_init__(self) -> None:
        SFTDataConfig.__post_init__(self)
        if self.learn is not Learn.last_response:
            raise ConfigError(f"data.learn={self.learn.value}: only the last response is compared; allowed: {Learn.last_response.value}")


@dataclass(kw_only=True, slots=True)
class ProposalDataConfig(ExampleDataConfig):
    """Several responses to each prompt, with log-probs; `max_length` applies to each row."""

    num_responses: int = 0  # responses used of each record, from the first; 0: all, and all records have the same number
    add_bos: bool | None = None  # begin every row with the begin token; null: the tokenizer's default

    def __post_init__(self) -> None:
        ExampleDataConfig.__post_init__(self)
        if self.overlong is Overlong.truncate:
            raise ConfigError("data.overlong=truncate: log-probs belong to complete responses; allowed: drop, refuse")


@dataclass(kw_only=True, slots=True)
class SampledDataConfig(ProposalDataConfig):
    """Several responses to each prompt that get log-probs: the records of `ProposalDataConfig`, which may lack some or all."""

    apply_chat_template: bool = False  # the model of P(y|x) has a chat template of its own, not SteerLM's format


@dataclass(kw_only=True, slots=True)
class RequestDataConfig(PromptDataConfig):
    """Prompts to be answered, as in `PromptDataConfig`, or SteerLM's conversations, whose last turn is generated again.

    `attributes`, such as quality:4,toxicity:0, are requested of every response, which is then written in SteerLM's format.
    """

    attributes: str = ""  # requested of every response in SteerLM's format, such as quality:4,toxicity:0; empty: none
    system: str = ""  # the system message of conversations without one, in SteerLM's format

    def __post_init__(self) -> None:
        PromptDataConfig.__post_init__(self)
        if "\n" in self.attributes:
            raise ConfigError(f"data.attributes is {self.attributes!r}, allowed: one line such as quality:4,toxicity:0")
        _require_whole_prompts(self.overlong)


@dataclass(kw_only=True, slots=True)
class AnnotateDataConfig(SFTDataConfig):
    """Conversations to be labelled: the records of `SFTDataConfig`. `max_length` applies to the scored text."""

    def __post_init__(self) -> None:
        SFTDataConfig.__post_init__(self)
        _refuse_unused(self, "a response is scored in SteerLM's format", "chat_template", "thinking", "apply_chat_template", "learn")


@dataclass(kw_only=True, slots=True)
class ConstitutionDataConfig(PromptDataConfig):
    """Prompts to be answered, criticised and revised, as in `PromptDataConfig`; or pairs of responses to be compared.

    Inputs longer than `max_history_length` are left out and counted.
    """

    constitution: str = ""  # a YAML or JSON file of principles (aligner/data/constitution.py); empty: the built-in ones
    max_history_length: int = 0  # tokens before a critique or revision, or of a question with its answer; 0: at most 2048 (docs/data.md)

    def __post_init__(self) -> None:
        PromptDataConfig.__post_init__(self)
        _require_whole_prompts(self.overlong)
        _refuse_unused(self, "nothing is trained, or compared with an answer", "validation", "answer_field")


STEERLM_ATTRIBUTES = tuple("quality toxicity humor creativity helpfulness correctness coherence complexity verbosity".split())


@dataclass(kw_only=True, slots=True)
class RegressionDataConfig(PreferenceDataConfig):
    """Responses with a number for each attribute.

    `{text, label}`, `{prompt, response, label}`, `{messages, label}`, or SteerLM's conversations. `attributes` names the numbers of a label
    in order, and so the model's outputs.
    """

    attributes: list[str] = field(default_factory=lambda: list(STEERLM_ATTRIBUTES))  # names of a label's numbers, in order

    def __post_init__(self) -> None:
        PreferenceDataConfig.__post_init__(self)
        if not self.attributes or len(set(self.attributes)) < len(self.attributes):
            raise ConfigError(f"data.attributes is {self.attributes}, allowed: at least one name, each once")
        for name in self.attributes:
            if not name.isidentifier():
                raise ConfigError(f"data.attributes has {name!r}, allowed: names of letters, digits and _ that do not begin with a digit")


@dataclass(kw_only=True, slots=True)
class StepDataConfig(PreferenceDataConfig):
    """Responses in judged steps: `{prompt, steps, labels}` or `{prompt, completions, labels}`."""

    step_separator: str = "\n"  # written after every step; the step is judged at its last token

    def __post_init__(self) -> None:
        PreferenceDataConfig.__post_init__(self)
        if not self.step_separator:
            raise ConfigError("data.step_separator is '', allowed: a text that ends a step")
