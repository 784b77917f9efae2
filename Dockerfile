# The steps of `make run`, in an image: docker build -t paged-arena . && docker run -p 7860:7860 -v arena:/data paged-arena
FROM python:3.11-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/arena
# Empty takes torch from the default index; PyTorch's CPU wheel index keeps CUDA out of the image.
ARG TORCH_INDEX=
ENV ARENA_CACHE=/data/cache ARENA_DATA_FOLDER=/data PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PATH=/srv/arena/.venv/bin:$PATH

COPY . .
RUN make install TORCH_INDEX=${TORCH_INDEX}

VOLUME /data
EXPOSE 7860
# What `make run` ends in, by itself, so that signals reach it. The engine fetches the checkpoints into the volume, once.
CMD ["arena", "serve", "--host", "0.0.0.0"]
