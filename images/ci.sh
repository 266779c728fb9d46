#!/bin/bash
# The part of the graph that needs no public registry, built from nothing and judged, with the CPU
# lane run in its containers: on a bare Debian 12 machine as root, about 15 minutes and 25 GB.
set -euo pipefail
cd "$(dirname "$0")/.."

images/engine.sh registry
images/stand-in-base.sh lanes/stand-in-base:local
# Where this machine trusts an extra certificate, build steps must as well.
make image-vllm PROFILE=cpu BASE_IMAGE=lanes/stand-in-base:local CA_BUNDLE="${PIP_CERT:-}"
make test-images BUILT="vllm-cpu aiperf"
