"""A critic in the actor's processes, on fakes: the order of a step, what its guard says, its checkpoints, and settings that it has not."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_parts import value_metrics
from model_steps import keeper

from aligner.algorithms.ppo import PPO, PPOConfig, TrainPPO
from aligner.cluster.component import Placement
from aligner.cluster.run_directory import CRITIC, POLICY
from aligner.errors import CheckpointError, ConfigError, RunHalted
from aligner.loop.loop import Clock
from aligner.losses.value import value_loss
from aligner.models.checkpoint.files import complete_steps
from aligner.models.training.guard import SKIPPED, SKIPPED_IN_A_ROW
from aligner.models.training.optimizer import OptimizerConfig
from aligner.online.collect import ScoredRollouts
from aligner.online.critics import ModelCritic, ServedCritic, ValueTraining
from aligner.parallel.topology import ParallelConfig
from aligner.servers.components import CriticConfig, CriticKind
from aligner.servers.config import ServerConfig
from aligner.telemetry.metrics import Max, Sum
from aligner.types import Routes, ValueBatch


class LoggedModel:
    """The value of a state is its token / 10, as of the fakes' critic; it writes down where it is and what it does."""

    def __init__(self, log: list[str], skipped: int = 0) -> None:
        self.log = log
        self.model = self
        self.skipped = skipped
        self.rows: list[int] = []
        self.extras: list[list[str]] = []

    def values(self, batch) -> torch.Tensor:
        self.log.append("values")
        self.extras.append(list(batch.extras))
        return batch.tokens / 10

    def train_step(self, batch, loss):
        self.log.append("critic trains")
        self.rows.append(batch.tokens.shape[0])
        self.extras.append(list(batch.extras))
        return value_metrics(float(len(self.rows))) | {SKIPPED: Sum(total=self.skipped), SKIPPED_IN_A_ROW: Max(maximum=self.skipped)}

    def enter_device(self) -> None:
        self.log.append("critic here")

    def leave_device(self) -> None:
        self.log.append("critic away")


def model_critic(task, model, **config) -> ModelCritic:
    training = ValueTraining(loss=partial(value_loss, clip=0.2), mini_batch_size=3, num_epochs=2)
    return ModelCritic(task, model, training, tokenizer=Path("tokenizer"), **config)


def ppo(fakes, task, log, critic) -> PPO:
    config = PPOConfig(rollouts_per_step=4, mini_batch_size=2, gae_lambda=0.5, kl_coef=0.1)
    return PPO(config, fakes.FakePolicy(log), task, critic)


def test_the_order_of_a_step(fakes, make_task) -> None:
    """Values when all is sampled; the critic trains, in mini-batches of 3 and 1, before the policy does. It is away but for these."""
    log: list[str] = []
    task, model = make_task(log), LoggedModel(log)
    algorithm = ppo(fakes, task, log, model_critic(task, model, takes_turns=True))
    assert log == ["critic away"]
    algorithm.step(1, Clock())
    sampling = ["policy sleeps", "engine wakes", "generate", "engine sleeps"]
    training = ["critic here", *["critic trains"] * 4, "critic away", "update", "update", "policy sleeps", "refit 2"]
    assert log[1:] == [*sampling, "critic here", "values", "critic away", "logprobs", *training]
    assert model.rows == [3, 1, 3, 1]


def test_it_reports_and_learns_as_a_served_one(fakes, make_task) -> None:
    tasks = [make_task([]), make_task([])]
    served = ServedCritic(tasks[0], fakes.FakeCritic([]))
    runs = [ppo(fakes, tasks[0], [], served), ppo(fakes, tasks[1], [], model_critic(tasks[1], LoggedModel([])))]
    for step in (1, 2):
        found = [one.step(step, Clock()).metrics for one in runs]
        assert [metrics["policy/kl"] for metrics in found] == [0.5, 0.5]
    assert found[1]["critic/loss"] == 2.5  # of step 1: the mean over its updates
    assert found[0]["critic/explained_variance"] == found[1]["critic/explained_variance"] == 0.75
    for one, other in zip(*(run.policy.trained for run in runs), strict=True):
        assert torch.equal(one.advantages, other.advantages)


def test_its_metrics_survive_a_checkpoint_and_a_server_refuses_its_state(fakes, make_task) -> None:
    task = make_task([])
    algorithm = ppo(fakes, task, [], model_critic(task, LoggedModel([])))
    algorithm.step(1, Clock())
    state = json.loads(json.dumps(algorithm.state()))
    resumed = ppo(fakes, task, [], model_critic(task, LoggedModel([])))
    resumed.load_state(state)
    assert resumed.step(2, Clock()).metrics["critic/loss"] == 2.5
    with pytest.raises(CheckpointError, match="critic.kind=server: the actor trained the critic of this checkpoint"):
        ppo(fakes, task, [], ServedCritic(task, fakes.FakeCritic([]))).load_state(state)


def test_an_update_that_is_left_out_ends_the_step(fakes, make_task) -> None:
    log: list[str] = []
    task = make_task(log)
    algorithm = ppo(fakes, task, log, model_critic(task, LoggedModel(log, skipped=1)))
    with pytest.raises(RunHalted, match="the critic left out 4 updates of step 1"):
        algorithm.step(1, Clock())
    assert "update" not in log


def test_it_is_given_what_a_server_would_be_sent(fakes, make_task) -> None:
    """The routes are those of the policy's experts; a critic has experts of its own, or none."""
    task, model = make_task([]), LoggedModel([])
    critic = model_critic(task, model)
    routes = Routes(torch.zeros(1, 3, 2, 1, dtype=torch.uint8))
    rollout = replace(fakes.rollout(fakes.prompt(0, 5), 1, fakes.EOS), extras={Routes.name: routes.data[0, 1:]})
    collected = ScoredRollouts(rollouts=[rollout], rewards=torch.zeros(1))
    (values,) = critic.values(collected, Clock()).values
    assert values.tolist() == pytest.approx([0.5, 0.1, 0.0])
    mask = torch.tensor([[False, True, True]])
    rows = {"tokens": torch.tensor([[5, 1, 0]]), "lengths": torch.tensor([3]), "loss_mask": mask, "extras": {Routes.name: routes}}
    critic.train(ValueBatch(old_values=torch.zeros(1, 3), returns=torch.ones(1, 3), **rows), 1, Clock())
    assert model.extras == [[], [], []]


class Beside:
    """A critic of these processes, for a checkpointer."""

    def __init__(self, model, tokenizer: Path) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.visits = 0

    @contextmanager
    def present(self):
        self.visits += 1
        yield


@pytest.fixture
def pair(session, make_model):
    """(session, the policy's model, the critic beside it), both as after some steps."""
    models = [make_model(kind, optimizer=OptimizerConfig()).model for kind in ("policy", "value")]
    for model in models:
        model.optimizer.step()
    return session, models[0], Beside(models[1], session.directory.path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_are_saved_and_loaded(pair, asynchronous: bool) -> None:
    session, model, beside = pair
    model.version, beside.model.version = 4, 6
    saving = keeper(session, model, resident=beside, asynchronous=asynchronous)
    assert saving.version() == 10  # a step that has changed either of them is not whole
    head = beside.model.module.score_head.weight
    saved = head.detach().clone()
    saving.save(2, {"kl_coef": 0.5}, {})
    with torch.no_grad():
        head.fill_(3.0)
    saving.wait()
    model.version = beside.model.version = 0
    again = keeper(session, model, resident=beside)
    assert again.load() == (2, {"kl_coef": 0.5})
    assert (model.version, beside.model.version) == (4, 6) and torch.equal(head, saved)
    again.rescue(3, {})
    folders = [session.directory.checkpoints / name for name in (POLICY, CRITIC)]
    assert [list(complete_steps(folder)) for folder in folders] == [[2, 3], [2, 3]]
    assert beside.visits == 3


def test_what_was_saved_after_the_pair_belongs_to_another_past(pair) -> None:
    """Killed between the two: the critic has a step that the policy has not."""
    session, model, beside = pair
    saving = keeper(session, model, resident=beside)
    for step in (2, 4):
        saving.save(step, {}, {})
    policy, critic = (session.directory.checkpoints / name for name in (POLICY, CRITIC))
    (policy / "step_000004").rename(policy / "lost")
    assert keeper(session, model, resident=beside).load()[0] == 2
    assert list(complete_steps(critic)) == [2] and (critic / "unpaired_step_000004").exists()
    assert (critic / "latest").read_text() == (policy / "latest").read_text()


def test_a_lost_partner_is_not_made_up_for(pair) -> None:
    session, model, beside = pair
    keeper(session, model, resident=beside).save(2, {}, {})
    critic = session.directory.checkpoints / CRITIC
    (critic / "step_000002").rename(critic / "lost")
    with pytest.raises(CheckpointError, match="has step 2 and .*critic has none that fits: the two are saved together"):
        keeper(session, model, resident=beside).load()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"server": ServerConfig(port=8000)}, "critic.server.port=8000"),
        ({"server": ServerConfig(operation_limit_seconds=100.0)}, "critic.server.operation_limit_seconds=100.0"),
        ({"num_processes": 3}, "critic.num_processes=3"),
        ({"parallel": ParallelConfig(pp=2)}, "critic.parallel"),
        ({"environment": "/venv"}, "critic.environment=/venv"),
        ({"accept_gap": True}, "critic.accept_gap=True"),
        ({"with_reward": True}, "critic.with_reward=True"),
    ],
)
def test_settings_of_a_server_are_refused(settings: dict, name: str) -> None:
    critic = CriticConfig(kind=CriticKind.model, **settings)
    with pytest.raises(ConfigError) as caught:
        TrainPPO(critic=critic, num_processes=2, parallel=ParallelConfig(tp=2))
    assert str(caught.value).startswith(f"{name}: critic.kind=model has no component of its own")
    key = name.partition("=")[0]
    assert str(caught.value).endswith(f"allowed: critic.kind=server, or leave {key} out")


def test_the_actors_own_layout_may_be_written_out() -> None:
    layout = ParallelConfig(tp=2)
    config = TrainPPO(num_processes=4, parallel=layout, critic=CriticConfig(kind=CriticKind.model, num_processes=4, parallel=layout))
    assert [one.name for one in config.servers()] == []
    (resident,) = config.residents()
    assert (resident.num_ranks, resident.parallel) == (4, layout)
    served = TrainPPO(num_processes=4, parallel=layout)
    assert [one.name for one in served.servers()] == ["critic"] and served.residents() == ()


def test_on_shared_gpus_it_leaves_them() -> None:
    config = TrainPPO(critic=CriticConfig(kind=CriticKind.model))
    assert not config.critic.optimizer.offload
    reward = replace(config.reward, serve=True)
    shared = TrainPPO(critic=CriticConfig(kind=CriticKind.model), placement=Placement.colocated, reward=reward)
    assert shared.critic.optimizer.offload and [one.name for one in shared.servers()] == ["reward"]
