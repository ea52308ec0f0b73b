"""What a single rank sees: of tokenizers, data, rewards, weights, ports and the run directory, good ones and bad ones."""

import json
import socket

import pytest

from aligner.commands.preflight import cluster, models, samples, sizing
from aligner.commands.preflight.framework import Level
from aligner.commands.preflight.sizing import host_bytes
from aligner.errors import CheckpointError, ConfigError, DataError, ServerError
from aligner.models.config import Float32Matmul, Layers
from aligner.planner.config import Device
from aligner.rewards.config import NamedRewardConfig

FUNCTION = "reward.function.path"


def observed(item, context):
    return item.judge(context, {0: item.observe(context)})


@pytest.fixture
def run(context_of, settings):
    """`run(item, {setting: value})`: what an item finds on one rank, or raises."""
    return lambda item, values=None, name="ppo": observed(item, context_of(settings(name, values)))


def test_a_memory_limit_of_the_scheduler_counts(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert host_bytes((str(limit),)) == 1048576
    limit.write_text("max\n")
    assert host_bytes((str(limit), str(tmp_path / "absent"))) > 1048576


def test_the_run_directory(run, tmp_path):
    found = run(cluster.filesystem)
    assert found.level is Level.ok and "1 node writes" in found.found
    assert not list((tmp_path / "run").glob(".preflight*"))
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        run(cluster.filesystem)


def test_ports(run, tmp_path):
    run(cluster.filesystem)  # makes the run directory, where the secret is
    assert run(cluster.ports).found == "critic on 127.0.0.1, a free port, reward on 127.0.0.1, a free port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"critic: cannot listen on 127.0.0.1:{port}"):
            run(cluster.ports, {"critic.server.port": port})
    with pytest.raises(ServerError, match="critic: cannot listen on 192.0.2.1"):  # an address for documentation: nobody's
        run(cluster.ports, {"critic.server.host": "192.0.2.1"})
    with pytest.raises(ConfigError, match="tls_certificate"):
        run(cluster.ports, {"critic.server.tls_certificate": str(tmp_path / "no.pem"), "critic.server.tls_key": str(tmp_path / "no.key")})


def test_a_server_on_loopback_whose_clients_are_on_other_nodes(run, monkeypatch):
    run(cluster.filesystem)
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    found = run(cluster.ports)
    assert found.level is Level.fatal and "which every node has" in found.found and "0.0.0.0" in found.advice


def test_tokenizers(run, tmp_path):
    found = run(models.tokenizer)
    assert found.level is Level.ok and "actor: 41 tokens, without chat template; critic: 41 tokens" in found.found
    with pytest.raises(ConfigError, match=r"actor \(model\): tokenizer path is"):
        run(models.tokenizer, {"model.tokenizer": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match=r"actor \(model\): .*has no chat template"):
        run(models.tokenizer, {"data.apply_chat_template": True})
    with pytest.raises(ConfigError, match="produces ids up to 40"):
        run(models.tokenizer, {"model.architecture.vocab_size": 40})


def test_a_critic_with_another_tokenizer(run, task, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in (task / "tokenizer").iterdir():
        text = file.read_text()
        (other / file.name).write_text(text.replace('"e": ', '"E": '))  # one character that it does not know
    found = run(models.tokenizer, {"critic.model.tokenizer": str(other)})
    assert found.level is Level.fatal and "the tokenizer of critic is not that of the actor" in found.found


def test_data(run, tmp_path):
    found = run(samples.data)
    assert found.level is Level.ok and "8 of 8 records used" in found.found
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1="}\n{"promt": "2+2="}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: has the fields \['promt'\]"):
        run(samples.data, {"data.train": str(bad)})
    with pytest.raises(DataError, match="1 of 2 records"):
        run(samples.data, {"data.validation": str(bad)})
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": "1" * size}) + "\n" for size in (4, 99, 99)))
    found = run(samples.data, {"data.train": str(long), "data.max_prompt_length": 16})
    assert found.level is Level.warning and "67% are left out" in found.found
    long.write_text('{"prompt": "1"}\n' * samples.NUM_RECORDS + "not JSON\n")  # only the beginning is read
    assert f"{samples.NUM_RECORDS} of {samples.NUM_RECORDS} records used" in run(samples.data, {"data.train": str(long)}).found


def test_rewards(run, tmp_path):
    found = run(samples.reward)
    assert found.level is Level.ok and "mean 1 for the answers themselves, 0 for empty ones" in found.found
    flat = tmp_path / "flat.py"
    flat.write_text("def reward(prompts, responses, answers):\n    return [0.5] * len(responses)\n")
    assert run(samples.reward, {FUNCTION: f"{flat}:reward"}).level is Level.warning
    broken = tmp_path / "broken.py"
    broken.write_text("def reward(prompts, responses, answers):\n    return [float('nan')] * len(responses)\n")
    with pytest.raises(DataError, match="returned nan for an answer to .*prompts.jsonl:1"):
        run(samples.reward, {FUNCTION: f"{broken}:reward"})
    with pytest.raises(ConfigError, match="has no 'lenght'; did you mean 'length'"):
        run(samples.reward, {FUNCTION: "aligner.rewards.builtin:lenght"})
    parts = {"one": NamedRewardConfig(path=f"{flat}:reward"), "judge": NamedRewardConfig(served=True)}
    parts["two"] = NamedRewardConfig(path="aligner.rewards.builtin:exact_match", weight=2.0)
    several = {FUNCTION: "", "reward.functions": parts}
    assert "one + 2 two: mean 2.5 for the answers themselves, 0.5 for empty ones" in run(samples.reward, several).found
    assert "sandbox" not in run(samples.reward, several).found
    said = tmp_path / "said.py"
    said.write_text("def reward(prompts, responses, answers):\n    return [1.0] * len(responses)\nreward.about = 'sandbox isolation=x'\n")
    assert run(samples.reward, {FUNCTION: f"{said}:reward"}).found.endswith("for empty ones\nsandbox isolation=x")
    parts["one"] = NamedRewardConfig(path=f"{said}:reward")
    assert run(samples.reward, several).found.endswith("for empty ones\nsandbox isolation=x")
    assert run(samples.reward, {FUNCTION: ""}).found == "no reward function: a reward model scores"
    assert run(samples.reward, name="sft").found == "this run has no rewards"


def test_models_without_weights(run):
    found = run(models.weights)
    assert found.level is Level.warning and "actor: random weights" in found.found
    with pytest.raises(CheckpointError, match="reward.model.path='': a frozen reward model needs weights"):
        run(models.weights, {FUNCTION: ""})


def test_the_vocabulary_of_a_model_without_weights_is_planned_with(settings):
    assert sizing.real_vocabularies(settings("ppo")) == ["model.architecture.vocab_size=41"]


@pytest.mark.cpu
def test_whose_layers_the_models_get(run):
    found = run(models.layers)
    assert found.level is Level.ok and found.found.startswith("layers are torch's (there is no GPU)")
    found = run(models.layers, {"cluster.device": Device.gpu})
    assert found.level is Level.warning and "install transformer-engine" in found.advice
    torchs = {f"{section}model.layers": Layers.torch for section in ("", "critic.", "reward.")}
    found = run(models.layers, {"cluster.device": Device.gpu} | torchs)
    assert found.level is Level.ok and found.found == "layers are torch's (model.layers=torch), float32 products: highest"
    faster = run(models.layers, {"model.float32_matmul": Float32Matmul.high})
    assert "layers are torch's (there is no GPU), float32 products: high" in faster.found
    with pytest.raises(ConfigError, match="model.layers=transformer_engine: there is no GPU"):
        run(models.layers, {"model.layers": Layers.transformer_engine})


def test_nodes_with_other_layers_are_named(context_of, settings):
    here = models.Chosen(described={"actor": "layers are torch's (no)"}, of_torch=["actor"])
    there = models.Chosen(described={"actor": "layers are Transformer Engine's (2.9.0)"})
    found = models.judge_layers(context_of(settings("sft", None), nodes=("n1", "n2")), {0: here, 1: there})
    assert found.level is Level.fatal and found.found == (
        "rank 1 on n2: layers are Transformer Engine's (2.9.0); and not layers are torch's (no)"
    )
