#!/bin/bash
# A stand-in for every base image, made with debootstrap where no public registry can be reached:
#   images/stand-in-base.sh [TAG]     then: make image-NAME BASE_IMAGE=TAG
# It is this machine's own Debian release from this machine's own mirror. With CUDA=1 it also gets
# nvcc and cuobjdump from the wheels of locks/cuda-toolkit.txt, and with PYTHON_PREFIX= a copy of a
# Python that this machine has (some engines have wheels for one Python only). Needs root and Docker.
set -euo pipefail

TAG=${1:-lanes/stand-in-base:local}
here=$(cd "$(dirname "$0")/.." && pwd)
! docker image inspect "$TAG" >/dev/null 2>&1 || { echo "stand-in-base: $TAG is here" >&2; exit 0; }

# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -1)
packages=ca-certificates,python3,python3-venv
# What a copied Python loads, and what the CUDA compiler drives.
[[ -z ${PYTHON_PREFIX:-} ]] || packages+=,libbz2-1.0,libffi8,libsqlite3-0,libssl3,liblzma5,libreadline8,zlib1g
[[ -z ${CUDA:-} ]] || packages+=,g++
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

echo "stand-in-base: debootstrap $suite" >&2
debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
    { tail -5 "$root.log" >&2; exit 2; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
# The Dockerfiles install as from a Debian base: the release and its security updates.
cp /etc/apt/sources.list.d/debian.sources "$root/etc/apt/sources.list.d/"
: >"$root/etc/apt/sources.list"
# As in the official images: a build layer needs no fsync after every file.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/unsafe-io"

if [[ -n ${PYTHON_PREFIX:-} ]]; then
    tar -C "$PYTHON_PREFIX" -c --exclude=site-packages --exclude=__pycache__ --exclude=test bin include lib |
        tar -C "$root/usr/local" -x
    # The copied scripts name the old prefix; only the interpreter is wanted.
    find "$root/usr/local/bin" -type f ! -name 'python3.*' -delete
    chroot "$root" ldconfig
fi
if [[ -n ${CUDA:-} ]]; then
    echo "stand-in-base: CUDA toolkit from wheels" >&2
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: --target "$root/wheels" -r "$here/locks/cuda-toolkit.txt"
    mv "$root/wheels/nvidia/cu13" "$root/usr/local/cuda" && rm -rf "$root/wheels"
    # Wheels ship versioned libraries only; a linker looks for the plain names.
    ln -s lib "$root/usr/local/cuda/lib64"
    for library in "$root"/usr/local/cuda/lib/lib*.so.*; do
        ln -sf "$(basename "$library")" "${library%%.so.*}.so"
    done
    # Nothing of the driver is in a wheel: a libcuda to link against and to import with. It has the
    # names of cuda.h, since a linker that goes as-needed drops an empty one, and a DeepEP so linked is
    # imported on no GPU machine (2026-12-01).
    mkdir "$root/usr/local/cuda/lib/stubs"
    gcc -E -x c -I"$root/usr/local/cuda/include" - <<<'#include <cuda.h>' |
        sed -nE 's/.*\bCUresult +(cu[A-Za-z0-9_]+) *\(.*/void \1(void) {}/p' | sort -u |
        gcc -shared -Wl,-soname,libcuda.so.1 -x c - -o "$root/usr/local/cuda/lib/stubs/libcuda.so"
    ln -s libcuda.so "$root/usr/local/cuda/lib/stubs/libcuda.so.1"
fi
tar -C "$root" -c . | docker import - "$TAG" >/dev/null
echo "stand-in-base: made $TAG" >&2
