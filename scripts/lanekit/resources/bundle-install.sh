#!/bin/sh
# Join, check and install a lane bundle; then run lanekit in it. Needs no network.
#
#   sh bundle-install.sh [--to DIR] [--python PYTHON] [-- LANEKIT ARGUMENTS]
#
#   --to DIR         folder of its own for everything (default: ./lane)
#   --python PYTHON  the machine's Python; packages are linked from its environment
#   -- ...           afterwards run DIR/lanekit with these arguments, e.g. run vllm
#
# Exit 2: a part is missing or damaged (each is named), the disk is full, or the machine's Python
# does not fit. A call that was interrupted is made again; results of earlier runs stay.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
to=./lane
python=python3
while [ $# -gt 0 ]; do
    case $1 in
        --to | --python) [ $# -gt 1 ] || { echo "bundle: $1 needs a value" >&2; exit 2; } ;;
    esac
    case $1 in
        --to) to=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "bundle: unknown option $1" >&2; sed -n '2,11p' "$0" >&2; exit 2 ;;
    esac
done

digest() { sha256sum | cut -d' ' -f1; }

# Parts are named one by one: a copy of many files usually loses one, not all.
join() {
    [ -f "$here/bundle.sha256" ] || { echo "bundle: missing: bundle.sha256" >&2; exit 2; }
    bad=0
    while read -r sum name; do
        [ "$name" = bundle.tar ] && [ ! -f "$here/bundle.tar" ] && continue
        if [ ! -f "$here/$name" ]; then
            echo "bundle: missing: $name" >&2; bad=1
        elif [ "$(digest <"$here/$name")" != "$sum" ]; then
            echo "bundle: damaged: $name" >&2; bad=1
        fi
    done <"$here/bundle.sha256"
    [ "$bad" -eq 0 ] || { echo "Copy the named files again." >&2; exit 2; }
    whole=$(sed -n 's/  bundle\.tar$//p' "$here/bundle.sha256")
    set -- "$here"/bundle.tar*
    [ "$(cat "$@" | digest)" = "$whole" ] || {
        echo "bundle: the parts do not make up the whole: $* " >&2
        echo "Remove parts of another bundle from $here." >&2
        exit 2
    }
    require_room "$@"
    # What was installed before goes first, but for what its runs left.
    rm -rf "$to/lanekit" "$to/installed.sha256" "$to/bundle/wheels" "$to"/bundle/*.wheels
    for old in "$to"/bundle/tree/*; do
        [ "${old##*/}" = results ] || rm -rf "$old"
    done
    cat "$@" | tar -xf - -C "$to" || {
        echo "bundle: cannot unpack into $to: free space there, then run this again" >&2
        exit 2
    }
}

# The archive is unpacked, and its wheels once more: less than twice its size never suffices.
require_room() {
    needed=$(($(cat "$@" | wc -c) / 512))
    free=$(df -Pk "$to" | tail -n 1 | tr -s ' ' | cut -d' ' -f4)
    [ "$free" -ge "$needed" ] || {
        echo "bundle: $to has $((free / 1024)) MiB free, needs $((needed / 1024)) and more" >&2
        echo "Free space there, or name another folder: --to DIR" >&2
        exit 2
    }
}

install() {
    wanted=$(sed -n 's/.*"python": "\(.*\)".*/\1/p' "$to/bundle/bundle.json")
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || found=none
    [ "$found" = "$wanted" ] || {
        echo "bundle: made for Python $wanted, but $python is $found" >&2
        echo "Name one that fits: --python PATH" >&2
        exit 2
    }
    for list in "$to"/bundle/*.wheels; do
        name=$(basename "$list" .wheels)
        "$python" "$to/bundle/bundle_environment.py" "$to/bundle" "$name" "$to/env/$name"
    done
    cat >"$to/lanekit" <<END
#!/bin/sh
# lanekit of this bundle: a run uses the environments that came with it.
if [ "\${1-}" = run ]; then
    set -- "\$@" --server-python "$to/env/server/bin/python"
    [ -d "$to/env/aiperf" ] && set -- "\$@" --aiperf-python "$to/env/aiperf/bin/python"
fi
PYTHONPATH="$to/bundle/tree/scripts" exec "$to/env/lanekit/bin/python" -m lanekit "\$@"
END
    chmod +x "$to/lanekit"
}

mkdir -p "$to"
to=$(CDPATH='' cd -- "$to" && pwd)
if [ -x "$to/lanekit" ] && cmp -s "$here/bundle.sha256" "$to/installed.sha256"; then
    echo "bundle: already installed in $to"
else
    join
    install
    cp "$here/bundle.sha256" "$to/installed.sha256"
    echo "bundle: installed in $to; run a lane with $to/lanekit run LANE"
fi
[ $# -eq 0 ] || exec "$to/lanekit" "$@"
