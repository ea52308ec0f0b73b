# syntax=docker/dockerfile:1
# Everything for GPU clusters: actor, critic and reward servers, conductor. What it holds, how to build and import it: docs/containers.md
#
# NVIDIA's TensorRT-LLM release image stands on its PyTorch image (25.12: CUDA 13.1, Python 3.12) and brings what must fit the driver and each
# other: torch, TensorRT-LLM, Transformer Engine, Apex, NCCL, Open MPI and an mpi4py that was built against it. Those stay as they are.
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1
FROM ${BASE}

# Pyxis, enroot and Apptainer run as whoever submits; with Docker say --user. hadolint: the base image's user is root too.
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# NVIDIA's images have a constraints file of their own, which would forbid what is installed below, and let float32 products be of TF32.
ENV PIP_CONSTRAINT=
ENV TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0

# It holds programs that a model wrote (docs/rewards.md). hadolint: of whichever version the base image's distribution has.
# hadolint ignore=DL3008
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*

# What is there binds what follows: pip fails rather than replaces it; what is not has the versions of docker/versions.txt. Free of the base are
# the packages that only Triton's client and TLS use, and our own.
COPY docker/image.py docker/versions.txt /opt/aligner/docker/
RUN python3 /opt/aligner/docker/image.py constraints cryptography grpcio gevent greenlet geventhttpclient hydra-core omegaconf > /opt/constraints.txt
RUN pip install --constraint /opt/constraints.txt cryptography hydra-core nvidia-pytriton omegaconf py-spy "tritonclient[grpc,http]"
# Without dependencies: they ask for torch, which is there under a pre-release's number.
RUN pip install --no-deps --constraint /opt/constraints.txt bitsandbytes megatron-core

WORKDIR /opt/aligner
COPY setup.py pyproject.toml README.md LICENSE ./
COPY aligner aligner
COPY conf conf
COPY examples examples
COPY tools/tensorrt_llm_diff.py tools/tensorrt_llm_smoke.py tools/
RUN pip install --no-deps --no-build-isolation --editable .

# The build ends here where something that has to be there is not, or two versions do not fit.
RUN python3 docker/image.py check torch tensorrt_llm transformer_engine flash_attn apex mpi4py tensorboard nvidia-pytriton \
    && python3 docker/image.py imports torch transformer_engine.pytorch flash_attn apex megatron.core pytriton tritonclient.grpc \
    && python3 docker/image.py environment PIP_CONSTRAINT= TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 \
    && python3 docker/image.py needs "nvidia-pytriton" "tritonclient[grpc,http]" "megatron-core" "hydra-core"

# Whether the TensorRT-LLM engine's contract holds for these sources: read, not imported, for that needs a GPU. It does not end the build: the
# built-in engine needs none of it.
RUN python3 tools/tensorrt_llm_diff.py \
    || echo "rollout.engine=tensorrt_llm will not work as it is: docs/tensorrt_llm.md says what to do about the differences above"

# One process per GPU; NumPy's and torch's own threads only get in each other's way.
ENV OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKDIR /workspace
CMD ["aligner", "--help"]
