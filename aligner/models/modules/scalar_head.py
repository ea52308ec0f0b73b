"""What the head of a value or reward model gives, and how Hugging Face's models with the same head are called. Light: no Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.models.checkpoint.files import MARKER, read_marker
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.models.config import Family

HEAD = "score_head."  # begins the names of its parameters
HF_HEADS = ("score.", "classifier.")  # the same in Hugging Face's models
POLICY_HEAD = "value_head"  # key of the marker of a policy with a head of values
POLICY_HEAD_FILE = "value_head.safetensors"  # the same beside its export, with the names that TRL and LLaMA-Factory give the tensors
POLICY_HEAD_NAMES = "v_head.summary."
_SEQUENCES, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_LANGUAGE_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "")


class Pooling(str, Enum):
    """What of a sequence is scored."""

    last = "last"  # its last token
    mean = "mean"  # the mean over its tokens
    tokens = "tokens"  # every token: values of a critic, steps of a process reward model (of a whole sequence: its last token)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarHead:
    """A linear head in float32 with one output per name."""

    outputs: tuple[str, ...] = ("reward",)
    pooling: Pooling = Pooling.last

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def has_bias(self) -> bool:
        """As in Hugging Face's models: those that classify sequences have none, those that classify tokens have one."""
        return self.pooling is not Pooling.last

    def to_marker(self) -> dict[str, Any]:
        return {"outputs": list(self.outputs), "num_outputs": self.num_outputs, "pooling": self.pooling.value}

    def to_hf(self, language_class: str) -> dict[str, Any]:
        """Fields of a Hugging Face config. `mean` is a model that scores tokens: the mean of its logits is the score."""
        kind = _SEQUENCES if self.pooling is Pooling.last else _TOKENS
        base = next(language_class.removesuffix(suffix) for suffix in _LANGUAGE_CLASSES if language_class.endswith(suffix))
        return {
            "architectures": [base + kind],
            "id2label": {str(number): name for number, name in enumerate(self.outputs)},
            "label2id": {name: number for number, name in enumerate(self.outputs)},
            "problem_type": "regression",
            "classifier_dropout": 0.0,
            "pooling": self.pooling.value,  # ours: the class leaves open whether tokens are averaged
        }

    def hf_name(self, name: str, family: Family) -> str:
        """Hugging Face's name of one of the head's parameters."""
        prefix = "classifier." if family is Family.gpt2 and self.pooling is not Pooling.last else "score."
        return prefix + name.removeprefix(HEAD)


class HeadGradient(str, Enum):
    """How far the gradient of a value loss reaches from a head on the policy."""

    detached = "detached"  # the head alone learns values
    joint = "joint"  # the policy's trunk learns them too


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyHead:
    """A head of values on a policy, beside its output layer, and how the policy's optimizer trains it."""

    gradient: HeadGradient
    lr: float
    min_lr: float


VALUES = ScalarHead(outputs=("value",), pooling=Pooling.tokens)


def read_head(directory: Path) -> ScalarHead | None:
    """The head that a checkpoint, or a classifying Hugging Face model, has, or None. Raises CheckpointError for a damaged marker."""
    if (directory / MARKER).exists():
        marker = read_marker(directory)
        if marker["kind"] != "scalar":
            return None
        if "pooling" not in marker:
            raise CheckpointError(f"{directory}: its marker has no pooling of the head: an older version wrote it; train it again")
        return ScalarHead(outputs=tuple(marker["outputs"]), pooling=Pooling(marker["pooling"]))
    config = read_json(directory / CONFIG_FILE)
    (name, *_) = config.get("architectures") or ("",)
    if not name.endswith((_SEQUENCES, _TOKENS)):
        return None
    labels = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # Hugging Face leaves out the default of two
    pooling = config.get("pooling") or ("last" if name.endswith(_SEQUENCES) else "tokens")
    return ScalarHead(outputs=tuple(labels[number] for number in sorted(labels, key=int)), pooling=Pooling(pooling))


def has_policy_head(directory: Path) -> bool:
    """Whether the policy there, in a checkpoint or in Hugging Face's files, has a head of values."""
    if (directory / MARKER).exists():
        return POLICY_HEAD in read_marker(directory)
    return (directory / POLICY_HEAD_FILE).exists()
