#!/usr/bin/env bash
# What one GPU can prove, in under five minutes: NCCL with one rank, gloo with CUDA tensors on several
# ranks, memory against torch's own counter, overlap on streams, and time against torch's DDP.
# Prints one line per check and "N passed, N failed" at the end; without a GPU it says so and stops.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec timeout 300 "$PYTHON" tests/gpu_checks.py "$@"
