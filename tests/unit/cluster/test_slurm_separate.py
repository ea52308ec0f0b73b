"""Runs whose parts are jobs of their own (`slurm.separate`), against the fake commands of tests/fakes/slurm_commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aligner.cluster.slurm import separate
from aligner.cluster.slurm.allocation import StopRequests, allocation
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.separate import Together, hold
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, SlurmConfig
from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm
from aligner.errors import ConfigError, LaunchError

FAKES = Path(__file__).parents[2] / "fakes" / "slurm_commands"
GIVEN = ["data.train=x", "model.path=y", "critic.model.path=y", "reward.model.path=y", "slurm.gpu_request=none", "slurm.account=lab"]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_SLURM": str(tmp_path)}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(separate, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(separate, "_POLL_SECONDS", 0.01)
    return found


def spec(folder: Path) -> JobSpec:
    sizes = {"actor": 4, "critic": 2, "reward": 1}
    components = tuple(
        ComponentSpec(name=name, program=(name,), num_nodes=nodes, ranks_per_node=8, gpus_per_node=8, part=part)
        for part, (name, nodes) in enumerate(sizes.items())
    )
    return JobSpec(
        name="ppo",
        run_directory=str(folder),
        max_steps=1,
        checkpoints=(),
        components=components,
        preflight=(),
        slurm=SlurmConfig(separate=True, account="lab"),
        idle_seconds=60,
    )


def test_the_jobs_are_submitted_together_the_actors_last(tmp_path: Path, environ: dict[str, str]) -> None:
    together = Together.of(spec(tmp_path), "ppo", [[], ["--exclude=n7"]])
    job = together.submit(SlurmClient(20.0, environ), Path("x.sub"), ("a=1",), cwd=tmp_path, environ=environ, after="7")
    assert job == "102"
    critic, reward, actor = (line.partition("--parsable ")[2] for line in (tmp_path / "sbatch.log").read_text().splitlines())
    size = "--ntasks-per-node=8 --gpus-per-node=8 --mem=0 --exclusive --account=lab"
    begin = "--dependency=afterany:7 --kill-on-invalid-dep=yes"
    assert critic == f"{begin} --job-name=ppo-critic --nodes=2 {size} --exclude=n7 x.sub --holds-for={together.note} -- a=1"
    assert reward == f"{begin} --job-name=ppo-reward --nodes=1 {size} x.sub --holds-for={together.note} -- a=1"
    begin = "--dependency=afterany:7,after:100:101 --kill-on-invalid-dep=yes"
    assert actor == f"{begin} --job-name=ppo --nodes=4 {size} x.sub --beside=100,101 -- a=1"
    assert json.loads(together.note.read_text()) == {"job": "102", "idle_seconds": 60, "command_seconds": 60.0}


def test_no_job_is_left_where_one_is_refused(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    client = SlurmClient(20.0, environ)
    submit = client.submit

    def refuses_the_actor(options, *given, **more):
        if "--nodes=4" in options:
            raise LaunchError("sbatch failed: AssocMaxNodes")
        return submit(options, *given, **more)

    monkeypatch.setattr(client, "submit", refuses_the_actor)
    with pytest.raises(LaunchError, match="AssocMaxNodes"):
        Together.of(spec(tmp_path), "ppo").submit(client, Path("x.sub"), (), cwd=tmp_path, environ=environ)
    assert (tmp_path / "scancel.log").read_text().splitlines() == ["--quiet 100", "--quiet 101"]


def holds(tmp_path: Path, requests: StopRequests, *states: str, idle_seconds: float = 60.0) -> tuple[int, str]:
    """A job that holds nodes for job 42, which is in these states one after the other."""
    note, said = tmp_path / "note.json", []
    note.write_text(json.dumps({"job": "42", "idle_seconds": idle_seconds, "command_seconds": 20.0}))
    left = list(states)

    def say(text: str) -> None:
        said.append(text)

    def next_state(client: SlurmClient, job: str) -> list:
        state = left.pop(0) if len(left) > 1 else left[0]
        if state == "silent":
            raise LaunchError("scontrol did not answer")
        return [type("Record", (), {"state": state})]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlurmClient, "show", next_state)
        return hold(note, requests, say), "\n".join(said)


def test_nodes_are_held_until_the_actors_job_is_over(tmp_path: Path, environ: dict[str, str]) -> None:
    requests = StopRequests()
    requests.stop = True  # the end of this job's time is near: the run has to hear of it
    code, said = holds(tmp_path, requests, "PENDING", "RUNNING", "silent", "silent", "RUNNING", "COMPLETED")
    assert code == 0 and said.count("cannot ask about job 42") == 1 and said.endswith("job 42 is over")
    assert (tmp_path / "scancel.log").read_text() == "--quiet --batch --signal=USR1 42\n"


def test_nodes_are_given_back_where_the_actors_job_does_not_begin(tmp_path: Path, environ: dict[str, str]) -> None:
    code, said = holds(tmp_path, StopRequests(), "PENDING", idle_seconds=0.05)
    assert code == 0 and "job 42 has not begun for 0.05 s (server.idle_timeout_seconds)" in said
    cancelled = StopRequests()
    cancelled.terminate = True
    assert holds(tmp_path, cancelled, "PENDING")[0] == 1


def test_a_job_that_nobody_submitted_an_actor_for_ends(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate, "_NOTE_SECONDS", 0.05)
    with pytest.raises(LaunchError, match=r"waited 0.05 s for .*note.json, which names the actor's job"):
        hold(tmp_path / "note.json", StopRequests(), print)


def test_steps_go_to_the_jobs_beside(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": "102", "SLURM_SUBMIT_DIR": "/d", "SLURM_JOB_NUM_NODES": "4"}
    here = allocation(variables, ["100", "101"])
    here.check(spec(tmp_path))
    assert [here.step_options(part) for part in range(3)] == [[], ["--jobid=100"], ["--jobid=101"]]
    for beside in ([], ["100"]):
        with pytest.raises(ConfigError, match="submitted with its servers' jobs, by `aligner launch slurm --separate`"):
            allocation(variables, beside).check(spec(tmp_path))


def test_the_command(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--output=x.sub: with slurm.separate=true a run is 3 jobs that are submitted together"):
        launch_slurm("ppo_70b", GIVEN, LaunchOptions(separate=True, output=Path("x.sub")))
    assert launch_slurm("ppo_70b", GIVEN, LaunchOptions(separate=True, dry_run=True)) == 0
    script, *commands = capsys.readouterr().out.split("# sbatch ")
    assert script.count("#SBATCH --nodes") == 1 and "hetjob" not in script and script.rstrip().endswith('slurm.separate=true "$@"')
    assert [command.split()[0] for command in commands] == ["--job-name=ppo_70b-critic", "--job-name=ppo_70b-reward", "--job-name=ppo_70b"]
    assert launch_slurm("ppo_70b", [*GIVEN, "run.directory=here"], LaunchOptions(separate=True)) == 0
    assert capsys.readouterr().out.endswith("Submitted batch job 102\n") and list((tmp_path / "here" / "jobs").glob("together-*.json"))
