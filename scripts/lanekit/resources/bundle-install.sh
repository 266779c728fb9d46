#!/bin/sh
# Join, check and install a lane bundle; then run lanekit in it. Needs no network.
#
#   sh bundle-install.sh [--to DIR] [--python PYTHON] [-- LANEKIT ARGUMENTS]
#
#   --to DIR         folder of its own for everything (default: ./lane)
#   --python PYTHON  the machine's Python; packages are linked from its environment
#   -- ...           afterwards run DIR/lanekit with these arguments, e.g. run vllm
#
# Exit 2: a part is missing or damaged (each is named), or the machine's Python does not fit.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
to=./lane
python=python3
while [ $# -gt 0 ]; do
    case $1 in
        --to) to=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --) shift; break ;;
        *) echo "bundle: unknown option $1" >&2; sed -n '2,10p' "$0" >&2; exit 2 ;;
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
    cat "$@" >"$to/joined.tar"
    [ "$(digest <"$to/joined.tar")" = "$whole" ] || {
        echo "bundle: the parts do not make up the whole: $* " >&2
        echo "Remove parts of another bundle from $here." >&2
        exit 2
    }
    tar -xf "$to/joined.tar" -C "$to"
    rm "$to/joined.tar"
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
