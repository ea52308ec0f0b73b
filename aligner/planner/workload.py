"""Input of a plan: a job's components, each a model in a layout with the work of a step, its rows, and measured sizes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from statistics import NormalDist

from aligner.models.config import Architecture, HFArchitecture, ModelConfig
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import CudaGraphs, EngineKind, RolloutConfig
from aligner.rollout.tensorrt_llm.contract import graphs_lost

GIB = 2**30


class Head(str, Enum):
    """The head on the last hidden state."""

    language = "language"
    scalar = "scalar"


class Phase(str, Enum):
    """One part of a training step; the member names are those of the run's `time/*` metrics."""

    generate = "generate"
    logprobs = "logprobs"
    ref_logprobs = "ref_logprobs"
    values = "values"
    scores = "scores"
    train = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLengths:
    """Log-normal lengths of responses in tokens, cut as the run cuts them, or measured lengths."""

    mean: float  # after the cut
    spread: float = 0.7  # standard deviation of the logarithm
    prompt: float = 0.0  # mean length of the prompts; 0: the longest
    measured: tuple[int, ...] = ()  # rising; in place of log-normal lengths

    def drawn(self, count: int, longest: int, seed: int = 0) -> list[int]:
        """`count` lengths of at most `longest`: evenly spaced quantiles in an order that is the same every time."""
        if self.measured:
            lengths = [min(longest, self.measured[(2 * number + 1) * len(self.measured) // (2 * count)]) for number in range(count)]
        else:
            lengths = list(_quantiles(self.mean, self.spread, count, longest))
        random.Random(seed).shuffle(lengths)
        return lengths


@lru_cache(maxsize=256)
def _quantiles(mean: float, spread: float, count: int, longest: int) -> tuple[int, ...]:
    normal = NormalDist()
    factors = [math.exp(spread * normal.inv_cdf((number + 0.5) / count)) for number in range(count)]

    def cut_mean(scale: float) -> float:
        return sum(min(longest, scale * factor) for factor in factors) / count

    low, high = 0.0, float(longest)
    while cut_mean(high) < mean and high < 1e6 * longest:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return tuple(max(1, min(longest, round(high * factor))) for factor in factors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One training step of a component. Memory is planned for sequences of full length, the worst batch; only times use `lengths`."""

    phases: tuple[Phase, ...]
    rows: int  # sequences per training step
    length: int  # tokens of the longest sequence
    response_length: int  # tokens of the longest sequence that have log-probs
    update_rows: int = 0  # sequences per optimizer update; 0 for a frozen model
    num_updates: int = 0  # optimizer updates per training step
    unit: int = 1  # rows that stay together: 2 for preference pairs
    prompts: int = 0  # distinct prompts per training step, whose images are computed once for sampling; 0: one for each row
    extra_rows: int = 0  # further sequences, which are sampled and scored but not trained on
    lengths: ResponseLengths | None = None  # None: all have the full length

    @property
    def longest_prompt(self) -> int:
        """Tokens; 0 if the recipe has no responses."""
        return max(0, self.length - self.response_length)

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        given = self.lengths.prompt if self.lengths is not None else 0.0
        return min(given, self.longest_prompt) if given else self.longest_prompt

    def responses(self, count: int, seed: int = 0) -> list[int]:
        """Lengths of `count` responses, in tokens."""
        if self.lengths is None:
            return [self.response_length] * count
        return self.lengths.drawn(count, self.response_length, seed)

    def mean_length(self) -> float:
        """Tokens of a sequence, on average."""
        return self.length if self.lengths is None else self.mean_prompt + self.lengths.mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The rollout engine, planned as the built-in one: replicas of `tp` ranks each, over all ranks of the component."""

    tp: int
    max_batch_size: int
    bucket_bytes: int  # weights on their way into the engine's layout
    offload: bool  # whether its own weights and the policy's take turns on the device
    kv_cache_tokens: int = 0  # tokens in a replica's cache; 0: as many as its sequences need
    prefill_chunk_tokens: int = 2048  # prompt tokens computed in one pass
    asynchronous: bool = False  # whether it samples while the policy trains, with weights of its own
    on_gpu: bool = False  # whether its collectives are NCCL's
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    own_ranks: int = 0  # GPUs that only the engine uses; 0: it uses the component's
    wanted_cache_tokens: int = 0  # tokens that the cache had room for before the plan made it smaller; 0: the plan left it as it was

    @property
    def is_foreign(self) -> bool:
        """Whether it is another package's engine, which never reads the policy's parameters in place."""
        return self.settings.engine != EngineKind.megatron

    @property
    def keeps_cache(self) -> bool:
        """Whether on a GPU its key-value cache stays allocated while the policy trains: graphs know the cache by its address."""
        return not self.own_ranks and not self.offload and (self.settings.cuda_graphs or self.is_foreign)

    @property
    def graphs_lost(self) -> str:
        """Which CUDA graphs the run's settings cost, in words; empty if none."""
        is_it = self.settings.engine == EngineKind.tensorrt_llm
        return graphs_lost(self.settings.tensorrt_llm.cuda_graphs, offload=self.offload) if is_it else ""

    @property
    def records_graphs(self) -> bool:
        """Whether it decodes by CUDA graphs, whose buffers stay allocated with them."""
        return self.on_gpu and self.uses_graphs

    @property
    def uses_graphs(self) -> bool:
        """Whether it decodes by CUDA graphs if it runs on a GPU."""
        if self.settings.engine == EngineKind.vllm:
            return not self.settings.vllm.enforce_eager
        if self.settings.engine == EngineKind.tensorrt_llm:
            return self.settings.tensorrt_llm.cuda_graphs is not CudaGraphs.never and not self.graphs_lost
        return self.settings.cuda_graphs

    @property
    def keeps_graphs(self) -> bool:
        """Whether the graphs outlive a generation: a sleeping vLLM frees only weights and cache, the other engines forget the graphs."""
        return self.records_graphs and (not self.offload or self.settings.engine == EngineKind.vllm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One SPMD job of `num_ranks` ranks."""

    name: str
    head: Head
    num_ranks: int
    architecture: Architecture
    model: ModelConfig  # its dtype is not `auto`
    parallel: ParallelConfig
    optimizer: OptimizerConfig | None  # None: frozen
    work: Work
    engine: Engine | None = None
    has_values: bool = False  # whether a language model has a head of values beside its output layer
    has_reference: bool = False  # whether a frozen copy of the trained weights waits in host memory and is on the device for a pass
    saves_asynchronously: bool = False  # whether a copy of what is saved waits in host memory
    turns: frozenset[Phase] = frozenset()  # phases around which its model goes to host memory and back, since others use its GPUs
    within: str = ""  # the component in whose processes it runs; empty: it has its own
    beside_bytes: int = 0  # device memory that other components hold on its GPUs
    rests_on_host: bool = False  # whether it leaves the device while another model of its process computes
    image_tokens: int = 0  # that images take in each sequence; 0: the longest prompt's, or all if there are no prompts

    @property
    def process(self) -> str:
        return self.within or self.name

    @property
    def owns_layout(self) -> bool:
        """Whether its layout has settings of its own, or of the server in whose processes it is."""
        return self.within != "actor"

    @property
    def prefix(self) -> str:
        """The prefix of its settings as they are typed."""
        return "" if self.name in ("actor", "trainer") else f"{self.name}."

    @property
    def seen_tokens(self) -> int:
        """Tokens that images take in the longest sequence of a model that sees."""
        return self.image_tokens or self.work.longest_prompt or self.work.length

    @property
    def dp(self) -> int:
        return self.num_ranks // self.parallel.replica_size

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return self.model.dtype.num_bytes

    @property
    def engine_holds_weights(self) -> bool:
        """Whether sampling needs separate weights."""
        engine = self.engine
        rounds = engine is not None and engine.settings.precision.is_on
        # These are sampled from with their adapters beside them.
        beside = isinstance(self.architecture, HFArchitecture) or self.model.quantization.is_on or rounds
        merges = self.model.lora.is_on and not beside
        return engine is not None and (engine.own_ranks > 0 or engine.asynchronous or engine.is_foreign or self.engine_reshards or merges)

    @property
    def engine_reshards(self) -> bool:
        """Whether the engine's weight layout differs from training's, so that it cannot read the parameters in place."""
        if self.engine is None:
            return False
        parallel, architecture = self.parallel, self.architecture
        same = parallel.tp == self.engine.tp and parallel.pp == 1 and architecture.num_key_value_heads % parallel.tp == 0
        return not (same and (not architecture.num_experts or (parallel.ep == 1 and parallel.etp in (1, parallel.tp))))

    @property
    def shards_sequences(self) -> int:
        """Number of parts of the hidden states between layers."""
        return self.parallel.cp * (self.parallel.tp if self.parallel.sequence_parallel else 1)

    @property
    def length_multiple(self) -> int:
        """Sequences are padded to a multiple of this."""
        return math.lcm(2 * self.parallel.cp if self.parallel.cp > 1 else 1, self.shards_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a rank's shard."""

    name: str
    numel: int
    itemsize: int  # bytes per element
    is_expert: bool = False  # whether its replicas are the expert-data-parallel ranks
    is_split: bool = False  # whether the tensor-parallel ranks (of an expert the expert-tensor-parallel ones) share it
    own_bucket: bool = False  # whether it is the tied embedding
    is_frozen: bool = False  # whether it has no buffer, no gradient and no optimizer state
    is_matrix: bool = False  # whether `optimizer.kind=muon` has one moment of it
    is_adapter: bool = False  # whether it belongs to an adapter, which rollout engines merge with its linear layer
    packed_bytes: int = 0  # of its form in few bits; 0: it is dense

    @property
    def nbytes(self) -> int:
        """What it takes on this rank."""
        return self.packed_bytes or self.numel * self.itemsize


EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)  # bytes of an element's moments in optimizer.kind=adam8bit, with its part of their blocks' scales


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Storage of one rank: weights, main gradients, optimizer state (moments and float32 main weights, without its scalars)."""

    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights, gradients=self.gradients + other.gradients, optimizer=self.optimizer + other.optimizer
        )

    def __mul__(self, count: int) -> StateBytes:
        return StateBytes(weights=self.weights * count, gradients=self.gradients * count, optimizer=self.optimizer * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Activation bytes of transformer layers for one micro-batch on one rank."""

    layer: int  # tensors of one layer that wait for the backward pass
    ends: int  # tensors of a block of layers besides: its input and output, and the final norm's on the last stage
    backward: int  # most that the backward pass holds besides the waiting tensors, one layer's recomputation included
    forward: int  # most that a pass without gradient holds
    kept: int = 0  # stays allocated after the first pass: the buffer in which sequence parallelism gathers a layer's input


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A vision tower. Bytes and FLOPs are of one feature: a token that an image takes."""

    kept: float  # bytes that wait for the backward pass, with pixels and features
    held: float  # bytes that wait besides until the text part's forward pass is done
    working: float  # most bytes that training holds besides those that are kept
    forward: float  # most bytes that a pass without gradient holds
    fixed: int  # bytes of `working` that all features share: the gradient of a weight
    patches: int  # that a feature stands for
    depth: int
    width: int
    windowed: int  # layers whose attention sees `window` patches
    window: int
    flops: float  # of a forward pass, without those of scores
    trained_flops: float  # of all passes of training


def padded_vocabulary(component: Component) -> int:
    """Rows of the whole embedding, padding included."""
    multiple = math.lcm(component.model.make_vocab_divisible_by, component.parallel.tp)
    return math.ceil(component.architecture.vocab_size / multiple) * multiple


def stage_layers(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage (all its chunks together). The sizes have been checked (`check_divisible`)."""
    first, last = ([layers] * bool(layers) for layers in (parallel.first_stage_layers, parallel.last_stage_layers))
    others = parallel.pp - len(first) - len(last)
    return [*first, *[(num_layers - sum(first + last)) // others if others else 0] * others, *last]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """`count` forward passes of `rows` sequences, each filled up to `length` tokens."""

    count: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def micro_batches(component: Component, rows: int) -> MicroBatches:
    """How a replica's share of `rows` sequences of full length is cut."""
    model, work, parallel = component.model, component.work, component.parallel
    length = math.ceil(work.length / component.length_multiple) * component.length_multiple
    units = math.ceil(rows / work.unit / component.dp)
    by_tokens = max(1, model.micro_batch_tokens // (length * work.unit))
    per_pass = min(by_tokens if model.micro_batch_tokens else model.micro_batch_size, units)
    count = math.ceil(units / per_pass)
    if parallel.vpp > 1:  # the interleaved schedule works in groups of pp; the last one is filled up
        count = math.ceil(count / parallel.pp) * parallel.pp
    return MicroBatches(count=count, rows=per_pass * work.unit, length=length)


def in_flight(parallel: ParallelConfig, stage: int, count: int) -> int:
    """Chunks of micro-batches whose activations a stage holds at once: 1F1B's min(pp - stage, count) without interleaving.

    Interleaved (Narayanan et al. 2021, 2104.04473), with groups of pp micro-batches: the warm-up of 2 (pp - stage - 1) + (vpp - 1) pp chunk
    passes and the one that follows it.
    """
    if parallel.vpp == 1:
        return min(parallel.pp - stage, count)
    return min(2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1, count * parallel.vpp)
