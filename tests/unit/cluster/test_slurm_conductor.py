"""What the conductor decides, against fake Slurm commands: every test runs whole jobs in this process (see conftest.py)."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aligner.cluster import lease as leases
from aligner.cluster.lease import LeaseRecord, RunHeld
from aligner.cluster.slurm import attempt as attempts
from aligner.cluster.slurm.allocation import allocation
from aligner.cluster.slurm.attempt import done_step, newest_step
from aligner.cluster.slurm.spec import OnFailure
from aligner.errors import ConfigError

RUNNING = "JobId=42 JobName=demo JobState=RUNNING Account=lab QOS=(null) Partition=gpu TimeLimit=01:00:00 EndTime=2099-01-01T00:00:00"


def test_a_run_that_is_done_cancels_its_gatekeeper_and_is_not_started_again(world) -> None:
    world.behaves(actor="finishes 10; says 0")
    assert world.conduct() == 0
    assert world.starts() == ["actor.1", "critic.1", "reward.1"]
    assert world.events() == ["job_started", "gatekeeper_queued", "attempt_started", "attempt_ended", "gatekeeper_cancelled", "job_ended"]
    assert world.cancelled() == ["100"]
    assert world.living_steps() == []
    assert not world.run.lease.exists()
    (sbatch,) = world.lines("sbatch")
    # One task for a few minutes, on the same partition and account; nothing of this job in its environment.
    assert "continues=42 attempt= job= " in sbatch and f"in={world.environ['SLURM_SUBMIT_DIR']} " in sbatch
    folder = world.run.jobs / "42"
    assert (
        "--dependency=afternotok:42 --kill-on-invalid-dep=yes --export=ALL --job-name=demo-gatekeeper "
        f"--output={folder}/gatekeeper-%j.out --nodes=1 --ntasks=1 --time=10 --no-requeue --partition=gpu --account=lab "
        f"{folder}/gatekeeper.sub" in sbatch
    )
    actor, critic, _ = sorted(world.lines("srun"))
    assert (
        "critic.1 attempt=42.0 end=" in critic
        and "--het-group=1 --export=ALL --job-name=critic --nodes=1 --ntasks=1 --ntasks-per-node=1" in critic
    )
    assert "--het-group=0" in actor and f"--output={world.run.logs}/actor.step.log" in actor and "--kill-on-bad-exit=1" in actor
    assert f"apptainer exec --bind {world.environ['SLURM_SUBMIT_DIR']}" in actor and f"--bind {world.run.path}:{world.run.path}" in actor
    assert actor.endswith("x.sif python3 -u actor.py a=1")
    end = int(critic.split("end=")[1].split()[0])
    assert end == time.mktime((2099, 1, 1, 0, 0, 0, 0, 0, -1)) - world.slurm.abandon_seconds

    assert world.conduct() == 0
    assert "is done (step 10, done.json): nothing to do" in world.text()
    assert len(world.starts()) == 3 and len(world.lines("sbatch")) == 1


def test_a_dead_server_is_started_again_alone(world) -> None:
    """Also one that leaves with exit code 0, or never registers."""
    world.slurm = replace(world.slurm, ready_timeout_seconds=0.3)
    world.behaves(
        critic_1="register; sleep 0.2; exit 137",
        reward_1="register; says 0; exit 0",
        reward_2="lasts",
        actor="awaits critic 2; awaits reward 3; finishes 10",
    )
    assert world.conduct() == 0
    assert world.starts() == ["actor.1", "critic.1", "critic.2", "reward.1", "reward.2", "reward.3"]
    assert [line for line in world.lines("srun") if "attempt=42.0" not in line] == []
    died = next(line for line in world.history() if line["event"] == "server_died" and line["component"] == "critic")
    assert died["restarted"] and "critic was killed" in died["reason"]
    assert "has not registered itself within slurm.ready_timeout_seconds=0.3" in world.text()


def test_a_server_whose_srun_was_killed_is_ended_before_it_starts_again(world) -> None:
    """Its tasks run on without srun; they would hold the server's name."""
    runs_on = 'register; sh -c "echo 43.\\$\\$\\|critic >$FAKE_SLURM/steps/\\$\\$; exec sleep 60" & sleep 0.3; kill -9 $$'
    world.behaves(critic_1=runs_on, actor="awaits critic 2; finishes 10")
    assert world.conduct() == 0
    assert "which have lost their srun" in world.text() and world.living_steps() == []


def test_a_server_that_dies_too_often_ends_the_attempt_after_a_grace(world) -> None:
    world.slurm = replace(world.slurm, max_server_restarts=1, on_actor_failure=OnFailure.end)
    world.behaves(critic="register; sleep 0.05; says 1 boom; exit 1", actor="lasts")
    assert world.conduct() == 1
    assert [start for start in world.starts() if start.startswith("critic")] == ["critic.1", "critic.2"]
    assert "crashed: critic: rank 0 ended with exit code 1: boom (exit code 1; job 100 looks into it)" in world.text()
    assert world.cancelled() == [] and world.living_steps() == []


@pytest.mark.parametrize(
    ("scripts", "code", "said"),
    [  # srun's own code says nothing
        ({"actor": "says 2 'look at this'; exit 137"}, 2, "refused: actor: rank 0 ended with exit code 2: look at this"),
        ({"actor": "says 78 'look at this'; exit 137"}, 78, "halted: actor: rank 0 ended with exit code 78: look at this"),
        (
            {"actor": "lasts", "critic": "says 2 'critic.clip=-1'; exit 2"},
            2,
            "refused: critic: rank 0 ended with exit code 2: critic.clip=-1",
        ),
    ],
)
def test_codes_that_end_a_run_for_good(scripts: dict[str, str], code: int, said: str, world) -> None:
    world.behaves(**scripts)
    assert world.conduct() == code and said in world.text()
    assert world.cancelled() == ["100"] and world.starts() == ["actor.1", "critic.1", "reward.1"]


def test_a_dead_actor_starts_everything_again_in_the_same_allocation(world) -> None:
    world.behaves(actor_1="reaches 4; says 1 'nan'; exit 1", actor_2="finishes 10; exit 0")
    assert world.conduct() == 0
    assert world.starts() == ["actor.1", "actor.2", "critic.1", "critic.2", "reward.1", "reward.2"]
    assert ["attempt=42.1" in line for line in sorted(world.lines("srun"))] == [False, True] * 3
    assert [line["step"] for line in world.history() if line["event"] == "attempt_started"] == [0, 4]


@pytest.mark.parametrize(
    ("actor", "text"),
    [
        ("exit 0", "actor was killed, or its node was lost (srun's exit code 0)"),
        ("reaches 4; says 0; exit 0", "crashed: actor: rank 0 ended with exit code 0"),  # native code called `_exit(0)`
    ],
)
def test_srun_that_says_all_is_well_before_the_last_step_is_not_believed(actor: str, text: str, world) -> None:
    world.slurm = replace(world.slurm, on_actor_failure=OnFailure.end)
    world.behaves(actor=actor)
    assert world.conduct() == 1
    assert f"{text}; if that was its own exit code, it ended by itself" in world.text()
    assert world.cancelled() == []  # the follow-up goes on


def test_no_restart_where_slurm_is_ending_the_job(world) -> None:
    world.behaves(actor="exit 1", job=RUNNING.replace("RUNNING", "NODE_FAIL"))
    assert world.conduct() == 1
    assert world.starts() == ["actor.1", "critic.1", "reward.1"]
    assert world.cancelled() == []


def test_starts_without_progress_halt_the_run(world) -> None:
    world.slurm = replace(world.slurm, max_restarts_without_progress=2)
    world.behaves(actor_1="reaches 3; exit 1", actor="exit 1")  # progress, then three starts after step 3
    assert world.conduct() == 78
    assert [start for start in world.starts() if start.startswith("actor")] == ["actor.1", "actor.2", "actor.3", "actor.4"]
    assert "halted: 3 starts in a row produced no checkpoint newer than step 3 (slurm.max_restarts_without_progress=2)" in world.text()
    assert world.cancelled() == ["100"]

    # A job that was queued all the same does not start anything; a person who submits it again gets a fresh count.
    assert world.conduct(ALIGNER_CONTINUES="42") == 78
    assert len(world.starts()) == 12 and len(world.lines("sbatch")) == 1
    world.behaves(actor="finishes 10")
    assert world.conduct() == 0


def test_sigusr1_stops_in_order_and_submits_the_successor(world) -> None:
    world.behaves(actor="trap 'reaches 5; says 75; exit 75' USR1; lasts")
    world.once_it_lasts(lambda: setattr(world.requests, "stop", True))
    assert world.conduct() == 0  # Slurm shows the job as COMPLETED
    gatekeeper, successor = world.lines("sbatch")
    assert "afternotok:42" in gatekeeper and "--dependency=afterany:42" in successor and "continues=42" in successor
    assert "--job-name=demo --partition=gpu --account=lab --time=01:00:00 " in successor
    assert successor.endswith("script.sub a=1 b=two words")
    assert world.cancelled() == ["100"]
    assert "job 101 will continue this run" in world.text()
    assert world.events()[-4:] == ["attempt_ended", "successor_submitted", "gatekeeper_cancelled", "job_ended"]


def test_a_step_that_takes_too_long_is_given_up(world) -> None:
    """The end of the job's time shortens what the actor may take."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5))
    world.slurm = replace(world.slurm, signal_seconds_before_end=600, abandon_seconds=4.0)
    world.behaves(actor="trap '' USR1; lasts", job=RUNNING.replace("2099-01-01T00:00:00", now))
    world.once_it_lasts(lambda: setattr(world.requests, "stop", True))
    assert world.conduct() == 0
    (asked,) = [line["seconds"] for line in world.history() if line["event"] == "stop_requested"]
    assert asked <= 1
    assert "stopped: its step took too long and was abandoned: the newest checkpoint is kept" in world.text()
    assert "afterany:42" in world.lines("sbatch")[1] and world.living_steps() == []


@pytest.mark.parametrize("successor", [True, False])
def test_a_run_that_stops_by_itself_before_the_end_of_its_time_goes_on_with_a_successor(successor: bool, world) -> None:
    world.slurm = replace(world.slurm, successor=successor)
    world.behaves(actor="reaches 7; says 75; exit 75")
    assert world.conduct() == (0 if successor else 75)
    assert ["afterany:42" in line for line in world.lines("sbatch")] == [False, True][: 1 + successor] and world.cancelled() == ["100"]


def test_the_gatekeeper_submits_a_successor_that_could_not_be(world) -> None:
    world.behaves(actor=": >$FAKE_SLURM/sbatch.broken; reaches 7; says 75; exit 75")
    assert world.conduct() == 75  # FAILED: so it starts
    assert "job 100 tries it again" in world.text() and world.cancelled() == []
    (world.folder / "sbatch.broken").unlink()
    assert world.gatekeeper() == "job 42 failed; job 101 continues the run"
    assert "continues=42" in world.lines("sbatch")[1]


def test_a_run_starts_where_no_gatekeeper_can_be_queued(world) -> None:
    (world.folder / "sbatch.broken").touch()
    world.behaves(actor="finishes 10")
    assert world.conduct() == 0
    assert "no job is queued to restart after a crash: " in world.text() and "name others in slurm.gatekeeper_options" in world.text()


def test_a_gatekeeper_where_a_site_wants_it_and_no_preflight(world) -> None:
    world.slurm = replace(world.slurm, gatekeeper_options=["--partition=cpu"], setup="module load python")
    world.preflight = ("-m", "aligner.cli", "preflight", "demo")
    world.behaves(actor="finishes 10")
    assert world.conduct(ALIGNER_PREFLIGHT="0") == 0 and "preflight.1" not in world.starts()
    script = (world.run.jobs / "42" / "gatekeeper.sub").read_text()
    assert "\nmodule load python\n" in script and script.endswith(
        f"exec {sys.executable} -m aligner.cluster.slurm.following {world.run.jobs}/42\n"
    )
    assert "--partition=gpu --account=lab --partition=cpu " in world.lines("sbatch")[0]  # the last one counts


def test_sigterm_ends_the_job_and_only_a_person_ends_the_run(world) -> None:
    """Until a job has ended Slurm does not say by what: so the gatekeeper looks, and does not go on after scancel."""
    world.behaves(actor="lasts")
    world.once_it_lasts(lambda: setattr(world.requests, "terminate", True))
    assert world.conduct() == 1
    assert world.cancelled() == [] and world.living_steps() == []
    assert world.history()[-1]["ending"] == "terminated" and world.history()[-1]["gatekeeper"] == "100"

    for successor, state in enumerate(("PREEMPTED", "TIMEOUT", "NODE_FAIL", "FAILED"), 101):
        world.behaves(job=RUNNING.replace("RUNNING", state))
        assert world.gatekeeper() == f"job 42 failed; job {successor} continues the run"
        assert world.lines("sbatch")[-1].endswith(
            f"--export=ALL --job-name=demo --partition=gpu --account=lab --time=01:00:00 {world.script} a=1 b=two words"
        )
    for state in ("CANCELLED", "CANCELLED by 1000"):
        world.behaves(job=RUNNING.replace("RUNNING", state))
        assert world.gatekeeper() == "job 42 is not submitted again: somebody cancelled it: submit it again to continue"
        assert len(world.lines("sbatch")) == 5 and world.events()[-1] == "not_continued"
    lines = [line for line in world.run.attempts.read_text().splitlines(keepends=True) if "job_ended" not in line]
    world.run.attempts.write_text("".join(lines))  # of a killed conductor, which could not say how it ended
    assert "somebody cancelled it" in world.gatekeeper()


def test_a_gatekeeper_looks_whether_going_on_helps(world) -> None:
    """Starts are counted across jobs."""
    world.slurm = replace(world.slurm, max_restarts_without_progress=1, on_actor_failure=OnFailure.end)
    world.behaves(actor="exit 1")
    assert world.conduct() == 1
    assert world.conduct(ALIGNER_CONTINUES="41") == 78
    assert "it ended as halted" in world.gatekeeper()
    lines = [line for line in world.run.attempts.read_text().splitlines(keepends=True) if "job_ended" not in line]
    world.run.attempts.write_text("".join(lines))  # the node died before
    assert "2 starts in a row produced no checkpoint newer than step 0" in world.gatekeeper()
    later = {**world.environ, "SLURM_JOB_ID": "50"}
    world.environ = later
    world.behaves(actor="finishes 10")
    world.conduct()
    assert "the run is done (step 10)" in world.gatekeeper()
    world.run.done.unlink()
    assert "job 50 has continued it since" in world.gatekeeper()


def test_one_job_at_a_time(world) -> None:
    world.behaves(actor="finishes 10")
    other = LeaseRecord(job="7", attempt="7.0", host="n9", pid=1, valid_seconds=30.0)
    leases._write(world.run.lease, other)
    (world.folder / "job.7").write_text(RUNNING.replace("42", "7") + "\n")
    with pytest.raises(RunHeld, match=r"is held by Slurm job 7 \(pid 1 on n9, attempt 7.0\), which still lives"):
        world.conduct()
    assert world.starts() == [] and world.lines("sbatch") == [] and not world.run.attempts.exists()
    (world.folder / "job.7").write_text(RUNNING.replace("42", "7").replace("RUNNING", "NODE_FAIL") + "\n")
    assert world.conduct() == 0  # it has ended without giving its lease back


def test_the_jobs_output_tells_how_far_the_training_is(world, monkeypatch) -> None:
    """Of this attempt: the log goes on where an earlier one has ended. Before the first step it tells what the actor does."""
    monkeypatch.setattr(attempts, "PROGRESS_SECONDS", 0.1)
    world.run.log("actor", 0).write_text("step   9/10  of an earlier attempt\n")
    first = "logs 'waiting for the critic'; sleep 0.5; logs 'step   1/10  reward 0.1  2 s  ETA 18 s'; sleep 0.5"
    world.behaves(actor=f"{first}; logs 'a table of samples'; logs 'step   2/10  reward 0.2'; logs 'a sample'; sleep 0.5; finishes 10")
    assert world.conduct() == 0
    told = [line for line in world.said if line.startswith("actor: ")]
    assert told == ["actor: waiting for the critic", "actor: step   1/10  reward 0.1  2 s  ETA 18 s", "actor: step   2/10  reward 0.2"]


def test_a_lost_lease_ends_the_attempt(world) -> None:
    world.slurm = replace(world.slurm, lease_seconds=0.5)
    world.behaves(actor="lasts")
    world.once_it_lasts(lambda: leases._write(world.run.lease, LeaseRecord(job="7", attempt="7.0", host="n9", pid=1, valid_seconds=30.0)))
    assert world.conduct() == 2
    assert "was taken by Slurm job 7" in world.text() and world.living_steps() == []
    assert world.run.lease.exists()  # it is the other's


@pytest.mark.parametrize(
    ("actors", "critics", "code", "text", "starts"),
    [
        ("says 0", "says 0", 0, "preflight on 3 nodes", 6),
        ("says 2; exit 2", "says 0", 2, "preflight found what prevents the job from running", 3),
        ("says 0", "says 2 'port 5556 is taken'; exit 2", 2, "port 5556 is taken", 3),
        ("exit 1", "says 2; exit 2", 2, "preflight-critic found what prevents the job from running", 3),
    ],
)
def test_preflight_comes_first(actors: str, critics: str, code: int, text: str, starts: int, world) -> None:
    """On every component's nodes; what is refused anywhere is refused."""
    world.preflight = ("-m", "aligner.cli", "preflight", "demo")
    world.behaves(**{"preflight": actors, "preflight-critic": critics, "preflight-reward": "says 0"}, actor="finishes 10")
    assert world.conduct() == code
    first = sorted(line.split()[0] for line in world.lines("srun")[:3])
    assert text in world.text() and first == ["preflight-critic.1", "preflight-reward.1", "preflight.1"]
    others = [line for line in world.lines("srun") if "--only" in line]
    assert len(others) == 2 and all("--only versions,devices,clock,network,filesystem,ports" in line for line in others)
    assert len(world.starts()) == starts and world.cancelled() == ["100"]


def test_one_table_of_the_preflight_where_the_servers_nodes_are_well(world) -> None:
    world.preflight = ("-m", "aligner.cli", "preflight", "demo")
    table = "says 0; logs 'ranks  ok'; logs"
    world.behaves(preflight=f"{table} 'demo: ready'", actor="finishes 10")
    world.behaves(**{"preflight-critic": f"{table} 'demo: ready'", "preflight-reward": f"{table} 'demo: ready (1 warning: clock)'"})
    assert world.conduct() == 0
    shown = [line.removeprefix("  | ") for line in world.said if line.startswith(("preflight", "  | ")) and "nodes" not in line]
    assert shown == [
        *("preflight:", "ranks  ok", "demo: ready"),
        *("preflight-critic:", "demo: ready"),
        *("preflight-reward:", "ranks  ok", "demo: ready (1 warning: clock)"),
    ]
    assert any(line.startswith("gatekeeper: job 100 ") for line in world.said)


def test_a_preflight_that_crashed_is_run_again(world) -> None:
    """It has said nothing: the next start of the components must not take that for a yes."""
    world.preflight = ("-m", "aligner.cli", "preflight", "demo")
    world.behaves(
        **{"preflight_1": "kill -9 $$", "preflight_2": "says 2; exit 2", "preflight-critic": "says 0", "preflight-reward": "says 0"}
    )
    assert world.conduct() == 2
    assert [start for start in world.starts() if start.startswith("preflight.")] == ["preflight.1", "preflight.2"]
    assert not [start for start in world.starts() if start.startswith("actor")]


def test_a_job_of_another_shape_is_refused(world) -> None:
    with pytest.raises(ConfigError, match=r"this job has 1 \+ 4 \+ 1 nodes, its config requires 1 \+ 1 \+ 1 \(actor 1, critic 1, "):
        world.conduct(SLURM_JOB_NUM_NODES_HET_GROUP_1="4")
    with pytest.raises(ConfigError, match="submit it with sbatch"):  # outside a batch script
        allocation({})


def test_newest_step_is_of_complete_pairs(world) -> None:
    for folder, step, whole in (("policy", 2, True), ("critic", 2, True), ("policy", 4, True), ("critic", 4, False)):
        directory = world.run.checkpoints / folder / f"step_{step:06d}"
        directory.mkdir(parents=True)
        if whole:
            (directory / "aligner.json").touch()
    assert newest_step(world.run, ("policy", "critic")) == 2
    assert newest_step(world.run, ("policy",)) == 4


def test_a_run_is_done_by_the_length_that_is_wanted_now(world) -> None:
    def done(step: int = 0, reached: float = 0.0, *, max_steps: int = 0, epochs: float = 0.0) -> int:
        world.run.done.write_text(json.dumps({"step": step, "epochs": reached}))
        return done_step(world.run, SimpleNamespace(max_steps=max_steps, epochs=epochs))

    assert done(10, max_steps=10) == done(10, max_steps=9) == 10 and done(10, max_steps=11) == 0
    assert done(33, 2.5, epochs=2.5) == 33 and done(33, 2.5, epochs=3) == 0
    assert done(33, epochs=2.5) == 0  # max_steps ended it
    assert done(33, 2.5, epochs=3, max_steps=20) == 33  # max_steps are fewer now
    world.run.done.write_text('{"step": 10}')  # of an earlier version
    assert done_step(world.run, SimpleNamespace(max_steps=10, epochs=0.0)) == 10
    world.run.done.write_text("{half")
    assert done_step(world.run, SimpleNamespace(max_steps=1, epochs=0.0)) == 0
