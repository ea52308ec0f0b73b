"""A reference's log-probs that are computed before the first step: what is in the files, who may go on with them, and how they train."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aligner.algorithms.dpo import DPO, DPOConfig, TrainDPO
from aligner.algorithms.kto import KTO, KTOConfig, StoredMismatches, TrainKTO, _mismatched_sets
from aligner.cluster.run_directory import RunDirectory
from aligner.commands.plan import command as plan
from aligner.data.collate import PreferencePair, SupervisedExample, supervised_batch
from aligner.data.judged import UnpairedExample
from aligner.errors import ConfigError, DataError
from aligner.jobs.stored_reference import with_reference
from aligner.loop.epochs import ReferenceLogprobs
from aligner.loop.loop import Clock
from aligner.losses.preference import DPOVariant, UnpairedLoss
from aligner.models.config import Architecture, Dtype, Family, ModelConfig
from aligner.models.create import create_policy, training
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.policy import ReferencePolicy
from aligner.parallel.topology import ParallelConfig
from aligner.planner.workload import Phase
from aligner.reporting.config import LoggingConfig, Progress
from aligner.run.session import Session
from aligner.run.settings import LoopConfig, RunConfig

VOCAB, PAD = 31, 0
TOKENIZER = SimpleNamespace(pad_id=PAD, digest="words")
SIZES = {"batch_size": 4, "validation_batch_size": 3, "reference_part_size": 3}
PRECOMPUTED = {"reference": ReferenceLogprobs.precomputed}


def row(generator: torch.Generator, prompt: int, response: int) -> SupervisedExample:
    tokens = torch.randint(1, VOCAB, (prompt + response,), generator=generator).tolist()
    return SupervisedExample(tokens=tuple(tokens), loss_mask=(False,) * prompt + (True,) * response, source="test:1")


def pairs(count: int, seed: int) -> list[PreferencePair]:
    draw = torch.Generator().manual_seed(seed)
    return [PreferencePair(chosen=row(draw, 2, 2 + i % 5), rejected=row(draw, 2, 1 + i % 3), margin=0.0) for i in range(count)]


def responses(count: int, seed: int) -> list[UnpairedExample]:
    draw = torch.Generator().manual_seed(seed)
    return [UnpairedExample(row=row(draw, 1 + i % 2, 2 + i % 4), desirable=i % 3 == 0) for i in range(count)]


def policy_of(topology, seed: int = 1):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "ffn_hidden_size": 24}
    architecture = Architecture(family=Family.llama, vocab_size=VOCAB, max_position_embeddings=32, initializer_range=0.2, **sizes)
    config = ModelConfig(dtype=Dtype.float32, make_vocab_divisible_by=1, micro_batch_size=2)
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, distributed=False)
    how = training(config, optimizer, total_steps=10)
    return create_policy(config, architecture, ParallelConfig(), replace(topology, seed=seed), how)


@pytest.fixture
def session(topology, tmp_path: Path):
    return Session(topology=topology, directory=RunDirectory(tmp_path / "run"), config_yaml="")


def config_of(kind: type, algorithm, **fields):
    logging = LoggingConfig(progress=Progress.off, tensorboard=False)
    return kind(algorithm=algorithm, logging=logging, loop=LoopConfig(max_steps=3), **fields)


def stored_pairs(session, policy, train, validation, **fields):
    config = config_of(TrainDPO, DPOConfig(**SIZES, **PRECOMPUTED), **fields)
    return with_reference(session, config, policy, TOKENIZER, {"train": train, "validation": validation})


def files(session) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(session.directory.reference.glob("*.safetensors"))}


def test_every_row_has_what_the_reference_says_of_it(session) -> None:
    """Eight pairs in files of three, the last of which ends with a validation pair; whatever length a row's neighbours have."""
    train, validation = pairs(7, 1), pairs(1, 2)
    policy = policy_of(session.topology)
    found = stored_pairs(session, policy, train, validation)
    assert [len(one) for one in found] == [7, 1] and list(files(session)) == [f"part_{i:06d}.safetensors" for i in range(3)]
    for given, one in zip([*train, *validation], [*found[0], *found[1]], strict=True):
        assert one == given  # but for the log-probs
        for mine, own in zip(given.rows, one.rows, strict=True):
            batch = supervised_batch([mine], PAD)
            torch.testing.assert_close(own.ref_logprobs, policy.logprobs(batch)[batch.loss_mask], rtol=0, atol=1e-6)
            assert torch.equal(supervised_batch([own], PAD).ref_logprobs[batch.loss_mask], own.ref_logprobs)
    assert torch.equal(found[0][-1].chosen.ref_logprobs, found[0][6].chosen.ref_logprobs)
    with pytest.raises(IndexError):
        found[1][1]
    with pytest.raises(ValueError, match="1 of 2 rows have the reference's log-probs, expected all or none"):
        supervised_batch([found[0][0].chosen, train[1].chosen], PAD)


def test_a_run_that_is_stopped_goes_on_with_the_files_that_it_has(session) -> None:
    train = pairs(8, 1)
    whole, other = policy_of(session.topology), policy_of(session.topology)
    stored_pairs(session, whole, train, [])
    expected = files(session)
    for path in session.directory.reference.iterdir():
        if path.is_file():
            path.unlink()
    compute, calls = other.logprobs, []

    def stopping(batch):
        calls.append(batch)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return compute(batch)

    other.logprobs = stopping
    assert stored_pairs(session, other, train, []) is None and 0 < len(files(session)) < 3
    assert stored_pairs(session, other, train, []) is not None and files(session) == expected
    before = len(calls)
    assert stored_pairs(session, other, train, []) is not None and len(calls) == before  # nothing is computed again


def test_files_of_something_else_are_refused(session) -> None:
    train, policy = pairs(4, 1), policy_of(session.topology)
    stored_pairs(session, policy, train, [])
    with pytest.raises(DataError, match=r"reference holds parts of another job: model differ; allowed: the same settings and files"):
        stored_pairs(session, policy, train, [], run=RunConfig(seed=2))
    with pytest.raises(DataError, match="holds parts of another job: train differ"):
        stored_pairs(session, policy, pairs(4, 2), [])
    with pytest.raises(DataError, match="holds parts of another job: validation, num_items differ"):
        stored_pairs(session, policy, train, pairs(1, 2))
    path = session.directory.reference / "part_000001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=f"{path} is not a file of a reference's log-probs: .*; remove it, and it is computed again"):
        list(stored_pairs(session, policy, train, [])[0])
    path.write_bytes((session.directory.reference / "part_000000.safetensors").read_bytes())
    with pytest.raises(DataError, match=f"{path} has log-probs .* of 6 rows, expected 2 rows"):
        list(stored_pairs(session, policy, train, [])[0])
    path.unlink()
    assert len(list(stored_pairs(session, policy, train, [])[0])) == 4


def test_dpo_trains_as_with_a_live_reference(session) -> None:
    train, validation = pairs(9, 1), pairs(4, 2)
    parts = {"pad_id": PAD, "seed": 1}
    live, policy = policy_of(session.topology), policy_of(session.topology)
    stored = stored_pairs(session, policy, train, validation)
    one = DPO(DPOConfig(**SIZES), live, ReferencePolicy(live), train=train, validation=validation, **parts)
    other = DPO(DPOConfig(**SIZES, **PRECOMPUTED), policy, None, train=stored[0], validation=stored[1], **parts)
    same_training(one, other, live, policy)


@pytest.mark.parametrize("loss", UnpairedLoss)
def test_kto_trains_as_with_a_live_reference(loss: UnpairedLoss, session) -> None:
    """The rows that its KL is estimated on are those of each step, whose examples are known beforehand."""
    train, validation = responses(9, 1), responses(4, 2)
    parts = {"pad_id": PAD, "seed": 1, "max_length": 5}
    live, policy = policy_of(session.topology), policy_of(session.topology)
    config = config_of(TrainKTO, KTOConfig(loss=loss, **SIZES, **PRECOMPUTED))
    config.data.max_length = 5
    sets = {"train": train, "validation": validation} | _mismatched_sets(config, train, validation)
    stored = with_reference(session, config, policy, TOKENIZER, sets)
    others = StoredMismatches(train=stored[2], validation=stored[3]) if loss.needs_kl else StoredMismatches()
    one = KTO(KTOConfig(loss=loss, **SIZES), live, ReferencePolicy(live), train=train, validation=validation, **parts)
    other = KTO(config.algorithm, policy, None, train=stored[0], validation=stored[1], stored=others, **parts)
    same_training(one, other, live, policy)


def same_training(one, other, live, policy) -> None:
    """Three steps and a validation after each. The two differ by rounding: a tie at the first step may go either way."""
    for step in (1, 2, 3):
        expected, found = ({**own.step(step, Clock()).metrics, **own.validate()} for own in (one, other))
        kept = [name for name in expected if not name.startswith("data/tokens") and not (step == 1 and "accuracy" in name)]
        assert {name: found[name] for name in kept} == pytest.approx({name: expected[name] for name in kept}, rel=1e-5, abs=1e-6)
    assert any(abs(value) > 1e-3 for name, value in expected.items() if "reward" in name)  # the two have parted from the reference
    for mine, own in zip(live.chunks[0].parameters(), policy.chunks[0].parameters(), strict=True):
        torch.testing.assert_close(own, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_a_plan_counts_neither_copy_nor_pass(recipe: str) -> None:
    config = plan.load(recipe, ["model=llama3_8b"])
    (live,), (stored,) = (plan.components(replace(config, algorithm=replace(config.algorithm, **one))) for one in ({}, PRECOMPUTED))
    assert live.has_reference and Phase.ref_logprobs in live.work.phases
    assert not stored.has_reference and set(live.work.phases) - set(stored.work.phases) == {Phase.ref_logprobs}


def test_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reference=precomputed: loss=simpo has no reference; allowed: live"):
        DPOConfig(loss=DPOVariant.simpo, **PRECOMPUTED)
    with pytest.raises(ConfigError, match=r"algorithm\.reference_part_size=0: must be at least 1"):
        KTOConfig(reference_part_size=0)
