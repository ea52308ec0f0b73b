"""Rewards from an HTTP endpoint: POST {"prompts", "responses", "answers"}, answered by {"rewards"}, all lists of one entry per sample."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from aligner.errors import ConfigError

BUSY = (429, 502, 503, 504)  # what servers and their proxies answer while they restart or have too much to do
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
EXCERPT_CHARACTERS = 300


class EndpointError(Exception):
    """An endpoint did not answer, or not with rewards."""


def endpoint_function(
    url: str, timeout_seconds: float, token_variable: str = ""
) -> Callable[[list[str], list[str], list[str | None]], list[float]]:
    """A thread-safe reward function that asks `url`, retrying for `timeout_seconds` in all if nothing answers or it is busy.

    It raises EndpointError, with the status and how the body begins, for any other status than 200 and for an answer without rewards.
    The caller checks number and type of the rewards. `token_variable` names the environment variable with a bearer
    token; raises ConfigError if it is not set.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token_variable:
        if token_variable not in os.environ:
            raise ConfigError(f"token_variable={token_variable}: there is no such environment variable")
        headers["Authorization"] = f"Bearer {os.environ[token_variable]}"

    def reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        body = json.dumps({"prompts": prompts, "responses": responses, "answers": answers}).encode()
        request = urllib.request.Request(url, body, headers, method="POST")
        return _rewards(url, _answer(request, time.monotonic() + timeout_seconds, timeout_seconds))

    return reward


def _answer(request: urllib.request.Request, deadline: float, timeout_seconds: float) -> bytes:
    """The body of a good answer. Raises EndpointError."""
    pause, attempts = FIRST_PAUSE_SECONDS, 0
    while True:
        attempts += 1
        try:
            with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            refusal = f"status {error.code} {error.reason}: {_excerpt(error.read())}"
            if error.code not in BUSY:
                raise EndpointError(f"{request.full_url} answered {refusal}") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            refusal = str(error) or repr(error)
        if time.monotonic() + pause >= deadline:
            raise EndpointError(
                f"{request.full_url} gave no answer within timeout_seconds={timeout_seconds:g} ({attempts} attempts; the last: {refusal})"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _rewards(url: str, body: bytes) -> list[float]:
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise EndpointError(f"{url} answered no JSON: {_excerpt(body)}") from error
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise EndpointError(f"{url} answered without rewards: {_excerpt(body)}")
    return answer["rewards"]


def _excerpt(body: bytes) -> str:
    text = body[: 4 * EXCERPT_CHARACTERS].decode(errors="replace")
    return repr(text[:EXCERPT_CHARACTERS] + ("..." if len(text) > EXCERPT_CHARACTERS else ""))
