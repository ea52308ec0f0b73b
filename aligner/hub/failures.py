"""What went wrong between here and the Hub, in one line that says what to do."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.hub.names import HubName

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")
_LOG_IN = "set HF_TOKEN, or run `hf auth login`"


def explain(error: Exception, text: str, name: HubName, *, endpoint: str, cache: Path, has_token: bool) -> AlignerError:
    """The error to raise instead of what huggingface_hub raised. `text`: the setting as it was typed."""
    here, kind = f"{endpoint}/{name.repo}", name.kind.value
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        mend = f"ask for access at {here} with the account of this token" if has_token else f"accept its terms at {here} and {_LOG_IN}"
        return ConfigError(f"{text}: the {kind} is gated, and {'this token may not read it' if has_token else 'no token is set'}: {mend}")
    if isinstance(error, RepositoryNotFoundError):
        private = "or this token may not read it" if has_token else f"or it is private: {_LOG_IN}"
        return ConfigError(f"{text}: no such directory here, and {endpoint} has no {kind} {name.repo}, {private}")
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(f"{text}: {here} has no branch, tag or commit {name.revision or 'main'}")
    if status in (401, 403):
        return ConfigError(f"{text}: {endpoint} refuses the token ({status}): {_LOG_IN}, with one that may do this")
    if isinstance(error, HFValidationError):
        return ConfigError(f"{text}: no such directory here, and no name of a {kind} on {endpoint}: {_first_line(error)}")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ConfigError(f"{text}: {here} lacks a file that it lists: {_first_line(error)}")
    if isinstance(error, HfHubHTTPError) and status is not None:
        return AlignerError(f"{text}: {endpoint} answered {status}: {_first_line(error)}")
    if _is_network(error):
        return AlignerError(
            f"{text}: no such directory here, {cache.parent} does not have all of it, and {endpoint} cannot be reached "
            f"({_cause(error)}): download it where there is a network, or set HTTPS_PROXY or HF_ENDPOINT"
        )
    if isinstance(error, OSError) and is_storage_error(error):
        return AlignerError(f"{text}: {describe_os_error(error, cache)}: make space, or name another cache with HF_HOME")
    return AlignerError(f"{text}: {type(error).__name__}: {_first_line(error)}")


def _is_network(error: BaseException) -> bool:
    """Whether no answer came, or a broken one."""
    if isinstance(error, OSError) and is_storage_error(error):
        return False
    known = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)
    return isinstance(error, known) or any(base.__module__.partition(".")[0] in _TRANSPORTS for base in type(error).__mro__)


def _cause(error: BaseException) -> str:
    """The first error of a chain: what huggingface_hub makes of it names no cause."""
    while (earlier := error.__cause__ or error.__context__) is not None and isinstance(error, LocalEntryNotFoundError):
        error = earlier
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
