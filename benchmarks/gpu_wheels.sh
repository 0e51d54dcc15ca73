#!/bin/sh
# Collect the wheels that holdfast needs besides torch and numpy, for a machine without a network (docs/gpu.md).
#
#     benchmarks/gpu_wheels.sh DIR [PYTHON_VERSION]
#
# They are for Linux on x86_64 and Python 3.12, or another version. scipy and matplotlib are left out: only a few
# commands need them, and they are large.
set -eu
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 DIR [PYTHON_VERSION]" >&2
    exit 2
fi
"${PYTHON:-python3}" -m pip download --quiet --dest "$1" --only-binary=:all: \
    --python-version "${2:-3.12}" --implementation cp --abi "cp$(echo "${2:-3.12}" | tr -d .)" --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 --platform manylinux_2_5_x86_64 --platform any \
    msgspec starlette 'uvicorn>=0.54' websockets httpx xxhash prometheus-client 'typer>=0.29' rich nvidia-ml-py
du -sh "$1"
