"""Episodes of several turns: a scripted engine for who gets what and when, continuous batching over a fake decoder for what they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import pytest
import torch
from fake_decoder import CONTEXT, EOS, RunEngine, draws_alone, generation_of
from fake_environment import repeats
from rollout_parts import sampled

from aligner.data.collate import rollout_batch
from aligner.environments.config import OnEnvironmentError
from aligner.environments.environment import Observation, Turn
from aligner.environments.exchange import Converting, EnvironmentFollowUp, EpisodeError
from aligner.protocols import Replica
from aligner.rollout.builtin.sampling import LENGTH
from aligner.rollout.engine import GenRequest, GenResult, Work
from aligner.rollout.engine.episodes import Conversing, turn_seed
from aligner.types import FinishReason, LogprobKind, Prompt, Rollout, SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")


def engine_of(run, environment, *, in_step: bool = False, sampling: SamplingConfig | None = None, **settings):
    """`run(work, sampling, version)` with an environment; a token's text is its number, an observation's tokens are its text's numbers."""
    from aligner.rollout.engine.lifecycle import PhasedEngine
    from aligner.rollout.engine.work import WorkSharing

    converting = Converting(
        decode=lambda tokens: " ".join(map(str, tokens)),
        observe=lambda text, last: tuple(int(word) for word in text.split()),
        token_ids=frozenset(range(50)),
    )
    options = {"max_turns": 4, "timeout_seconds": 20.0, "name": "mine.py:Env"} | settings
    conversing = Conversing(follow_up=EnvironmentFollowUp(environment, converting, **options), in_step=in_step)
    sharing = WorkSharing(Replica(), None)
    return PhasedEngine(RunEngine(run, CONTEXT), sampling or SamplingConfig(), sharing, offload=False, conversing=conversing)


def scripted(turns: dict[int, list[tuple[int, ...]]], seats: int = 2):
    """An engine that answers request i with the turns of its script; one that does not end with EOS was cut. `asked` are the requests."""
    asked: list[GenRequest] = []

    def run(work: Work, sampling: SamplingConfig, version: int) -> Iterator[list[GenResult]]:
        running: list[GenRequest] = []
        more = True
        while more or running:
            if more and (room := seats - len(running)):
                taken = work.take(room)
                more = bool(taken) or work.is_open
                running += taken
                asked.extend(taken)
            if running:
                request = running.pop(0)
                tokens = turns[request.index].pop(0)
                reason = FinishReason.stop if tokens[-1] == EOS else FinishReason.length
                logprobs = tuple(-0.25 * token for token in tokens)
                yield [
                    GenResult(
                        index=request.index,
                        tokens=tokens,
                        logprobs=logprobs,
                        kind=LogprobKind.sampled,
                        finish_reason=reason,
                        weight_version=version,
                    )
                ]

    return run, asked


def collect(engine, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int] | None = None) -> dict[int, Rollout]:
    """Episodes by the position of their prompt."""
    wanted = [Prompt(id=i, tokens=tuple(tokens), source=f"data.jsonl:{i + 1}") for i, tokens in enumerate(prompts)]
    episodes = [one for part in engine.generate(wanted, seeds or [100 + i for i in range(len(wanted))]) for one in part]
    assert len(episodes) == len(wanted)
    return {one.prompt.id: one for one in episodes}


class Echo:
    """Says 5 and the first token of the turn, until a turn begins with 9; a reward of 1 for each turn, 10 for the last. Counts `fives`."""

    def reset(self, prompt: Prompt) -> list[Turn]:
        return []

    def step(self, state: list[Turn], turn: Turn) -> Observation:
        state.append(turn)
        assert [each.number for each in state] == list(range(1, len(state) + 1))
        if turn.text.startswith("9"):
            return Observation(done=True, reward=10.0)
        return Observation(text=f"5 {turn.tokens[0]}", reward=1.0, counts={"fives": 1.0})


def test_an_episode_by_hand() -> None:
    run, asked = scripted({0: [(7, EOS), (8, 4, EOS), (9, EOS)], 1: [(9, EOS)]})
    episodes = collect(engine_of(run, Echo()), [(3, 3), (6,)])
    one = episodes[0]
    #               turn 1   observed  turn 2      observed  turn 3
    assert one.response == (7, EOS, 5, 7, 8, 4, EOS, 5, 8, 9, EOS)
    assert one.written == (True, True, False, False, True, True, True, False, False, True, True)
    assert one.logprobs == (-1.75, -0.5, 0, 0, -2.0, -1.0, -0.5, 0, 0, -2.25, -0.5)
    assert (one.num_turns, one.reward, one.counts, one.finish_reason) == (3, 12.0, {"fives": 2.0}, FinishReason.stop)
    assert (one.seed, one.policy_version, one.oldest_version, one.failed, one.num_written) == (100, 0, None, False, 7)
    assert (episodes[1].num_turns, episodes[1].reward, episodes[1].counts, episodes[1].written) == (1, 10.0, {}, (True, True))
    requests = [request for request in asked if request.index == 0]
    assert [request.tokens for request in requests] == [(3, 3), (3, 3, 7, EOS, 5, 7), (3, 3, *one.response[:9])]
    assert [request.limit for request in requests] == [None, min(256, CONTEXT - 2) - 4, min(256, CONTEXT - 2) - 9]
    assert [request.seed for request in requests] == [100, turn_seed(100, 2), turn_seed(100, 3)]
    assert len({turn_seed(seed, number) for seed in range(50) for number in range(1, 5)}) == 200
    # Prompt, observations and padding are out of the loss, whatever the batch.
    batch = rollout_batch([one, episodes[1]], pad_id=0)
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1], [0, 1, 1, *[0] * 10]]
    assert batch.rollout_logprobs[0, 6] == -2.0 and float(batch.rollout_logprobs[~batch.loss_mask].abs().sum()) == 0


def test_limits() -> None:
    """Eight tokens in all: a turn, an observation of two and the next turn; three turns at most."""
    turns = {
        0: [(7, EOS), (7, 7, 7, 7)],  # cut at the length: 2 + 2 + 4
        1: [(7, 7, 7, 7, 7, EOS)],  # the observation of 2 leaves no room
        2: [(7, EOS), (9, 7, 7, 7)],  # done, but cut
        3: [(7, 7, 7, 7, 7, 7, 7, EOS)],  # no room before the observation
    }
    seen: list[Turn] = []

    class Watched(Echo):
        def step(self, state: list[Turn], turn: Turn) -> Observation:
            seen.append(turn)
            return super().step(state, turn)

    run, asked = scripted({index: list(each) for index, each in turns.items()}, seats=1)
    sampling = SamplingConfig(max_response_length=8)
    episodes = collect(engine_of(run, Watched(), sampling=sampling, in_step=True), [(3,)] * 4)
    assert [(episodes[i].response[-1], len(episodes[i].response), episodes[i].reward) for i in range(4)] == [
        *((7, 8, 2.0), (EOS, 6, 1.0), (7, 8, 11.0), (EOS, 8, 1.0))
    ]
    assert {one.finish_reason for one in episodes.values()} == {FinishReason.length}
    assert [request.limit for request in asked if len(request.tokens) > 1] == [4, 4]
    # Turns of episodes 0 (twice), 1, 2 (twice), 3.
    assert sorted((turn.tokens, turn.is_cut, turn.is_last) for turn in seen) == sorted(
        [
            ((7, EOS), False, False),
            ((7, 7, 7, 7), True, True),
            ((7, 7, 7, 7, 7, EOS), False, False),
            ((7, EOS), False, False),
            ((9, 7, 7, 7), True, True),
            ((7, 7, 7, 7, 7, 7, 7, EOS), False, True),
        ]
    )
    run, _ = scripted({0: [(7, EOS)] * 9})
    one = collect(engine_of(run, Echo(), max_turns=3), [(3,)])[0]
    assert (one.num_turns, one.finish_reason, one.response[-1], one.reward) == (3, FinishReason.length, EOS, 3.0)
    # The context ends before the allowed length.
    run, asked = scripted({0: [(7, EOS), (7, EOS)]})
    one = collect(engine_of(run, Echo()), [(3,) * 58])[0]
    assert (len(one.response), one.finish_reason, asked[1].limit) == (6, FinishReason.length, 2)


def test_a_slow_step_holds_nobody_up() -> None:
    """Episode 0's first step lasts until all other episodes have ended, which takes them three turns each on two seats."""
    release, others = threading.Event(), []

    class Slow(Echo):
        def step(self, state: list[Turn], turn: Turn) -> Observation:
            if turn.tokens[0] == 1:
                assert release.wait(20)
            if turn.tokens[0] == 9:
                others.append(turn)
                if len(others) == 4:
                    release.set()
            return super().step(state, turn)

    run, asked = scripted({0: [(1, EOS), (9, EOS)], **{i: [(7, EOS), (8, EOS), (9, EOS)] for i in range(1, 5)}})
    episodes = collect(engine_of(run, Slow()), [(3,)] * 5)
    assert [request.index for request in asked][-1] == 0 and len(asked) == 2 + 4 * 3
    assert [episodes[i].num_turns for i in range(5)] == [2, 3, 3, 3, 3]


class Failing(Echo):
    """Fails in the second turn of episodes whose prompt begins with 4, as `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, prompt: Prompt) -> list:
        if self.how == "reset" and prompt.tokens[0] == 4:
            raise KeyError("no such room")
        return [prompt.tokens[0]]

    def step(self, state: list, turn: Turn):
        if state[0] == 4 and turn.number == 2:
            if self.how == "raises":
                raise OSError("connection refused")
            if self.how == "hangs":
                threading.Event().wait(3)
            if self.how == "returns":
                return "well done"
            if self.how == "exits":
                raise SystemExit(3)
            if self.how == "not a number":
                return Observation(reward=float("nan"))
            if self.how == "no tokens":
                return Observation(tokens=(5, 99, 98))
        done = turn.number == 3
        return Observation(text="" if done else "5", done=done, reward=1.0)


WRONG = {
    "raises": "raised OSError: connection refused",
    "hangs": r"returned nothing within environment.timeout_seconds=0.3: it was at .*threading.py:\d+ \(wait\)",
    "returns": "returned a str from step, expected an Observation",
    "exits": r"raised SystemExit: it ended the program \(sys.exit\(3\) at .*\)",
    "not a number": "raised ValueError: Observation.reward is nan",
    "no tokens": r"returned ids from step that are not tokens: \[99, 98\], expected the tokenizer's, from 0 to 49",
    "reset": "raised KeyError: 'no such room'",
}


@pytest.mark.parametrize("how", WRONG)
def test_what_goes_wrong_names_the_episode_or_leaves_it_out(how: str, capsys) -> None:
    turns = [(7, EOS), (8, EOS), (9, EOS)]
    timeout = {"timeout_seconds": 0.3} if how == "hangs" else {}
    run, _ = scripted({0: list(turns), 1: list(turns)})
    number, text = (1, "7 2") if how == "reset" else (2, "8 2")
    message = f"mine.py:Env {WRONG[how]}.*; it was in turn {number} of an episode of prompt data.jsonl:2, where the policy wrote '{text}'"
    engine = engine_of(run, Failing(how), **timeout)
    with pytest.raises(EpisodeError, match=message):
        collect(engine, [(3,), (4,)])
    run, _ = scripted({0: list(turns), 1: list(turns), 2: list(turns)})
    engine = engine_of(run, Failing(how), on_error=OnEnvironmentError.invalid, num_workers=1, **timeout)
    episodes = collect(engine, [(3,), (4,), (5,)])
    assert [(episodes[i].failed, episodes[i].reward, episodes[i].num_turns) for i in range(3)] == [
        *((False, 3.0, 3), (True, float(number == 2), number), (False, 3.0, 3))
    ]
    assert "left out" in capsys.readouterr().out


def test_an_asynchronous_environment() -> None:
    """All coroutines of a run share one event loop; as many wait at once as there are workers."""
    import asyncio

    loops, waiting = set(), []

    class Asynchronous(Echo):
        async def reset(self, prompt: Prompt) -> list[Turn]:
            loops.add(asyncio.get_running_loop())
            return []

        async def step(self, state: list[Turn], turn: Turn) -> Observation:
            waiting.append(turn)
            while turn.number == 1 and len(waiting) < 4:
                await asyncio.sleep(0.001)
            return super().step(state, turn)

    engine = engine_of(scripted({i: [(7, EOS), (9, EOS)] for i in range(4)}, seats=4)[0], Asynchronous(), num_workers=4)
    assert [one.num_turns for one in collect(engine, [(3,)] * 4).values()] == [2] * 4

    class Stuck(Echo):
        async def step(self, state: list[Turn], turn: Turn) -> Observation:
            await asyncio.sleep(3)
            return Observation()

    engine = engine_of(scripted({0: [(7, EOS)]})[0], Stuck(), timeout_seconds=0.2)
    with pytest.raises(EpisodeError, match="it was awaiting what it returned; it was in turn 1"):
        collect(engine, [(3,)])
    assert len(loops) == 1

    class Leaving(Echo):
        async def step(self, state: list[Turn], turn: Turn) -> Observation:
            raise SystemExit(0)

    engine = engine_of(scripted({0: [(7, EOS)]})[0], Leaving(), timeout_seconds=5.0)
    with pytest.raises(EpisodeError, match=r"raised RuntimeError: the coroutine ended with SystemExit\(0\).*; it was in turn 1"):
        collect(engine, [(3,)])


class Quiz:
    """Deterministic: as many tokens as the turn had, up to four, none of which ends a turn; done when the turn had one token only."""

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, state: None, turn: Turn) -> Observation:
        words = [str(3 + token % 9) for token in turn.tokens[:4]]
        return Observation(text=" ".join(words), done=len(turn.tokens) == 1 and turn.number > 1, reward=float(sum(turn.tokens)))


def alone(prompt: tuple[int, ...], seed: int, sampling: SamplingConfig, max_turns: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(response, log-probs) of an episode by the plainest loop there is."""
    response, logprobs = [], []
    for number in range(1, max_turns + 1):
        limit = min(sampling.max_response_length, CONTEXT - len(prompt)) - len(response)
        draws = draws_alone([*prompt, *response], turn_seed(seed, number), sampling, limit)
        turn = [int(draw.tokens) for draw in draws]
        logprobs += [float(draw.logprobs) for draw in draws]
        response += turn
        observed = Quiz().step(None, Turn(text="", tokens=tuple(turn), number=number))
        words = [int(word) for word in observed.text.split()]
        if (
            observed.done
            or number == max_turns
            or int(draws[-1].ended) == LENGTH
            or len(response) + len(words) >= sampling.max_response_length
        ):
            break
        response += words
        logprobs += [0.0] * len(words)
    return tuple(response), tuple(logprobs)


@pytest.mark.cpu  # where the decoder's stand-in is
def test_two_replicas_share_the_first_turns() -> None:
    """They take new episodes from one queue; the next turns of an episode stay where it began."""
    from torch.distributed import HashStore

    from aligner.rollout.engine.lifecycle import PhasedEngine
    from aligner.rollout.engine.work import WorkSharing

    sampling, store, engines = SamplingConfig(max_response_length=30, stop_token_ids=[3]), HashStore(), []
    for index in range(2):
        replica = Replica(index=index, count=2)
        generation = generation_of(max_batch_size=3)
        alike = engine_of(generation.run, Quiz())
        engines.append(
            PhasedEngine(
                RunEngine(generation.run, CONTEXT),
                sampling,
                WorkSharing(replica, None, store=store),
                offload=False,
                conversing=alike.conversing,
            )
        )
    prompts = [(4 + i % 5,) * (1 + i // 4) for i in range(24)]
    wanted = [Prompt(id=i, tokens=tokens, source=f"p:{i}") for i, tokens in enumerate(prompts)]
    iterators = [engine.generate(wanted, range(24)) for engine in engines]
    found: list[list[Rollout]] = [[], []]
    for parts in zip_longest(*iterators, fillvalue=[]):  # by turns
        for own, part in zip(found, parts, strict=True):
            own += part
    episodes = {one.prompt.id: one for part in found for one in part}
    assert sorted(one.prompt.id for part in found for one in part) == list(range(24)) and all(found)
    assert all((one.response, one.logprobs) == alone(prompts[i], i, sampling, 4) for i, one in episodes.items())


@pytest.mark.cpu
@pytest.mark.parametrize("in_step", [False, True])
def test_an_episode_depends_on_prompt_and_seed_alone(in_step: bool) -> None:
    """Any number of seats, a cache so small that responses lose their seats, and results that come a step late."""
    sampling = SamplingConfig(max_response_length=30, stop_token_ids=[3])
    prompts = [(4 + i % 5,) * (1 + 3 * (i // 4)) for i in range(16)]
    wanted = {i: alone(prompt, 100 + i, sampling, 4) for i, prompt in enumerate(prompts)}
    preemptions, turns, computed = 0, 0, []
    for settings in ({"max_batch_size": 1}, {"max_batch_size": 16, "steps_ahead": 1}, {"max_batch_size": 5, "kv_cache_tokens": 56}):
        generation = generation_of(**settings)
        episodes = collect(engine_of(generation.run, Quiz(), in_step=in_step, sampling=sampling), prompts)
        assert {i: (one.response, one.logprobs) for i, one in episodes.items()} == wanted
        preemptions += generation.counters.preemptions
        computed.append(generation.counters.prefilled_tokens)
        turns = sum(one.num_turns for one in episodes.values())
    assert preemptions > 0 and turns > 2 * len(prompts)
    # Where the cache has room, of a turn that follows another all but the last page and the observation is in the cache.
    news = sum(len(one.prompt.tokens) + len(one.response) - one.num_written + (4 + 1) * (one.num_turns - 1) for one in episodes.values())
    assert computed[1] <= news < sum(len(one.tokens) for one in episodes.values())


SHARED = {"packing": True, "share_prompts": True, "micro_batch_tokens": 256}


@pytest.mark.parametrize("config", [{}, {"batch_invariant": True}, SHARED], ids=["padded", "to the bit", "shared"])
def test_the_trainers_logprobs_of_what_was_written_are_the_engines(config: dict, hf_directory, load_policy) -> None:
    """With a model, for groups of three with one prompt, whose prompts training may share; and whatever the number of seats."""
    from aligner.rollout.config import RolloutConfig, ShareWork
    from aligner.rollout.create import create_engine

    policy = load_policy(hf_directory("llama"), config=config, training=config if config is SHARED else {})
    sampling = SamplingConfig(max_response_length=40, stop_token_ids=list(range(20, 32)))
    prompts = [Prompt(id=i, tokens=(3 + i // 3, 7, 9) * (1 + i // 3), source=f"p:{i}") for i in range(6)]
    found = []
    for seats, share in ((6, ShareWork.never), (2, ShareWork.always)):
        rollout = RolloutConfig(sampling=sampling, max_batch_size=seats, share_work=share)
        engine = create_engine(policy, rollout, eos_id=EOS, follow_up=repeats())
        found.append(sampled(engine, prompts))
    assert [one.response for one in found[0]] == [one.response for one in found[1]]
    assert max(one.num_turns for one in found[0]) == 3 and all(one.counts["heard"] >= 3 for one in found[0])
    batch = rollout_batch(found[0], pad_id=0)
    assert not batch.loss_mask.all() and all(one.num_written < len(one.response) for one in found[0] if one.num_turns > 1)
    atol = 0.0 if config == {"batch_invariant": True} else 1e-4
    torch.testing.assert_close(policy.logprobs(batch), batch.rollout_logprobs, rtol=0, atol=atol)
