#!/bin/sh
# Uses an installed anyverbs: use.sh ANYVERBS, in a clean root with Debian's ibverbs-utils and rdmacm-utils.
set -eu

anyverbs=$1

# Runs a server, and its client until that reaches it.
pair() {
    server=$1 client=$2
    $server > "$out/server" 2>&1 &
    pid=$!
    tries=0
    until $client > "$out/client" 2>&1; do
        tries=$((tries + 1))
        if [ $tries -ge 100 ] || ! kill -0 $pid 2> "$out/alive"; then
            echo "failed: $client"
            cat "$out/server" "$out/client"
            exit 1
        fi
        sleep 0.1
    done
    wait $pid || { echo "failed: $server"; cat "$out/server"; exit 1; }
}

out=$(mktemp -d)
"$anyverbs" run -- ibv_devinfo > "$out/devinfo"
grep -q PORT_ACTIVE "$out/devinfo" || { cat "$out/devinfo"; exit 1; }
pair "$anyverbs run -- ibv_rc_pingpong -g 0" "$anyverbs run -- ibv_rc_pingpong -g 0 127.0.0.1"
grep -q '1000 iters' "$out/client" || { cat "$out/client"; exit 1; }
pair "$anyverbs run -- rping -s -a 127.0.0.1 -C 10" "$anyverbs run -- rping -c -v -a 127.0.0.1 -C 10"
[ "$(grep -c 'ping data' "$out/client")" = 10 ] || { cat "$out/client"; exit 1; }
rm -r "$out"
