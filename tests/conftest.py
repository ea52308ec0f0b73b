"""Fixtures and marks that every test may use. A test whose mark names something that is not here is skipped, with the reason printed."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))
import ranks  # noqa: E402

sys.path[:0] = ranks.FOLDERS
import browser  # noqa: E402
import slurm_cluster  # noqa: E402
import slurm_job  # noqa: E402
import tiers  # noqa: E402
from preloaded import (  # noqa: E402
    ForkedProcess,
    Preloaded,
    preloaded as preloaded_process,  # noqa: E402
)

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
LAST_LINES = 40
ON_CPU = [ROOT / "tests" / "distributed", ROOT / "tests" / "functional"]  # runs of several processes, for most of which one GPU is too few


def find_mpiexec() -> Path | None:
    """mpiexec beside this interpreter (PyPI's mpich), else on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return Path(found) if found else None


def _missing(mark: str) -> str | None:
    """Why tests with this mark cannot run here, or None where they can."""
    if mark in ("gpu", "cpu"):
        import torch

        found = torch.cuda.is_available()
        wrong = {"gpu": "no CUDA device", "cpu": "a GPU is there (hide it: CUDA_VISIBLE_DEVICES=)"}
        return wrong[mark] if found == (mark == "cpu") else None
    if mark == "simulated_cuda":
        return None if "simulated_cuda.startup" in sys.modules else "needs the environment of `make test-gpu-path`"
    if mark == "trtllm":
        return None if find_spec("tensorrt_llm") else "tensorrt_llm is not installed"
    if mark == "slurm":
        return slurm_cluster.missing()
    if mark == "browser":
        return browser.missing()
    if mark == "mpi":
        return None if find_spec("mpi4py") and find_mpiexec() else "mpi4py or mpiexec is not installed"
    if mark == "pytriton":
        return None if find_spec("pytriton") else "nvidia-pytriton is not installed"
    if mark == "shared":
        return None if SHARED_DATA.is_dir() else "no ../shared/data beside the checkout"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write how long each test took into tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers.Tiers(config), "tiers")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        if item.path.parent in ON_CPU and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.cpu)
        for mark in item.iter_markers():
            if mark.name not in reasons:
                reasons[mark.name] = _missing(mark.name)
            reason = reasons[mark.name]
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"{mark.name}: {reason}"))
    items[:] = _mixed(items)


def _mixed(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files of tests that start runs, which mostly wait, evenly among those that compute: so some process always has work for a core.
    What has taken longest comes first, so that no process is left with it at the end."""
    kinds: tuple[dict[Path, list[pytest.Item]], ...] = ({}, {})
    for item in items:
        kinds[item.path.parent in ON_CPU].setdefault(item.path, []).append(item)
    spent = tiers.seconds_of_files()
    ordered = [sorted(files.items(), key=lambda file: -spent[str(file[0].relative_to(ROOT))]) for files in kinds]
    placed = [((number + 0.5) / len(files), own) for files in ordered for number, (_, own) in enumerate(files)]
    return [item for _, own in sorted(placed, key=lambda pair: pair[0]) for item in own]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real data beside the checkout; skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("shared: no ../shared/data beside the checkout")
    return SHARED_DATA


@pytest.fixture(scope="session")
def mpiexec() -> Path:
    found = find_mpiexec()
    if found is None:
        pytest.skip("mpi: mpiexec is not installed")
    return found


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """The client of Anthropic's API: two seconds of a core, which only the process that needs it pays."""
    return pytest.importorskip("anthropic", reason="the package anthropic is not installed")


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without a launcher's variables, with the checkout importable and one thread per process."""
    launchers = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "ALIGNER_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if not key.startswith(launchers) and key not in names}
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), env.get("PYTHONPATH", "")) if part)
    env["OMP_NUM_THREADS"] = "1"
    env.update(extra or {})
    return env


def kill_groups(processes: list[subprocess.Popen[bytes] | ForkedProcess]) -> None:
    """SIGKILL each process and all that it started (each one leads a process group), and reap it."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes] | ForkedProcess], timeout: float) -> str | None:
    """Wait until all have ended well; returns what went wrong as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [f"rank {rank} exited with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            return ", ".join(failed)
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return f"ranks {[rank for rank, code in enumerate(codes) if code is None]} still ran after {timeout:.0f} s"
        time.sleep(0.05)


def run_ranks(command: list[str], environments: list[dict[str, str]], timeout: float, forks: Preloaded | None = None) -> list[str]:
    """Run `command` once per environment, side by side; returns each rank's output (stdout and stderr together).

    With `forks` the command is a script and its arguments, run by a process that has its imports already.
    Fails the test, with the last lines of every rank, when one exits with an error or `timeout` seconds are over. No process survives.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(len(environments))]
        processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        try:
            for log, env in zip(logs, environments, strict=True):
                if forks is not None:
                    processes.append(forks.start(command, env, log, ROOT))
                    continue
                with log.open("wb") as out:
                    processes.append(
                        subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
                    )
            problem = _wait(processes, timeout)
        finally:
            kill_groups(processes)
        if problem:
            tails = "".join(slurm_job.tail(log, LAST_LINES) for log in logs)
            pytest.fail(f"{' '.join(command)}: {problem}\n{tails}", pytrace=False)
        return [log.read_text(errors="replace") for log in logs]


@pytest.fixture(scope="session")
def preloaded() -> Preloaded:
    return preloaded_process()


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`on_ranks(function, nproc, *args, timeout=300, fresh=False)`: what a function of a test module returns on each local rank.

    The ranks get torchrun's variables. This process hosts their TCPStore, as torchrun does, so no port has to be guessed. They are forks
    of a warm process, or with `fresh` interpreters of their own.
    """

    def call(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = 300.0, fresh: bool = False) -> list[Any]:
        from torch.distributed import TCPStore

        folder = tmp_path_factory.mktemp("ranks")
        ranks.ask(folder, function, args)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environments = [child_environment(variables) for variables in ranks.local_variables(nproc, store.port)]
        command = [ranks.__file__, str(folder)]
        run_ranks([sys.executable, *command] if fresh else command, environments, timeout, None if fresh else preloaded_process())
        return ranks.answers(folder, nproc)

    return call


@pytest.fixture
def run_ranks_in(preloaded: Preloaded) -> Callable[..., list[str]]:
    """`run_ranks_in(environments, script_and_args, timeout=120)`: a rank per set of variables; outputs as from `run_ranks`."""

    def run(environments: list[dict[str, str]], script: list[str], timeout: float = 120.0) -> list[str]:
        return run_ranks(script, [child_environment(extra) for extra in environments], timeout, preloaded)

    return run


@pytest.fixture
def clean_environment() -> Callable[..., dict[str, str]]:
    """`clean_environment(extra=None)`: variables for a child process; see `child_environment`."""
    return child_environment


@pytest.fixture
def free_port() -> int:
    return ranks.free_port()


@pytest.fixture(scope="session")
def _slurm_cluster() -> Iterator[slurm_cluster.SlurmCluster]:
    # Not below pytest's temporary directory: Unix sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory:
        with slurm_cluster.SlurmCluster(Path(directory)) as cluster:
            yield cluster


@pytest.fixture
def slurm(_slurm_cluster: slurm_cluster.SlurmCluster) -> Iterator[slurm_cluster.SlurmCluster]:
    """A real Slurm cluster of three idle nodes (see tests/slurm_cluster.py); one for all tests, put in order after each."""
    yield _slurm_cluster
    _slurm_cluster.clean()


@pytest.fixture(scope="session")
def topology():
    """A torch.distributed world of one with Megatron-Core's groups, for every single-process test: a process can have only one world."""
    from aligner.parallel import launch, platform
    from aligner.parallel.topology import ParallelConfig, initialize

    launch.initialize(platform.backend(), timeout_seconds=30, fingerprint="tests", environ={"ALIGNER_LAUNCH": "single"})
    made = initialize(ParallelConfig(), seed=1)
    forget_imports()
    yield made
    launch.shutdown()


def forget_imports() -> None:
    """Leave what torch and Megatron-Core are made of, a million objects that stay, out of every later garbage collection: Megatron-Core
    collects at every save, which takes longer than the save of a small model."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def logprob_gap() -> Callable[..., Any]:
    """`logprob_gap(policy, rollouts)`: how far each sampled token's log-prob, float32 [tokens], is from the policy's own one. The one
    measure for all engines; the policy has the temperature of the sampling. Every rank of the policy calls it, with the same rollouts."""

    def gap(policy: Any, rollouts: Sequence[Any]) -> Any:
        from aligner.data.collate import rollout_batch

        batch = rollout_batch(list(rollouts), 0)
        found = policy.logprobs(batch) - batch.rollout_logprobs
        assert int(batch.loss_mask.sum()) == sum(len(rollout.response) for rollout in rollouts) > 0
        return found[batch.loss_mask].abs()

    return gap
