"""What every component does first and last: meet the other ranks, lay them out, open the run directory, leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aligner.cluster.run_directory import RunDirectory
from aligner.config import fingerprint, to_yaml
from aligner.parallel import launch, platform, topology
from aligner.parallel.collectives import from_rank_0
from aligner.parallel.topology import ParallelConfig, Topology
from aligner.schemas import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One rank of a running component."""

    topology: Topology
    directory: RunDirectory
    config_yaml: str

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes files and talks to people."""
        return self.topology.rank == 0

    def say(self, text: str) -> None:
        """A line for the person who watches, from rank 0."""
        if self.is_first:
            print(text, flush=True)


@contextmanager
def session(config: Any, run: RunConfig, parallel: ParallelConfig, *, writes_config: bool = True) -> Iterator[Session]:
    """Join the component's ranks and make its groups; leave them at the good end.

    After an error the groups are left to the process's end: other ranks may hang in a collective, and the launcher ends them.
    """
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    world, _ = launch.detect_world(os.environ)
    if world is not None:
        parallel.check_world(world.world_size)  # before anything starts
        platform.select_device(world.local_rank)
    world = launch.initialize(
        platform.backend(),
        timeout_seconds=run.start_timeout_seconds,
        collective_timeout_seconds=run.collective_timeout_seconds,
        fingerprint=fingerprint(config),
    )
    platform.select_device(world.local_rank)
    layout = topology.initialize(parallel, seed=run.seed)
    directory = RunDirectory(Path(run.directory))
    yaml = to_yaml(config)
    from_rank_0(directory.create)
    if layout.rank == 0 and writes_config:
        directory.config.write_text(yaml)
    yield Session(topology=layout, directory=directory, config_yaml=yaml)
    launch.shutdown()
