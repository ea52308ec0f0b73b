"""Exports to the Hugging Face Hub: one commit with the files of a model and its card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token

from aligner.errors import AlignerError, ConfigError
from aligner.hub.download import endpoint, explain, is_offline
from aligner.hub.names import HubName, parse

CARD = "README.md"
_PARTS = (".json", ".safetensors", ".jinja", ".model", "merges.txt")  # the files of an export; never pickles or checkpoints
OPTION = "--push-to-hub"


def prepare(text: str) -> HubName:
    """The repository of this name, created (private) if it does not exist. Called before the work, to find what would refuse a push.

    Raises ConfigError for an invalid name, or without a token that may write; AlignerError without a network.
    """
    name = parse(text) or _refuse(text)
    if name.revision:
        raise ConfigError(f"{OPTION} {text}: a push goes to the main branch; allowed: ORG/NAME")
    if is_offline():
        raise ConfigError(f"{OPTION} {text}: HF_HUB_OFFLINE forbids it")
    if not get_token():
        raise ConfigError(f"{OPTION} {text}: no token is set: set HF_TOKEN to one that may write, or run `hf auth login`")
    _asked(name, lambda api: api.create_repo(name.repo, private=True, exist_ok=True))
    return name


def _refuse(text: str) -> HubName:
    is_here = " (there is a file or directory of that name)" if Path(text).exists() else ""
    raise ConfigError(f"{OPTION} {text}: is not a valid repository name{is_here}; allowed: ORG/NAME")


def push(directory: Path, name: HubName, *, card: str, message: str) -> str:
    """Upload the export in `directory` with this card, as one commit; a card in the directory takes precedence.

    Returns the address of the commit. Raises ConfigError for a token that may not write, AlignerError without a network.
    """
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name.endswith(_PARTS))
    own = directory / CARD
    operations = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file)) for file in files]
    operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=own.read_bytes() if own.is_file() else card.encode()))
    info = _asked(name, lambda api: api.create_commit(name.repo, operations=operations, commit_message=message))
    return str(info.commit_url)


def _asked(name: HubName, ask: Callable[[HfApi], object]) -> object:
    try:
        return ask(HfApi(endpoint=endpoint()))
    except AlignerError:
        raise
    except Exception as error:
        text, cache = f"{OPTION} {name}", Path(constants.HF_HUB_CACHE) / name.folder
        raise explain(error, text, name, endpoint=endpoint(), cache=cache, has_token=True) from error
