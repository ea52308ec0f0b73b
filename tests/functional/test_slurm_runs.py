"""PPO on a real Slurm cluster of three nodes: it learns, and signals, time limits, lost nodes and kill -9 change no bit of its result."""

from __future__ import annotations

import functools
import random
import signal
import sys
import sysconfig
import time
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from resumed_runs import same_runs
from slurm_cluster import Job, SlurmCluster
from slurm_job import kill
from slurm_runs import ENVIRONMENT, KINDS, PATIENCE_SECONDS, SMOKE, SlurmRun, run_settings
from training_jobs import ROOT, launcher, run_job, series, steps_of, train, without_times
from vision_models import write_questions, write_seeing

from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.pytriton, pytest.mark.timeout(1800)]
NUM_KILLS = 30


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "slurm").glob("*.sub")))
def test_a_cluster_of_the_right_size_takes_every_script(slurm: SlurmCluster, script: str) -> None:
    assert "to start at" in slurm.accepts(ROOT / "slurm" / script, cwd=ROOT)


def test_smoke(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`sbatch slurm/smoke_cpu.sub` from the checkout, preflight included; the critic in a virtual environment of its own."""
    run, environment = tmp_path / "run", tmp_path / "servers"
    venv.create(environment, with_pip=False, symlinks=True)
    own = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"  # with the packages of this one
    own.rmdir()
    own.symlink_to(sysconfig.get_paths()["purelib"])
    options = (f"--output={tmp_path}/%x-%j.out",)
    place = {"directory": tmp_path, "cwd": ROOT, "logs": run / "logs"}
    job = slurm.submit(
        SMOKE, f"run.directory={run}", f"critic.environment={environment}", options=options, environment=ENVIRONMENT, **place
    )
    job.until(lambda: len(steps_of(run)) > 2, "step 3", 2 * PATIENCE_SECONDS)
    ranks = [process for process in job.processes() if process.program != "srun" and "ALIGNER_COMPONENT" in process.variables]
    nodes = {process.variables["ALIGNER_COMPONENT"]: process.node for process in ranks}
    assert {nodes[name] for name in ("actor", "critic", "reward")} == set(slurm.nodes)
    at_home = {process.variables["ALIGNER_COMPONENT"] for process in ranks if process.variables.get("VIRTUAL_ENV") == str(environment)}
    assert at_home == {"critic"}
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    assert job.states == ["COMPLETED"] * 3
    rewards = series(run, "rollout/reward")
    assert len(rewards) == 30
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-5:]) / 5 > 0.4  # chance gives 2 %
    assert job.successors() == [] and [one.state for one in job.gatekeepers()] in ([], ["CANCELLED"])
    assert job.orphans() == []


@pytest.mark.slow
def test_grpo_with_images_on_three_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A replica on each node, in two jobs, the second submitted by the first: eight responses a step, to questions with no, one and two
    pictures. The numbers are those of one process."""
    write_seeing("qwen3_vl", tmp_path / "model", num_hidden_layers=3)
    pace, reward, num_steps = tmp_path / "pace", tmp_path / "varied.py", 4
    wait = f"    time.sleep(float(open({str(pace)!r}).read()))\n"
    score = "    return [len(set(response)) / 8 for response in responses]\n"
    reward.write_text(f"import time\n\ndef reward(prompts, responses, answers):\n{wait}{score}")
    pace.write_text("0")
    model = [f"model.path={tmp_path / 'model'}", "model.images=true", "model.freeze=[]", "model.dtype=float32", "optimizer.lr=1e-3"]
    step = ["algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.mini_batch_size=4", "model.micro_batch_size=1"]
    step += ["data.max_prompt_length=120", "rollout.sampling.max_response_length=8", f"loop.max_steps={num_steps}"]
    settings = [f"data.train={write_questions(tmp_path)}", f"reward.function.path={reward}:reward", *model, *step]
    run_job(train("grpo"), tmp_path / "one", settings)
    run, script = tmp_path / "three", tmp_path / "three.sub"
    sizes = ["num_processes=3", "cluster.gpus_per_node=1", "slurm.preflight=false", "slurm.memory="]
    assert launch_slurm("grpo", [*settings, *sizes, f"run.directory={run}"], LaunchOptions(output=script)) == 0
    pace.write_text("5")
    options = (f"--output={tmp_path}/%x-%j.out",)
    job = slurm.submit(script, options=options, directory=tmp_path, cwd=ROOT, environment=ENVIRONMENT, logs=run / "logs")
    job.until(lambda: len(steps_of(run)) > 0, "step 1", PATIENCE_SECONDS)
    assert {process.node for process in job.processes() if "aligner.cli" in process.command} >= set(slurm.nodes)
    job.signal(signal.SIGUSR1)
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    assert len(steps_of(run)) < num_steps
    pace.write_text("0")
    job.next_of_run(timeout_seconds=30).wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    for got, expected in zip(without_times(run), without_times(tmp_path / "one"), strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert expected["optim/grad_norm"] > 1e-3 and expected["rollout/logprob_gap"] < 1e-4


@pytest.fixture(scope="module")
def undisturbed(task: Path) -> Callable[[int], Path]:
    """`undisturbed(num_steps)`: the directory of a run of as many steps as processes of this machine."""

    @functools.cache
    def make(num_steps: int) -> Path:
        run = SlurmRun(None, task, f"undisturbed{num_steps}", run_settings(task, num_steps))
        run_job(launcher("ppo_smoke_cpu"), run.directory, [*run.settings, f"loop.save_every={num_steps}"])
        return run.directory

    return make


def same_result(run: SlurmRun, num_steps: int, undisturbed: Path) -> None:
    same_runs(run.directory, undisturbed, num_steps, components=["policy", "critic"])


def test_a_signal(slurm: SlurmCluster, task: Path, undisturbed: Callable[[int], Path]) -> None:
    """One run, two jobs: told to stop, and to the end. The second was submitted by the first."""
    num_steps = 12
    run = SlurmRun(slurm, task, "told", run_settings(task, num_steps))
    told = run.begin(pace=0.5, beyond=2)
    told.signal(signal.SIGUSR1)
    told.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)  # it has handed over
    assert run.step() == run.saved() >= 3
    assert told.orphans() == []
    run.finish(told.next_of_run(timeout_seconds=30), num_steps)
    same_result(run, num_steps, undisturbed(num_steps))


@pytest.mark.slow
def test_a_time_limit_and_a_lost_node(slurm: SlurmCluster, task: Path, undisturbed: Callable[[int], Path]) -> None:
    """Three jobs: out of time, a node lost, and to the end."""
    num_steps = 60
    run = SlurmRun(slurm, task, "disturbed", run_settings(task, num_steps))
    limited = run.begin(pace=3.0)
    limited.end_in_two_minutes()  # Slurm warns 60 s before that, or a little earlier
    limited.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    stopped = run.saved()
    assert num_steps > run.step() == stopped > 1
    assert limited.orphans() == []

    lost = limited.next_of_run(timeout_seconds=30)
    run.set_pace(0.5)
    run.progress(lost, beyond=stopped)
    node = lost.components()[1].nodes
    slurm.kill_node(node)
    lost.wait("NODE_FAIL", "FAILED", timeout_seconds=PATIENCE_SECONDS)
    assert lost.orphans() == []
    slurm.start_node(node)

    run.finish(lost.next_of_run(timeout_seconds=60), num_steps)
    same_result(run, num_steps, undisturbed(num_steps))


@pytest.mark.slow
def test_kill_9_at_random(slurm: SlurmCluster, task: Path, undisturbed: Callable[[int], Path]) -> None:
    """Kills of any process of any component. Half of them hit a run that has made progress since, the others one under repair."""
    draw, num_steps = random.Random(5), 90
    run = SlurmRun(slurm, task, "killed", run_settings(task, num_steps))
    run.set_pace(0.3)
    job = run.submit()
    kinds = [*KINDS * (NUM_KILLS // len(KINDS)), *draw.sample(KINDS, NUM_KILLS % len(KINDS))]
    draw.shuffle(kinds)
    killed: Counter[str] = Counter()
    for number, kind in enumerate(kinds):
        if number % 2 == 0:
            job = _progress_in_any_job(run, job, beyond=run.step())
        else:
            time.sleep(draw.uniform(0.0, 4.0))
        assert run.step() < num_steps, f"the run was done after {number} kills"
        job = _kill_one(run, job, kind, draw)
        killed[kind] += 1
    assert sum(killed.values()) == NUM_KILLS and set(killed) == set(KINDS)
    run.set_pace(0.0)
    job = _progress_in_any_job(run, job, beyond=num_steps - 1)
    run.finish(_newest(job), num_steps)
    same_result(run, num_steps, undisturbed(num_steps))


def _newest(job: Job) -> Job:
    """The last job of the run that was not cancelled before its start."""
    later = [one for one in job.successors() if one.state not in ("PENDING", "CANCELLED")]
    return later[-1] if later else job


def _progress_in_any_job(run: SlurmRun, job: Job, *, beyond: int) -> Job:
    """Until a step after this one is done, by this job or one that follows; that job."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while run.step() <= beyond:
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_SECONDS:g} s for a step after {beyond}\n{job.report()}")
        if job.ended and (newest := _newest(job)) is not job:
            assert job.orphans() == []
            job = newest
        time.sleep(0.2)
    return job


def _kill_one(run: SlurmRun, job: Job, kind: str, draw: random.Random) -> Job:
    """SIGKILL to a random process of this kind, once there is one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        candidates = sorted(run.processes()[kind], key=lambda process: process.pid)
        if candidates and kill(draw.choice(candidates)):
            return job
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_SECONDS:g} s for a process of kind {kind}\n{job.report()}")
        if job.ended:
            job = _newest(job)
        time.sleep(0.05)
