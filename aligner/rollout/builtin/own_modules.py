"""Samples with the very module that is trained, or a copy, if that is `transformers`' own: `aligner.models.modules.hf_chunk`.

Continuous batching over `transformers`' cache. Prompts are computed together, each once for all responses to it; those of a model with
recurrent layers only with others of their length, since such layers may not skip padding. Running rows are aligned at their last token,
with what is in front of them masked; finished rows make room for waiting ones. Samples depend on prompt and seed alone
(`aligner.rollout.builtin.sampling`).

A model whose cache keeps what cannot be moved so, which a few tokens show at the first refit, computes whole rows for every token.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from aligner.data.images import images_in
from aligner.errors import AlignerError, ConfigError
from aligner.models.modules.fusions import note_once
from aligner.models.modules.hf_chunk import HFChunk
from aligner.protocols import Replica
from aligner.rollout.builtin.generation import PATIENCE
from aligner.rollout.builtin.sampling import GOES_ON, STOP, Draw, Sampler
from aligner.rollout.config import RolloutConfig, VerifyRefit
from aligner.rollout.engine import Callers, Capabilities, GenRequest, GenResult, ListedWork, Memory, Work, callers_of, check_ids, limit_of
from aligner.rollout.engine.gate import Gate
from aligner.rollout.engine.manifest import refuse_not_finite
from aligner.types import FinishReason, Images, LogprobKind, SamplingConfig

_PART = 4  # rows leave, and prompts are computed, when this part of the seats is free
_LARGEST_GAP, _LARGEST_GAP_OF_HALVES = 0.01, 0.5  # between log-probs with a cache and without, in float32 and in types of 16 bits
_FEW = 0.25  # of the tokens may be further off: an expert chosen otherwise, equal scores of an indexer
_LARGEST_WINDOW = 1024  # that the first tokens sampled go beyond
_LEAST_ROOM = 64  # tokens for which the cache of a layer grows at a time


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer with room for more: a step writes its own and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.room: tuple[Tensor, Tensor] | None = None  # of which keys and values are the beginning

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (new[..., :0, :] for new in (key_states, value_states))
        before, length = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self.room is None or self.room[0].shape[-2] < length:
            size = length + max(_LEAST_ROOM, length // 2) if before else length
            self.room = tuple(new.new_empty(*new.shape[:-2], size, new.shape[-1]) for new in (key_states, value_states))
            for room, old in zip(self.room, (self.keys, self.values), strict=True):
                room[..., :before, :] = old
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[..., before:length, :] = new
        self.keys, self.values = (room[..., :length, :] for room in self.room)
        return self.keys, self.values


def new_cache(config: Any) -> DynamicCache:
    """An empty cache. Layers with a window keep all tokens, and their masks hide those outside of it."""
    cache = DynamicCache(config=config)
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [RoomyLayer() if type(layer) in plain else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = RoomyLayer
    return cache


def has_states(config: Any) -> bool:
    """Whether a model of this `transformers` config has layers that keep something else than keys and values."""
    return any(type(layer) is not RoomyLayer for layer in new_cache(config).layers)


def _states(layer: Any) -> Iterator[tuple[Any, Any, bool]]:
    """(container, key, whether it has a dimension of tokens, the last but one) of each tensor with a row for each response."""
    for name in ("keys", "values", "indexer_keys"):
        if isinstance(getattr(layer, name, None), Tensor) and getattr(layer, name).numel():
            yield vars(layer), name, True
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, name, {}).items():
            if state is not None:
                yield getattr(layer, name), index, False


def _change(layer: Any, change: Callable[[Tensor, bool], Tensor]) -> None:
    for container, key, has_tokens in list(_states(layer)):
        container[key] = change(container[key], has_tokens)
    layer.room = None


def select(cache: DynamicCache, rows: Tensor, skipped: int = 0) -> None:
    """Keep these rows, in this order and as often as they are named, without the first `skipped` tokens."""
    for layer in cache.layers:
        _change(layer, lambda state, has_tokens: (state[..., skipped:, :] if has_tokens else state).index_select(0, rows))


def move_back(cache: DynamicCache, index: Tensor) -> None:
    """Put the tokens with the numbers `index` [rows, L] in their places in each row."""
    for layer in cache.layers:
        _change(layer, lambda state, _: state.take_along_dim(index.view(len(index), *[1] * (state.dim() - 3), -1, 1), dim=-2))


def join(cache: DynamicCache, other: DynamicCache, width: int) -> None:
    """Add the rows of `other`, both aligned at the right of `width` tokens."""

    def widened(state: Tensor, has_tokens: bool) -> Tensor:
        return torch.nn.functional.pad(state, (0, 0, width - state.shape[-2], 0)) if has_tokens else state

    for layer, more in zip(cache.layers, other.layers, strict=True):
        for (container, key, has_tokens), (added, _, _) in zip(list(_states(layer)), list(_states(more)), strict=True):
            container[key] = torch.cat([widened(container[key], has_tokens), widened(added[key], has_tokens)])
        layer.room = None


@dataclass(slots=True, eq=False)
class _Row:
    """An unfinished response."""

    request: GenRequest
    limit: int
    seat: int
    wants_raw: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # (number of the first token, weights that sampled from there on)


_Prompt = tuple[tuple[int, ...], tuple[str, ...]]  # tokens, and the images in their slots


def _prompt_of(request: GenRequest) -> _Prompt:
    return request.tokens, images_in(request.extras)


class OwnModulesEngine:
    """`aligner.rollout.engine.Engine` on a model of `transformers`' own modules; every rank is a replica.

    With `rollout.asynchronous` it has weights of its own, and generates while another thread trains; `pauses` lets that thread change them
    between two steps. Raises ConfigError for settings of the built-in engine that it does not have.
    """

    def __init__(
        self,
        chunk: HFChunk,
        config: RolloutConfig,
        *,
        eos_id: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        pauses: Gate | None = None,
    ) -> None:
        who = f"{chunk.architecture.model_type} has transformers' own modules"
        if config.tp > 1:
            raise ConfigError(f"rollout.tp={config.tp}: {who}; allowed: 0, 1")
        if config.asynchronous.recompute:
            raise ConfigError(
                f"rollout.asynchronous.recompute=true: {who}, whose keys and values stay those of the old weights; allowed: false"
            )
        if config.records_routes:
            raise ConfigError(f"rollout.routing_replay={config.routing_replay.value}: {who}; allowed: none")
        for setting in config.quantized:
            raise ConfigError(f"{setting}: {who}; allowed: model")
        self.version = 0
        self.max_sequence_length = chunk.max_sequence_length
        self.replica = Replica(index=dist.get_rank(), count=dist.get_world_size())
        self.capabilities = Capabilities(name="transformers", logprobs=LogprobKind.sampled, sees=chunk.vision is not None, serves=True)
        self._trained, self._config, self._eos_id, self._decode, self._pauses = chunk, config, eos_id, decode, pauses
        self._chunk = chunk.twin() if config.asynchronous.max_staleness else chunk
        self._caches: bool | None = None  # not known before there are weights

    def refit(self, version: int) -> int:
        """The weights are the policy's own, and only have to be there, or a copy. Returns the bytes that were copied. Raises EngineError
        for numbers that are not finite, if they are copied or should be verified."""
        self._trained.settle()
        num_bytes = 0 if self._chunk is self._trained else self._chunk.take_weights(self._trained)
        if num_bytes or self._config.verify_refit is VerifyRefit.checksum:
            refuse_not_finite(dict(self._chunk.named_parameters()))
        self.version = version
        if self._caches is None:
            wrong = wrong_cache(self._chunk, self._config)
            self._caches = not wrong
            if wrong:
                own = f"model_type={self._chunk.architecture.model_type}: its cache is not of use to the built-in engine ({wrong})"
                note_once(f"{own}: each token takes a pass over its whole row; a package's engine may be faster", rank=self.replica.index)
        return num_bytes

    def wake(self, memory: frozenset[Memory]) -> None:
        """Nothing is kept between generations."""

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Nothing is kept between generations."""

    def shutdown(self) -> None:
        """Nothing is kept between generations."""

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Responses to the requests of `work` as they end. Raises EngineError naming a prompt that is empty or leaves no room."""
        run = _Run(self._chunk, self._config, sampling, self._eos_id, self._decode, caches=self._caches is not False)
        run.pauses, run.version, run.callers = self._pauses, self.version, callers_of(work)
        was_training = self._chunk.training
        self._chunk.eval()
        try:
            while (ended := run.step(work)) is not None:
                if ended:
                    yield [self._result(row, stopped) for row, stopped in ended]
        finally:
            self._chunk.train(was_training)

    def _result(self, row: _Row, stopped: bool) -> GenResult:
        return GenResult(
            index=row.request.index,
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            raw_logprobs=tuple(row.raw_logprobs) if row.wants_raw else None,
            kind=LogprobKind.sampled,
            finish_reason=FinishReason.stop if stopped else FinishReason.length,
            weight_version=row.versions[-1][1],
            versions=tuple(row.versions) if len(row.versions) > 1 else (),
        )


@torch.no_grad()
def wrong_cache(chunk: HFChunk, config: RolloutConfig) -> str:
    """Why the model's cache is of no use: rows that join, share a prompt and leave have other log-probs with it than in training, or it
    fails. Empty if they are equal."""
    length, room = min(8, chunk.max_sequence_length // 2), chunk.max_sequence_length
    window = getattr(chunk.hf.config.get_text_config(), "sliding_window", None) or 0
    longest = min(max(length, min(window, _LARGEST_WINDOW) - length // 2), room - length)  # so that responses pass the window's end
    generator = torch.Generator().manual_seed(0)
    sizes = (longest, length // 2 or 1)
    prompts = [torch.randint(chunk.architecture.vocab_size, (size,), generator=generator).tolist() for size in sizes]
    requests = [GenRequest(index=i, tokens=tuple(prompts[i % 2]), seed=i, limit=max(1, length - i)) for i in range(5)]
    sampling = SamplingConfig(max_response_length=length)
    was_training = chunk.training
    chunk.eval()
    try:
        run, work = _Run(chunk, replace(config, max_batch_size=3), sampling, -1, None), ListedWork(requests)
        rows = []
        while (ended := run.step(work)) is not None:
            rows += [row for row, _ in ended]
        off = torch.cat([_off(chunk, row) for row in rows])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind a module raises
        return f"{type(error).__name__}: {error}"
    finally:
        chunk.train(was_training)
    limit = _LARGEST_GAP if chunk.config.params_dtype == torch.float32 else _LARGEST_GAP_OF_HALVES
    far = float((off > limit).float().mean())
    return f"{far:.0%} of its log-probs are off by more than {limit}" if far > _FEW else ""


def _off(chunk: HFChunk, row: _Row) -> Tensor:
    """How far the log-probs of a response are from those of training."""
    tokens = torch.tensor([*row.request.tokens, *row.tokens], device=next(chunk.hf.parameters()).device)
    hidden = chunk.backbone(input_ids=tokens[None], position_ids=torch.arange(len(tokens), device=tokens.device)[None], use_cache=False)
    logprobs = chunk.logits(hidden.last_hidden_state[0, len(row.request.tokens) - 1 : -1]).log_softmax(-1)
    drawn = tokens[len(row.request.tokens) :, None]
    return (logprobs.gather(1, drawn)[:, 0] - torch.tensor(row.logprobs, device=tokens.device)).abs()


class _Run:
    """One generation; without `caches` no pass remembers the one before."""

    def __init__(
        self, chunk: HFChunk, config: RolloutConfig, sampling: SamplingConfig, eos_id: int, decode: Any, *, caches: bool = True
    ) -> None:
        self.chunk, self.sampling, self.config, self.caches = chunk, sampling, config, caches
        self.device = next(chunk.hf.parameters()).device
        seats, vocabulary = config.max_batch_size, chunk.architecture.vocab_size
        self.sampler = Sampler(sampling, eos_id=eos_id, vocab_size=vocabulary, num_seats=seats, device=self.device, decode=decode)
        self.free = list(range(seats - 1, -1, -1))
        self.refill, self.since_begun = max(1, seats // _PART), 0  # steps
        self.waiting: deque[_Row] = deque()
        self.rows: list[_Row | None] = []  # of the cache; None: ended, and still computed
        self.cache: DynamicCache | None = None
        self.width, self.has_pads = 0, False  # tokens in the cache; whether some are masked
        self.pads: Tensor = torch.zeros(0, dtype=torch.int64, device=self.device)  # masked tokens in front of each row
        self.shifts: Tensor = self.pads  # of each row's positions by its images: Qwen's three axes end before the tokens do
        self.inputs: Tensor = self.pads  # the last drawn token of each row
        self.seats: Tensor = self.pads
        self.has_more_work = True
        self.pauses: Gate | None = None
        self.callers: Callers | None = None
        self.version = 0
        self.pads_prompts = not caches or not has_states(chunk.hf.config)  # recurrent layers may see padding
        named = inspect.signature(chunk.backbone.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"  # its name in releases before 5.24

    @torch.no_grad()
    def step(self, work: Work) -> list[tuple[_Row, bool]] | None:
        """At most one pass over prompts or running rows. Returns what ended, and whether at a stop; None after the last response."""
        if self.pauses is not None and (version := self.pauses.between_steps(lambda: None)) not in (None, self.version):
            self.version = version
            for row in filter(None, self.rows):
                row.versions.append((len(row.tokens), version))
        if self.callers is not None and (left := self.callers.left()):
            self._drop(set(left))
        room = len(self.free)
        refill = 1 if self.callers is not None and self.since_begun >= PATIENCE else self.refill
        if self.has_more_work and not self.waiting and (room >= refill or not any(self.rows)):
            requests = work.take(room)
            self.has_more_work = bool(requests) or work.is_open
            self.waiting += sorted(self._arrived(requests), key=lambda row: len(row.request.tokens))
        if self.waiting:
            return self._begin()
        if not any(self.rows):
            self._compact()  # waits with no cache
            return [] if self.has_more_work else None
        return self._decode_step()

    def _drop(self, left: set[int]) -> None:
        dropped = [row for row in (*self.waiting, *self.rows) if row is not None and row.request.index in left]
        self.free += [row.seat for row in dropped]
        self.waiting = deque(row for row in self.waiting if row not in dropped)
        self.rows = [None if row in dropped else row for row in self.rows]

    def _arrived(self, requests: Sequence[GenRequest]) -> Iterator[_Row]:
        for request in requests:
            try:
                yield self._row(request)
            except AlignerError as error:
                if self.callers is None:
                    raise
                self.callers.refuse(request.index, error)

    def _row(self, request: GenRequest) -> _Row:
        limit = limit_of(request, self.sampling, self.chunk.max_sequence_length)
        sampling = self.sampler.manner(request.sampling).sampling
        if self.callers is not None:  # what others send
            check_ids(request, self.chunk.architecture.vocab_size)
            if (images := _prompt_of(request)[1]) != ():
                self.chunk.seen(torch.tensor([request.tokens], device=self.device), Images.of(images)[None])
        return _Row(request=request, limit=limit, seat=self.free.pop(), wants_raw=sampling.raw_logprobs)

    def _begin(self) -> list[tuple[_Row, bool]]:
        """Compute some prompts, and draw the first token of all responses to them. The waiting are in the order of their lengths."""
        begun: list[_Row] = []
        self.since_begun = 0
        prompts: dict[_Prompt, int] = {}
        while self.waiting and self._fits(prompt := _prompt_of(self.waiting[0].request), prompts):
            prompts.setdefault(prompt, len(prompts))
            begun.append(self.waiting.popleft())
            begun[-1].versions.append((0, self.version))
        self._compact()
        cache, length = new_cache(self.chunk.hf.config) if self.caches else DynamicCache(), len(begun[-1].request.tokens)
        pads = torch.tensor([length - len(tokens) for tokens, _ in prompts], device=self.device)
        hidden, shifts = self._prefill(list(prompts), length, pads, cache)
        index = torch.tensor([prompts[_prompt_of(row.request)] for row in begun], device=self.device)
        for row in begun:
            given = {"seed": row.request.seed, "limit": row.limit, "sampling": row.request.sampling, "top": row.request.top}
            self.sampler.seat(row.seat, prompt=row.request.tokens, response=(), **given)
        seats = torch.tensor([row.seat for row in begun], device=self.device)
        draw = self.sampler.draw(self.chunk.logits(hidden)[index], seats)
        if len(prompts) < len(begun):
            select(cache, index)
        self._join(begun, cache, pads[index], length)
        self.shifts = torch.cat([self.shifts, shifts[index]])
        self.inputs, self.seats = torch.cat([self.inputs, draw.tokens]), torch.cat([self.seats, seats])
        return self._record(draw, first=len(self.rows) - len(begun))

    def _fits(self, prompt: _Prompt, prompts: dict[_Prompt, int]) -> bool:
        """Whether this prompt can be computed with the others, which are no longer."""
        if not prompts or prompt in prompts:
            return True
        (tokens, _), (others, _) = prompt, next(iter(prompts))
        same = self.pads_prompts or len(tokens) == len(others)
        return same and (len(prompts) + 1) * len(tokens) <= self.config.prefill_chunk_tokens

    def _prefill(self, prompts: Sequence[_Prompt], length: int, pads: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """(hidden states [rows, H] of the last tokens, the shifts [rows] of the positions behind them).

        The pass pads rows at their ends, where no token looks: a mask would leave padding in front nothing to look at. The cache has the
        padding in front.
        """
        if not self.caches:
            return self._whole(prompts), torch.zeros_like(pads)
        tokens = torch.tensor([[*own, *[0] * (length - len(own))] for own, _ in prompts], device=self.device)
        slots, rows = torch.arange(length, device=self.device), torch.arange(len(prompts), device=self.device)
        given = {"input_ids": tokens, "position_ids": slots.expand(tokens.shape), "attention_mask": None}
        is_seen = any(images for _, images in prompts)
        if is_seen:
            given |= self.chunk.seen(tokens, torch.stack([Images.of(images) for _, images in prompts]))
        module = self.chunk.hf.base_model if is_seen else self.chunk.backbone
        hidden = module(**given, **{self.cache_name: cache}, use_cache=True).last_hidden_state
        last = length - 1 - pads
        if len(prompts) > 1 and self.pads_prompts:
            move_back(cache, (slots - pads[:, None]).clamp(min=0))
        axes = given["position_ids"]
        shifts = axes[:, rows, last].amax(dim=0) - last if axes.dim() == 3 else torch.zeros_like(last)
        return hidden[rows, last], shifts

    def _join(self, begun: list[_Row], cache: DynamicCache, pads: Tensor, length: int) -> None:
        """Add rows of `length` tokens, of which the first `pads` are masked."""
        width = max(self.width, length)
        if self.cache is None:
            self.cache = cache
        else:
            join(self.cache, cache, width)
        self.pads = torch.cat([self.pads + (width - self.width), pads + (width - length)])
        self.width, self.has_pads = width, bool(self.pads.any())
        self.rows += begun

    def _whole(self, rows: Sequence[_Prompt]) -> Tensor:
        """Hidden states [rows, H] of the last tokens, as training computes them."""
        found, count = [], max(1, self.config.prefill_chunk_tokens // max(len(tokens) for tokens, _ in rows))
        for part in (rows[start : start + count] for start in range(0, len(rows), count)):
            ends = torch.tensor([len(tokens) - 1 for tokens, _ in part], device=self.device)
            length = int(ends.max()) + 1
            tokens = torch.tensor([[*own, *[0] * (length - len(own))] for own, _ in part], device=self.device)
            positions = torch.arange(length, device=self.device).expand(tokens.shape)
            images = torch.stack([Images.of(own) for _, own in part]) if any(own for _, own in part) else None
            found.append(self.chunk(tokens, positions, images=images)[ends, torch.arange(len(part), device=self.device)])
        return torch.cat(found)

    def _decode_step(self) -> list[tuple[_Row, bool]]:
        self._compact(least=self.refill if self.caches else 1)
        self.since_begun += 1
        self.width += 1
        if self.caches:
            mask = torch.arange(self.width, device=self.device) >= self.pads[:, None] if self.has_pads else None
            positions = (self.width - 1 - self.pads + self.shifts)[:, None]
            assert self.cache is not None
            given = {"input_ids": self.inputs[:, None], "position_ids": positions, "attention_mask": mask, self.cache_name: self.cache}
            hidden = self.chunk.backbone(**given, use_cache=True).last_hidden_state[:, -1]
        else:
            prompts = [(row, _prompt_of(row.request)) for row in self.rows if row is not None]
            hidden = self._whole([((*tokens, *row.tokens), images) for row, (tokens, images) in prompts])
        draw = self.sampler.draw(self.chunk.logits(hidden), self.seats)
        self.inputs = draw.tokens
        return self._record(draw, first=0)

    def _record(self, draw: Draw, first: int) -> list[tuple[_Row, bool]]:
        """Add a draw to the rows from `first` on; returns those that it ended."""
        found = []
        raw = [] if draw.raw_logprobs is None else draw.raw_logprobs.tolist()
        tops = {} if draw.tops is None else draw.tops.by_row()
        drawn = zip(draw.tokens.tolist(), draw.logprobs.tolist(), draw.ended.tolist(), strict=True)
        for number, (token, logprob, ended) in enumerate(drawn):
            row = self.rows[first + number]
            if row is None:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if raw:
                row.raw_logprobs.append(raw[number])
            if self.callers is not None:
                self.callers.hear(row.request.index, (token,), (logprob,), (tops[number],) if number in tops else ())
            if ended != GOES_ON:
                found.append((row, ended == STOP))
                self.rows[first + number] = None
                self.free.append(row.seat)
        return found

    def _compact(self, *, least: int = 1) -> None:
        """Drop the rows that have ended, if they are at least as many."""
        kept = [number for number, row in enumerate(self.rows) if row is not None]
        if len(self.rows) - len(kept) < min(least, max(1, len(self.rows) // _PART)):
            return
        self.rows = [self.rows[number] for number in kept]
        if not kept:
            self.cache, self.width, self.has_pads = None, 0, False
            self.pads = self.shifts = self.inputs = self.seats = self.pads[:0]
            return
        index = torch.tensor(kept, device=self.device)
        self.pads, self.shifts, self.inputs, self.seats = (one[index] for one in (self.pads, self.shifts, self.inputs, self.seats))
        skipped = int(self.pads.min())
        select(self.cache, index, skipped)
        self.pads, self.width = self.pads - skipped, self.width - skipped
        self.has_pads = bool(self.pads.any())
