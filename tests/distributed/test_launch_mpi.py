"""Real starts: mpiexec with mpi4py, torchrun, tasks as Slurm makes them; and what is said when ranks do not fit together.

Only what a launcher starts are interpreters of their own, which take seconds to import torch.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("launch_job.py")


def run(command, env, timeout=120):
    """Run a launcher in a process group of its own, which does not outlive this call."""

    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def places(output):
    """What the ranks printed, sorted; ranks that share a pipe may run their lines together."""
    return sorted(re.findall(r"rank=\d+/\d+ local=\d+/\d+ source=\w+ sum=\d+?(?=rank=|\s)", output))


@pytest.mark.mpi
def test_mpiexec(mpiexec, clean_environment):
    size = 3
    code, output = run([str(mpiexec), "-n", str(size), sys.executable, str(JOB), "same", "60"], clean_environment())
    assert code == 0, output
    total = sum(range(size))
    lines = places(output)
    assert lines == [f"rank={rank}/{size} local={rank}/{size} source=mpi sum={total}" for rank in range(size)], output


def test_torchrun(clean_environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB), "same", "60"]
    code, output = run(command, clean_environment())
    assert code == 0, output
    lines = places(output)
    assert lines == [f"rank={rank}/2 local={rank}/2 source=torchrun sum=1" for rank in range(2)], output


@pytest.mark.parametrize("only_rank", ["", "1"])
def test_one_error_of_all_that_torchrun_started(clean_environment, only_rank, tmp_path):
    """Not one for each rank; and it is the cause that torchrun's own summary names. An error of a later rank alone is said too."""
    job = tmp_path / "job.py"
    refuse = "raise ConfigError('optimizer.lr=-1.0: no')"
    job.write_text(
        "import os, time\nfrom dataclasses import dataclass\nfrom aligner.run.program import entrypoint\n"
        "from aligner.errors import ConfigError\n@dataclass\nclass Settings:\n    a: int = 1\n"
        f"def main(config):\n    if {only_rank!r} in ('', os.environ['RANK']):\n        {refuse}\n    time.sleep(60)\n"
        f"from pathlib import Path\nentrypoint(Settings, 'job', [Path({str(tmp_path)!r})])(main)()\n"
    )
    (tmp_path / "job.yaml").write_text("a: 1\n")
    code, output = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(job)], clean_environment())
    assert code == 1 and output.count("error: optimizer.lr=-1.0: no\n") == 1, output
    assert re.search(rf"(?s)Root Cause.*rank      : {only_rank or 0} .*traceback : optimizer.lr=-1.0: no\n", output), output


def slurm_task(rank, **other):
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        **other,
    }


def test_slurm_tasks(run_ranks_in, free_port):
    port = {"ALIGNER_MASTER_PORT": str(free_port)}
    outputs = run_ranks_in([slurm_task(rank, **port) for rank in range(2)], [str(JOB), "same", "60"])
    assert [output.splitlines()[-1] for output in outputs] == [f"rank={rank}/2 local={rank}/2 source=slurm sum=1" for rank in range(2)]


def run_task(preloaded, env, timeout_seconds):
    return preloaded.run([str(JOB), "same", str(timeout_seconds)], env, JOB.parent, timeout=120)


@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, "rank 1 of 2 did not come within 2 s"), (1, "rank 1 of 2 waited 2 s for the rendezvous store of rank 0 at localhost:{port}")],
)
def test_a_rank_that_never_comes_is_named(rank, said, preloaded, clean_environment, free_port):
    env = clean_environment(slurm_task(rank, ALIGNER_MASTER_PORT=str(free_port)))
    code, output = run_task(preloaded, env, 2)
    assert code == 3 and said.format(port=free_port) in output


def test_taken_port_is_named(preloaded, clean_environment, free_port):
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", free_port))
        squatter.listen()
        code, output = run_task(preloaded, clean_environment(slurm_task(0, ALIGNER_MASTER_PORT=str(free_port))), 5)
    assert code == 3
    assert f"could not open the rendezvous store at localhost:{free_port}" in output
    assert "ALIGNER_MASTER_PORT" in output


def test_every_rank_hears_who_differs(run_ranks_in, free_port):
    port = {"ALIGNER_MASTER_PORT": str(free_port)}
    environments = [slurm_task(rank, RANK=str(rank), **port) for rank in range(2)]
    with pytest.raises(pytest.fail.Exception) as caught:
        run_ranks_in(environments, [str(JOB), "by-rank", "30"])
    assert len(re.findall(r"LaunchError: .*rank 1 on \S+: fingerprint is 'rank-1' and not 'rank-0'", str(caught.value))) >= 1
