# finetune in a container: with NVIDIA GPUs, or on CPUs without `--gpus all`.
#
#   docker build -t finetune .
#   docker run --rm --gpus all --shm-size=8g --user "$(id -u):$(id -g)" -v "$PWD:/workspace" \
#       finetune fit --config hotdog.yaml
#
# Serving: `docker run --rm -p 8000:8000 --read-only --tmpfs /tmp -v "$PWD:/workspace:ro" -e FINETUNE_TOKEN \
#     finetune serve runs/fit/version_0 --host 0.0.0.0`; nothing is written.
#
# Files are written to /workspace, the mounted folder: data/, runs/ and .cache/ (downloaded weights).
# `--user` may be any number, since the image has no users of its own and writes nowhere else. With the number of the
# folder's owner, as above, that person owns the files. The default is 1000, on most computers the first user. Anybody can
# write to a new named volume (`-v finetune:/workspace`). Rootless podman also needs `--userns=keep-id`.
# Read-only root: add `--read-only --tmpfs /tmp`.
# Shared memory: worker processes send batches through it, and the usual 64 MB are too few for large images.
# Stopping: Ctrl-C and `docker stop` save first, then exit with 130 and 143; the same command with `--resume` continues.
# `serve` answers the requests that it has accepted, then exits with 0.
# `docker run --stop-timeout 60` gives a slow disk, or large images, more than the usual 10 seconds.
#
# Variants, by build arguments:
#
#   docker build --build-arg EXTRAS=all -t finetune:all .    # 0.24 GB more: timm, TensorBoard, wandb, MLflow
#   docker build --build-arg VARIANT=cpu --build-arg TORCH_INDEX=ADDRESS -t finetune:cpu .    # 1.6 GB
#
# ADDRESS is PyTorch's CPU index, as its "Start Locally" page shows it. The versions are those of the lock file. torch and
# torchvision of this index are not checked by hashes; all other packages are.
#
# Size: 5.2 GB in addition to the base image, 2.9 GB to download (gzip). CUDA libraries take 3.1 GB, torch 1.2, and the
# packages for export 0.1. Not included: triton and device code (1.0 GB), compilers, headers, tests, and pip's cache.
#
# The base image has no digest, so a new build gets Debian's and Python's security fixes. The lock file fixes the packages
# that results depend on. To build exactly the same image again, add the digest that you tested.

FROM python:3.11-slim AS build
WORKDIR /source
COPY requirements-build.lock .
RUN pip install --no-cache-dir --root-user-action ignore --require-hashes --only-binary :all: -r requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY finetune finetune
RUN pip install --no-cache-dir --root-user-action ignore --no-deps --no-build-isolation --root /installed .

FROM python:3.11-slim
# One layer that changes only with the lock file: after a change of finetune, kilobytes are downloaded, not gigabytes.
# Files that only a compiler or the packages' own tests need are removed. So is triton, a compiler that needs a C compiler,
# which a slim image lacks: torch would try it on a GPU for some matrix products, and fail.
# The compiled .pyc files are kept, since nobody can write them later.
# `pip check` finds a package that a lock file lacks.
ARG VARIANT=cuda
ARG EXTRAS=none
ARG TORCH_INDEX=
COPY requirements.lock requirements-extras.lock /
RUN cp /requirements.lock /wanted.lock && \
    case "$VARIANT" in \
        cuda) ;; \
        cpu) \
            test -n "$TORCH_INDEX" || { echo "VARIANT=cpu needs TORCH_INDEX: PyTorch's CPU index" >&2; exit 1; }; \
            sed -n 's/^\(torch\|torchvision\)==\([^ ]*\).*/\1==\2+cpu/p' /requirements.lock > /torch.lock && \
            pip install --no-cache-dir --root-user-action ignore --no-deps --only-binary :all: --index-url "$TORCH_INDEX" \
                -r /torch.lock && \
            awk '/^[a-z]/ { skip = /^(torch|torchvision|triton|cuda-.*|nvidia-.*)==/ } !skip' \
                /requirements.lock > /wanted.lock ;; \
        *) echo "VARIANT is cuda or cpu, not $VARIANT" >&2; exit 1 ;; \
    esac && \
    case "$EXTRAS" in \
        none) ;; \
        all) cat /requirements-extras.lock >> /wanted.lock ;; \
        *) echo "EXTRAS is none or all, not $EXTRAS" >&2; exit 1 ;; \
    esac && \
    pip install --no-cache-dir --root-user-action ignore --no-deps --require-hashes --only-binary :all: -r /wanted.lock && \
    pip check && \
    pip uninstall --yes --root-user-action ignore triton && \
    rm -f /wanted.lock /torch.lock && \
    find /usr/local/lib/python3.11 \
        \( -name '*.a' -o -name '*.bc' -o -type d \( -name tests -o -path '*/torch/include' \) \) \
        -prune -exec rm -r {} + && \
    install -d -m 1777 /workspace
COPY --from=build /installed /

# HOME: a folder that anybody can write to. USER: libraries need a name of the user, and a number has none.
# TORCH_DISABLE_…: processes that torchrun restarts would use the former addresses of the others (torch 2.15).
# TORCH_LOGS: torch would log at each start that triton is missing.
ENV NO_ALBUMENTATIONS_UPDATE=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    TORCH_LOGS=-torch.utils.flop_counter \
    XDG_CACHE_HOME=/workspace/.cache \
    HOME=/tmp \
    USER=finetune
WORKDIR /workspace
EXPOSE 8000
USER 1000:1000
ENTRYPOINT ["finetune"]
