#!/bin/bash
# A Docker engine with buildx and Compose on a bare Debian 12 machine, for CI and for people without one.
# Says nothing and does nothing where `docker info` already answers. Needs root.
#   images/engine.sh [start|registry]
set -euo pipefail

STATE=${LANES_ENGINE_STATE:-/var/lib/lanes-engine}
REGISTRY_PORT=${LANES_REGISTRY_PORT:-5000}

say() { echo "engine: $*" >&2; }

# Debian 12's docker.io 20.10 has neither buildx nor Compose v2; the four packages below from
# Debian 13 install beside the rest of Debian 12 and move nothing else (2026-11-30).
install_packages() {
    local apt=$STATE/apt sources=/etc/apt/sources.list.d/debian.sources
    mkdir -p "$apt/parts" "$apt/lists/partial"
    cp "$sources" "$apt/parts/here.sources"
    sed 's/bookworm-updates//; s/bookworm/trixie/g' "$sources" >"$apt/parts/next.sources"
    printf '%s\n' 'Package: *' 'Pin: release n=trixie*' 'Pin-Priority: 100' '' \
        'Package: docker.io docker-cli docker-buildx docker-compose' \
        'Pin: release n=trixie*' 'Pin-Priority: 990' >"$apt/preferences"
    local options=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$apt/parts"
        -o "Dir::State::lists=$apt/lists" -o "Dir::Etc::preferences=$apt/preferences")
    say "installing docker, buildx, Compose, debootstrap and a registry from Debian"
    apt-get "${options[@]}" -qq update
    # policy-rc.d: the packages must not start services of their own.
    printf '#!/bin/sh\nexit 101\n' >"$STATE/policy" && chmod +x "$STATE/policy"
    [[ -e /usr/sbin/policy-rc.d ]] || ln -s "$STATE/policy" /usr/sbin/policy-rc.d
    DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" -qq install --no-install-recommends -y \
        docker.io docker-cli docker-buildx docker-compose debootstrap docker-registry iptables >/dev/null
    [[ $(readlink /usr/sbin/policy-rc.d) != "$STATE/policy" ]] || rm /usr/sbin/policy-rc.d
}

start_engine() {
    docker info >/dev/null 2>&1 && return
    mkdir -p "$STATE"
    [[ -x /usr/sbin/dockerd && -x /usr/sbin/debootstrap ]] || install_packages
    # The containerd image store makes the default builder able to attach provenance, which then
    # survives a push; the classic store refuses it (2026-11-30, docker 26.1.5).
    printf '%s\n' '{"features": {"containerd-snapshotter": true}, "log-level": "warn"}' >"$STATE/daemon.json"
    say "starting dockerd; its log: $STATE/dockerd.log"
    setsid dockerd --config-file "$STATE/daemon.json" >"$STATE/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 120); do
        docker info >/dev/null 2>&1 && return
        sleep 0.5
    done
    tail -5 "$STATE/dockerd.log" >&2
    say "dockerd did not answer within 60 s"
    exit 2
}

start_registry() {
    (: <"/dev/tcp/127.0.0.1/$REGISTRY_PORT") 2>/dev/null && return
    mkdir -p "$STATE/registry"
    cat >"$STATE/registry.yml" <<YAML
version: 0.1
storage: {filesystem: {rootdirectory: $STATE/registry}, delete: {enabled: true}}
http: {addr: "127.0.0.1:$REGISTRY_PORT"}
YAML
    say "starting a registry on 127.0.0.1:$REGISTRY_PORT; its log: $STATE/registry.log"
    setsid docker-registry serve "$STATE/registry.yml" >"$STATE/registry.log" 2>&1 </dev/null &
    for _ in $(seq 60); do
        (: <"/dev/tcp/127.0.0.1/$REGISTRY_PORT") 2>/dev/null && return
        sleep 0.25
    done
    say "the registry did not answer within 15 s"
    exit 2
}

start_engine
[[ ${1:-start} != registry ]] || start_registry
