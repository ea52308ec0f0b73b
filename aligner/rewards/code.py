"""Rewards for programs that pass tests, run in a sandbox (aligner.rewards.sandbox; docs/rewards.md lists its limits)."""

from __future__ import annotations

import ast
import json
import re
import secrets
from concurrent.futures import ThreadPoolExecutor

from aligner.errors import ConfigError
from aligner.rewards.forms import Factory, TextFunction
from aligner.rewards.sandbox import Ending, Isolation, Outcome, Sandbox, SandboxLimits

WALL_TIMES = 3  # a program that passes on an idle machine passes on a busy one
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@Factory
def python_tests(
    timeout_seconds: float = 5.0,
    partial: bool = False,
    num_parallel: int = 4,
    isolation: str = "auto",
    interpreter: str = "",
    memory_megabytes: int = 512,
) -> TextFunction:
    """Factory: 1 if the response's program passes all tests in the prompt's answer, else 0; with `partial`, the fraction passed.

    The program is the response's last fenced block, else all of it. Tests are Python code that runs after it, where each `assert` counts
    as one (MBPP, HumanEval), or JSON with its input and output: {"inputs": [...], "outputs": [...]} (APPS). `timeout_seconds` limits the
    CPU time of one run, which also ends after WALL_TIMES as much wall time; `num_parallel` programs run at a time. Raises ValueError
    without tests, ConfigError if no sandbox works.
    """
    if isolation not in Isolation.__members__:
        raise ConfigError(f"isolation is {isolation!r}, expected one of {', '.join(Isolation.__members__)}")
    limits = SandboxLimits(
        wall_seconds=WALL_TIMES * timeout_seconds, cpu_seconds=max(1, round(timeout_seconds)), memory_bytes=memory_megabytes * 2**20
    )
    sandbox = Sandbox(limits, Isolation(isolation), interpreter=interpreter)
    print(sandbox.describe(), flush=True)
    threads = ThreadPoolExecutor(max_workers=num_parallel, thread_name_prefix="code")

    def reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        tests = [parse_tests(answer or "") for answer in answers]
        fractions = list(threads.map(lambda response, wanted: _passed(sandbox, program_of(response), wanted), responses, tests))
        return fractions if partial else [float(fraction == 1) for fraction in fractions]

    reward.about = sandbox.describe()  # for the preflight
    return reward


def program_of(response: str) -> str:
    """The last fenced block, else the whole response."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(text: str) -> str | list[tuple[str, str]]:
    """Python source, or pairs of the program's input and its expected output. Raises ValueError if it is neither, or empty."""
    if not text.strip():
        raise ValueError("the prompt has no tests as its answer")
    try:
        pairs = json.loads(text)
    except ValueError:
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"the prompt's answer is neither JSON nor Python: {error}") from error
        return text
    if not isinstance(pairs, dict) or not pairs.keys() >= {"inputs", "outputs"}:
        raise ValueError(f"the prompt's tests are JSON, but not an object with inputs and outputs: {text[:100]!r}")
    given, expected = pairs["inputs"], pairs["outputs"]
    if not given or len(given) != len(expected) or not all(isinstance(one, str) for one in (*given, *expected)):
        raise ValueError(f"the prompt's tests need as many inputs as outputs, at least one, all of them strings: {text[:100]!r}")
    return list(zip(given, expected, strict=True))


def _passed(sandbox: Sandbox, program: str, tests: str | list[tuple[str, str]]) -> float:
    """The fraction of the tests that a program passes."""
    if isinstance(tests, str):
        return _asserts_passed(sandbox, program, tests)
    return sum(_says(sandbox.run(program, given), expected) for given, expected in tests) / len(tests)


def _says(outcome: Outcome, expected: str) -> bool:
    """Whether a program succeeded and wrote this, ignoring whitespace at the ends of lines and of the text."""
    wrote, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (outcome.stdout, expected))
    return outcome.ending is Ending.exited and outcome.code == 0 and wrote == wanted


def _asserts_passed(sandbox: Sandbox, program: str, tests: str) -> float:
    """The fraction of the top-level asserts that hold; if there are none, 1 if the tests run to their end.

    A program could exit with code 0 before the tests: only the word written after the last test counts.
    """
    word = secrets.token_hex(8)
    counted, total = _counting(tests, f"_{word}")
    source = f"{program}\n\n_{word} = []\n{counted}\nprint()\nprint({word!r}, len(_{word}))\n"
    outcome = sandbox.run(source)
    last = outcome.stdout.rstrip().rpartition("\n")[2].split()
    if outcome.ending is not Ending.exited or outcome.code != 0 or last[:1] != [word]:
        return 0.0
    counts = [str(count) for count in range(total + 1)]
    if last[1:] not in [[count] for count in counts]:  # the program guessed the word and wrote this line itself
        return 0.0
    return int(last[1]) / total if total else 1.0


def _counting(tests: str, name: str) -> tuple[str, int]:
    """The tests with every top-level assert in a `try` that appends to the list `name` if it holds, and how many there are."""
    tree, total = ast.parse(tests), 0
    body: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            total += 1
            kept = ast.parse(f"try:\n    pass\n    {name}.append(1)\nexcept Exception:\n    pass").body[0]
            kept.body[0] = statement
            body.append(kept)
        else:
            body.append(statement)
    tree.body = body
    return ast.unparse(ast.fix_missing_locations(tree)), total
