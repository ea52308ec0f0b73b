"""PPO over three nodes of a test cluster: the settings of a run whose speed a test controls, and its processes by kind."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_cluster import Job, NodeProcess, SlurmCluster
from training_jobs import ROOT, checkpoint_steps, ppo_settings, steps_of

SMOKE = ROOT / "slurm" / "smoke_cpu.sub"
KINDS = ("actor", "critic", "reward", "tritonserver", "stub", "srun", "conductor")
ENVIRONMENT = {"ALIGNER_HOME": str(ROOT), "ALIGNER_VENV": sys.prefix, "ALIGNER_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
PATIENCE_SECONDS = 240.0  # from one end of a component to the next step: three starts on a busy machine of two cores


class SlurmRun:
    """One run directory and the jobs that work on it. Its steps take as long as the file `pace` says."""

    def __init__(self, cluster: SlurmCluster | None, folder: Path, name: str, settings: list[str]) -> None:
        self.cluster = cluster
        self.directory = folder / name / "run"
        self.directory.parent.mkdir()
        self._pace = self.directory.parent / "pace"
        self.set_pace(0.0)
        self.settings = [*settings, _paced_reward(self._pace)]

    def set_pace(self, seconds: float) -> None:
        """How long every step takes at least, from the next one on."""
        fresh = self._pace.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.rename(self._pace)

    def submit(self, *options: str, preflight: bool = False, environment: dict[str, str] | None = None) -> Job:
        """The line that a user types, with these variables."""
        return self.cluster.submit(
            SMOKE,
            *self.settings,
            f"run.directory={self.directory}",
            options=options,
            directory=self.directory.parent,
            environment=environment or {**ENVIRONMENT, "ALIGNER_PREFLIGHT": str(int(preflight))},
            logs=self.directory / "logs",
        )

    def begin(self, *options: str, pace: float = 0.3, beyond: int = 1) -> Job:
        """A job whose steps take at least so long, once it has done a step after this one."""
        self.set_pace(pace)
        job = self.submit(*options)
        self.progress(job, beyond=beyond)
        return job

    def progress(self, job: Job, *, beyond: int) -> None:
        job.until(lambda: self.step() > beyond, f"a step after {beyond}", 2 * PATIENCE_SECONDS)

    def finish(self, job: Job, num_steps: int) -> None:
        """To the end of the run by this job, which leaves nothing: no step is lost, none is done twice."""
        self.set_pace(0.0)
        job.wait("COMPLETED", timeout_seconds=3 * PATIENCE_SECONDS)
        assert steps_of(self.directory) == list(range(1, num_steps + 1))
        assert job.orphans() == []

    def step(self) -> int:
        """The last step of metrics.jsonl; 0 before the first."""
        return max(steps_of(self.directory), default=0)

    def saved(self) -> int:
        """The newest step that both models have a complete checkpoint of; 0: none."""
        steps = [checkpoint_steps(self.directory / "checkpoints" / name) for name in ("policy", "critic")]
        return max(set(steps[0]) & set(steps[1]), default=0)

    def checkpoint(self, component: str, step: int) -> Path:
        return self.directory / "checkpoints" / component / f"step_{step:06d}"

    def processes(self) -> dict[str, list[NodeProcess]]:
        found: dict[str, list[NodeProcess]] = {kind: [] for kind in KINDS}
        for process in self.cluster.processes():
            if (kind := _kind(process)) is not None:
                found[kind].append(process)
        return found


def _kind(process: NodeProcess) -> str | None:
    command = " ".join(process.command)
    if process.program in ("srun", "tritonserver"):
        return process.program
    if "triton_python_backend_stub" in process.program:
        return "stub"
    if "-m aligner.cluster.slurm" in command:
        return "conductor"
    programs = {"aligner.cli train": "actor", "aligner.cli serve critic": "critic", "aligner.cli serve reward": "reward"}
    return next((kind for program, kind in programs.items() if program in command), None)


def _paced_reward(pace: Path) -> str:
    """The setting of a reward function that sleeps as long as the file says."""
    file = pace.with_name("paced.py")
    file.write_text(
        "import time\n\ndef reward(target):\n    def score(prompts, responses, answers):\n"
        f"        time.sleep(float(open({str(pace)!r}).read()))\n"
        "        return [response.count(target[0]) / 8 for response in responses]\n    return score\n"
    )
    return f"reward.function.path={file}:reward"


def run_settings(folder: Path, num_steps: int) -> list[str]:
    """Cosine decay of both models, adaptive KL, two updates a step, 24 of 64 prompts a step; any number of restarts."""
    return [
        *ppo_settings(folder),
        *("algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "critic.mini_batch_size=12"),
        *("algorithm.kl_coef=0.01", "algorithm.kl_target=0.02", "algorithm.kl_horizon=100"),
        *("optimizer.decay=cosine", "critic.optimizer.decay=cosine"),
        *(f"loop.max_steps={num_steps}", "loop.save_every=2", "checkpoint.keep=3"),
        *("slurm.max_restarts_without_progress=100", "slurm.max_server_restarts=100", "slurm.restart_delay_seconds=0.2"),
    ]
