# Pagewick in a container; docs/deployment.md explains how to run it.
#   docker build -t pagewick .                       for CPUs
#   docker build -t pagewick:cuda --target cuda .    for NVIDIA GPUs

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt CHANGELOG.md ./
COPY pagewick pagewick
RUN PAGEWICK_REQUIRE_NATIVE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .
COPY deploy deploy

FROM build AS install-cpu
RUN deploy/install /wheel/*.whl /opt/pagewick cpu

FROM build AS install-cuda
# PyTorch brings the CUDA libraries along; the driver comes from the host.
RUN deploy/install /wheel/*.whl /opt/pagewick index

# The C++ compiler stays behind: only the virtual environment goes into the image.
FROM python:3.12-slim-bookworm AS runtime
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin pagewick \
    && install -d -o pagewick -g pagewick -m 0750 /cache
COPY deploy/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/pagewick/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    PAGEWICK_HOST=0.0.0.0
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
# A model may take long to download; a success ends the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "/opt/healthcheck.py"]
ENTRYPOINT ["pagewick"]
CMD ["serve"]

FROM runtime AS cuda
# Triton builds its launcher with a C compiler when a kernel first runs.
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=install-cuda /opt/pagewick /opt/pagewick
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/cache/triton

FROM runtime AS cpu
COPY --from=install-cpu /opt/pagewick /opt/pagewick
