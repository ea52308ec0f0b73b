"""The agents of a job: programs that play its sessions, and the endpoint that they ask. A job without agents does not import it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from aligner.agents import Agents
from aligner.agents.command import CommandAgents
from aligner.agents.play import Playing, SessionEngine
from aligner.agents.verifiers import Verifiers
from aligner.data.tokenizer import Tokenizer
from aligner.endpoint.app import Endpoint
from aligner.endpoint.requests import Model
from aligner.endpoint.sessions import KeptSessions
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.errors import ConfigError
from aligner.online.config import OnlineRun
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.live import LiveEngine
from aligner.run.session import MIB, Session
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig

LEAST_REQUESTS, LEAST_CONNECTIONS = 256, 1024  # at an endpoint
MODEL = "policy"  # the name that agents ask for


def played(engine: PhasedEngine, session: Session, config: OnlineRun, tokenizer: Tokenizer, tokenizer_files: Path) -> SessionEngine:
    """The engine, with sessions of agents in the place of responses."""
    if not tokenizer.has_chat_template:
        session.say("warning: the model has no chat template (data.chat_template=FILE gives it one): only /v1/completions answers agents")
    playing = Playing(
        config=config.environment.sessions,
        num_workers=config.environment.num_workers,
        model=MODEL,
        tokenizer_path=str(tokenizer_files.absolute()),
        needs_reward=not config.has_scorer,
        title=config.environment.title,
        heartbeat=session.progress.heartbeat,
    )
    opened = partial(open_endpoint, session=session, config=config, tokenizer=tokenizer)
    return SessionEngine(engine, playing, partial(create_agents, config.environment), opened)


def create_agents(config: EnvironmentConfig) -> Agents:
    """The programs that play the run's sessions. Raises ConfigError."""
    if config.chosen is EnvironmentKind.verifiers:
        return Verifiers(config)
    if shutil.which(config.command[0]) is None:
        raise ConfigError(f"{config.title}: there is no program {config.command[0]!r} on this machine")
    return CommandAgents(config.command, pass_environment=config.sessions.pass_environment)


def open_endpoint(live: LiveEngine, sessions: KeptSessions, *, session: Session, config: OnlineRun, tokenizer: Tokenizer) -> Endpoint:
    """The endpoint of a job: it admits the run's secret, and the key of each session. Raises ServerError if it cannot listen."""
    own = config.environment
    server = ServerConfig(
        host=own.sessions.host,
        max_requests=max(LEAST_REQUESTS, 4 * own.num_workers),
        max_connections=max(LEAST_CONNECTIONS, 8 * own.num_workers),
        max_request_bytes=64 * MIB,
        max_pending_bytes=1024 * MIB,
    )
    settings = {"sampling": config.rollout.sampling, "seed": config.run.seed, "max_pixels": config.data.images.max_pixels}
    model = Model(name=MODEL, tokenizer=tokenizer, live=live, **settings)
    endpoint = Endpoint(model, Access.for_server(session.directory.secret, server), server, sessions=sessions)
    session.say(f"the policy answers at {endpoint.url}/v1")
    return endpoint
