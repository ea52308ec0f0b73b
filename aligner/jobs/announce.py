"""A component's entry in the run directory's `services/`, from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aligner.errors import AlignerError, ConfigError, ServerError, describe_os_error
from aligner.jobs.session import Session
from aligner.parallel.collectives import raise_everywhere
from aligner.servers.registry import Publication, make_registration

HEARTBEAT_SECONDS = 2.0


@contextmanager
def announced(here: Session, name: str, *, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> Iterator[Publication | None]:
    """Say that this component is loading; on rank 0 the publication that will say that it is ready, None elsewhere. Every rank calls it.

    Raises, on every rank, ServerError where a component of this name and attempt is running already, ConfigError where it cannot say so.
    """
    layout = here.topology
    text = f"tp{layout.tp_size} pp{layout.pp_size} cp{layout.cp_size} dp{layout.dp_size}"
    publication: Publication | None = None
    error: AlignerError | None = None
    if here.is_first:
        try:
            registration = make_registration(name=name, role=name, num_ranks=layout.world_size, layout=text)
            publication = Publication(here.directory.services, registration, heartbeat_seconds)
        except ServerError as failed:
            error = failed
        except OSError as failed:  # the other ranks wait below
            error = ConfigError(f"run.directory={here.directory.path}: {describe_os_error(failed, here.directory.services)}")
    raise_everywhere(error)
    try:
        yield publication
    finally:
        if publication is not None:
            publication.withdraw()
