"""Real servers in processes of their own, as one rank and as two over gloo, and what happens when they die; behind either transport."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_server import RUN, TRANSPORTS, ToyServer, toy_server
from training_jobs import ROOT, eventually

from aligner.errors import RequestRejected, ServerUnreachable
from aligner.servers import wire
from aligner.servers.access import Access
from aligner.servers.client import CriticClient, RewardClient
from aligner.servers.config import ClientConfig
from aligner.servers.frontend import MARKER
from aligner.servers.link import RequestRefused, ServiceLink
from aligner.servers.processes import processes_with_variable
from aligner.types import FinishReason, Prompt, Rollout, TokenBatch, ValueBatch

CONFIG = ClientConfig(
    discovery_timeout_seconds=60, recovery_timeout_seconds=2, request_timeout_seconds=60, train_timeout_seconds=60, rows_per_request=2
)


def token_batch(*rows: list[int]) -> TokenBatch:
    return TokenBatch(tokens=torch.tensor(rows), lengths=torch.tensor([len(row) for row in rows]))


def run_access(tmp_path: Path) -> Access:
    return Access.for_client(tmp_path / "secret", CONFIG)


@pytest.fixture
def critic_client(tmp_path: Path) -> Iterator[CriticClient]:
    client = CriticClient(tmp_path / "services", config=CONFIG, access=run_access(tmp_path), run=RUN, journal=tmp_path / "journal")
    yield client
    client.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def processes_of(server: ToyServer, incarnation: str) -> dict[int, str]:
    return processes_with_variable(f"{MARKER}={incarnation}")


def refuse_the_past(tmp_path: Path, mark: str) -> None:
    """Every rank refuses alike what is meant for another critic than the one of now, and none ends of it."""
    link = ServiceLink(tmp_path / "services", "critic", CONFIG, access=run_access(tmp_path))
    server = link.find(10)
    for after, allowed in (("start", False), (mark, True)):
        inputs = wire.encode_values_request(wire.ValuesRequest(batch=token_batch([1]), after=after))
        if allowed:
            assert link.call(server, wire.CRITIC_INFER, inputs, 60)["values"].tolist() == [[4]]
            continue
        with pytest.raises(RequestRefused, match=r"refused \(ahead\): this critic is ahead: trained last on step 7 part 0") as refused:
            link.call(server, wire.CRITIC_INFER, inputs, 60)
        assert refused.value.reason == "ahead"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_infer_train_and_save_until_a_signal(transport: str, num_ranks: int, tmp_path: Path, critic_client: CriticClient) -> None:
    sees = {"CUDA_VISIBLE_DEVICES": "0,1"}
    with toy_server("critic", tmp_path / "services", num_ranks=num_ranks, transport=transport, environment=sees) as server:
        registration = critic_client.wait_until_ready()
        assert registration.num_ranks == num_ranks and registration.pid == server.ranks[0].pid

        for pid in processes_of(server, registration.incarnation):  # Triton's are shown no GPU
            assert b"CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

        # Three rows go as pieces of two and one; the toy's weight is 2, and padding (row 2, position 2) must come back as 0.
        rows = TokenBatch(tokens=torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), lengths=torch.tensor([3, 3, 2]))
        assert critic_client.values(rows).result().tolist() == [[2, 4, 6], [8, 10, 12], [14, 16, 0]]

        # Mini-batches of 2 rows: rows 0 and 1 at weight 2, row 2 at weight 3. Squared errors to a return of 1 at the masked tokens:
        # (2*2-1)^2 + (2*5-1)^2 = 9 + 81, then (3*8-1)^2 = 529; their mean over 3 tokens is 619/3.
        mask = torch.tensor([[False, True, False], [False, True, False], [False, True, False]])
        batch = ValueBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=mask, old_values=torch.zeros(3, 3), returns=torch.ones(3, 3))
        metrics = critic_client.train(batch, step=7)
        path = critic_client.save(7)
        assert metrics.result() == pytest.approx({"value/loss": 619 / 3, "optim/steps": 2})
        assert path.result() == str(tmp_path / "services" / "step-7")
        assert critic_client.values(token_batch([1])).result().tolist() == [[4]]  # two steps, each added 1 to the weight
        refuse_the_past(tmp_path, critic_client.mark)

        with pytest.raises(RequestRejected, match=r"critic_infer: tokens: ids from 1 to 100; allowed are 0 to 99"):
            critic_client.values(token_batch([1, 100])).result()
        with pytest.raises(RequestRejected, match=r"critic_train: mask: 0 everywhere"):
            empty = torch.zeros(3, 3, dtype=torch.bool)
            critic_client.train(
                ValueBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=empty, old_values=batch.old_values, returns=batch.returns), 8
            ).result()
        assert critic_client.values(token_batch([1])).result().tolist() == [[4]]  # and the server goes on

        if num_ranks == 1:
            os.killpg(registration.pid, signal.SIGINT)  # as Ctrl-C does: Triton gets it too
        else:
            server.ranks[1].send_signal(signal.SIGTERM)  # any rank will do
        assert server.exit_codes() == [0] * num_ranks
    assert processes_of(server, registration.incarnation) == {}
    assert not (tmp_path / "services" / "critic.json").exists()
    assert f"is ready, {num_ranks} rank(s), transport {transport}\n" in server.log()
    if transport == "http":
        assert not (tmp_path / "services" / "critic.triton.log").exists()
    elif num_ranks == 2:  # in the other case Triton ended by itself
        said = server.log().partition("transport pytriton\n")[2]
        assert not [line for line in said.splitlines() if re.search("exited with failure|resource_tracker|Signal|NODELAY", line)]
        assert (tmp_path / "services" / "critic.triton.log").read_text().count("successfully unloaded") == 4  # that is why
    if transport == "pytriton":
        assert "Pinned memory pool disabled" in (tmp_path / "services" / "critic.triton.log").read_text()
    with pytest.raises(
        ServerUnreachable, match=rf"critic at {registration.url} \(pid {registration.pid} .*(has not answered since|was lost)"
    ):
        critic_client.values(token_batch([1])).result()


@pytest.mark.parametrize(
    ("transport", "token"),
    [pytest.param("pytriton", 66, marks=pytest.mark.pytriton), ("http", 77)],
    ids=["the second rank fails alone", "the first rank hangs in a collective"],
)
def test_a_failing_handler_reaches_the_client_and_ends_every_rank(transport: str, token: int, tmp_path: Path, critic_client) -> None:
    with toy_server("values", tmp_path / "services", num_ranks=2, transport=transport) as server:
        incarnation = critic_client.wait_until_ready().incarnation
        expected = rf"operation critic_infer failed on rank 1: ArithmeticError: token {token} cannot be valued"
        with pytest.raises(ServerUnreachable, match=rf"{expected}.*Waited for another server \(2 s, .* none has taken its place"):
            critic_client.values(token_batch([1, token])).result()
        assert all(code != 0 for code in server.exit_codes())
    assert eventually(lambda: processes_of(server, incarnation) == {}, 60)


def test_killing_the_server_fails_the_pending_call_and_leaves_nothing(transport: str, tmp_path: Path, critic_client: CriticClient) -> None:
    with toy_server("values", tmp_path / "services", transport=transport) as server:
        registration = critic_client.wait_until_ready()
        triton = processes_of(server, registration.incarnation)
        copies = [Path(word).parents[1] for command in triton.values() for word in command.split() if word.endswith("/1/model.py")]
        stubs = 2 if transport == "pytriton" else 0
        assert [copy.exists() for copy in copies] == [True] * stubs
        assert len([command for command in triton.values() if "triton_python_backend_stub" in command]) == stubs
        assert transport == "pytriton" or not triton
        pending = critic_client.values(token_batch([1, 88]))  # sleeps for a minute
        with pytest.raises(TimeoutError):
            pending.result(timeout=1)
        os.kill(registration.pid, signal.SIGKILL)
        with pytest.raises(ServerUnreachable, match=rf"pid {registration.pid} .*its process {registration.pid} no longer exists"):
            pending.result(timeout=60)
        assert server.exit_codes() == [-signal.SIGKILL]
    assert eventually(lambda: processes_of(server, registration.incarnation) == {}, 60)
    assert eventually(lambda: not any(copy.exists() for copy in copies), 60)
    assert eventually(lambda: not list(Path("/dev/shm").glob(f"pytrtion{registration.pid}-*")), 60)


@pytest.mark.pytriton
def test_the_death_of_tritonserver_ends_the_server(tmp_path: Path) -> None:
    with toy_server("reward", tmp_path / "services") as server:
        client = RewardClient(tmp_path / "services", config=CONFIG, access=run_access(tmp_path))
        incarnation = client.wait_until_ready().incarnation
        client.close()
        check_death_of(server, incarnation, "tritonserver --id")


def check_death_of(server: ToyServer, incarnation: str, victim: str) -> None:
    """Kill one of Triton's processes: the server says so, exits with 1 and leaves nothing."""
    pid = next(pid for pid, command in processes_of(server, incarnation).items() if victim in command)
    os.kill(pid, signal.SIGKILL)
    assert server.exit_codes() == [1]
    assert f"process {pid} of Triton died" in server.log()
    assert processes_of(server, incarnation) == {}


# Triton starts its stubs with the first `bash` of PATH. Each file of deaths is one.
DEADLY_BASH = """#!/bin/sh
for death in "$DEATHS"/death-*; do
  if [ -e "$death" ]; then rm "$death"; kill -9 {victim}; exit; fi
done
exec /bin/bash "$@"
"""
VICTIMS = {"stub": "$$", "tritonserver": "$PPID"}


def deaths_while_triton_starts(folder: Path, victim: str, number: int) -> dict[str, str]:
    """The environment in which `number` times a process of Triton dies while it starts."""
    folder.mkdir()
    (folder / "bash").write_text(DEADLY_BASH.format(victim=VICTIMS[victim]))
    (folder / "bash").chmod(0o700)
    for index in range(number):
        (folder / f"death-{index}").touch()
    return {"DEATHS": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.pytriton
@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_while_triton_starts_is_mended_once(tmp_path: Path, victim: str, deaths: int) -> None:
    """Its Python backend aborts now and then while it loads models; a second death ends the server."""
    environment = deaths_while_triton_starts(tmp_path / "bin", victim, deaths)
    client = RewardClient(tmp_path / "services", config=CONFIG, access=run_access(tmp_path), texts=rollout_texts)
    with toy_server("reward", tmp_path / "services", environment=environment) as server, contextlib.closing(client):
        if deaths == 1:
            assert client.score([rollout("AB", "A")]).result().rewards.tolist() == pytest.approx([0.2])
            assert server.log().count("died while starting") == server.log().count("starting it once more") == 1
            return
        assert server.exit_codes() == [1]
        assert server.log().count("starting it once more") == 1
        assert "died while starting; see" in server.log().splitlines()[-1]
        assert "exited with failure" not in server.log()  # PyTriton's own words come at any time, also behind the reason
        assert not (tmp_path / "services" / "reward.json").exists()
    assert not [command for command in processes_with_variable(f"DEATHS={tmp_path / 'bin'}").values() if "triton" in command]


@pytest.mark.pytriton
def test_a_signal_while_triton_starts_ends_the_server(tmp_path: Path) -> None:
    with toy_server("reward", tmp_path / "services") as server:
        assert eventually(lambda: (tmp_path / "services" / "reward.triton.log").exists(), 60)
        server.ranks[0].terminate()
        assert server.exit_codes() == [1]
        assert "a signal ended it while it was starting" in server.log()
        assert not (tmp_path / "services" / "reward.json").exists()
    assert not [command for command in processes_with_variable(f"PYTHONPATH={ROOT}").values() if str(server.services_dir) in command]


def test_killing_a_follower_ends_the_leader(tmp_path: Path, critic_client: CriticClient) -> None:
    with toy_server("values", tmp_path / "services", num_ranks=2, transport="http") as server:
        critic_client.wait_until_ready()
        server.ranks[1].kill()
        assert server.exit_codes() == [1, -signal.SIGKILL]
        assert "critic: " in server.log()


def rollout(response: str, answer: str | None) -> Rollout:
    """The toy's tokens are character codes."""
    prompt = Prompt(id=0, tokens=(1, 2), source="test:1", text="?", answer=answer)
    tokens = tuple(map(ord, response))
    return Rollout(prompt=prompt, response=tokens, logprobs=(0.0,) * len(tokens), finish_reason=FinishReason.stop, policy_version=0, seed=0)


def rollout_texts(rollout: Rollout) -> tuple[str, str, str | None]:
    return rollout.prompt.text, "".join(map(chr, rollout.response)), rollout.prompt.answer


def test_a_reward_function_a_taken_port_and_a_dead_stub(transport: str, tmp_path: Path) -> None:
    with toy_server("reward", tmp_path / "services", transport=transport) as server:
        client = RewardClient(tmp_path / "services", config=CONFIG, access=run_access(tmp_path), texts=rollout_texts)
        registration = client.wait_until_ready()
        # The answer itself is worth 1, anything else 0.1 a letter; no answer (None) is not the empty answer.
        rewards = client.score([rollout("AB", "AB"), rollout("ABC", "AB"), rollout("A", None)]).result().rewards
        assert rewards.dtype == torch.float32
        assert rewards.tolist() == pytest.approx([1.0, 0.3, 0.1])
        with pytest.raises(RequestRejected, match="reward_model: tokens: ids from 0 to 122; allowed are 0 to 99"):
            client.score([rollout("A", None), rollout("zz", None)]).result()
        client.close()

        without_texts = RewardClient(tmp_path / "services", config=CONFIG, access=run_access(tmp_path))
        with pytest.raises(RequestRejected, match="reward_model: responses: missing; this reward function scores texts"):
            without_texts.score([rollout("A", None)]).result()
        without_texts.close()

        port = registration.port
        with (
            toy_server("reward", tmp_path / "other" / "services", port=port, num_ranks=2, transport=transport) as second,
            toy_server("reward", tmp_path / "services", transport=transport) as third,
        ):
            assert second.exit_codes() == [1, 1]
            assert f"reward: rank 0: cannot listen on 127.0.0.1:{port}" in second.log(1)
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use; free port {port}" in second.log()
            assert third.exit_codes() == [1]
            assert "already serves under that name" in third.log()
        if transport == "pytriton":
            check_death_of(server, registration.incarnation, "triton_python_backend_stub")
