#!/bin/sh
# Uses an installed anyverbs: use.sh ANYVERBS, in a clean root with Debian's ibverbs-utils, rdmacm-utils and perftest.
set -eu

anyverbs=$1
. /cases/pair.sh

"$anyverbs" run -- ibv_devinfo > "$out/devinfo"
grep -q PORT_ACTIVE "$out/devinfo" || { cat "$out/devinfo"; exit 1; }
# The launcher is a program that resolves its own path, as many do, in the view of another.
"$anyverbs" run -- "$anyverbs" run -- ibv_devices > "$out/devices" || { cat "$out/devices"; exit 1; }
pair "$anyverbs run -- ibv_rc_pingpong -g 0" "$anyverbs run -- ibv_rc_pingpong -g 0 127.0.0.1"
grep -q '1000 iters' "$out/client" || { cat "$out/client"; exit 1; }
pair "$anyverbs run -- ib_write_bw -n 200" "$anyverbs run -- ib_write_bw -n 200 127.0.0.1"
grep -q '^ *65536 *200 ' "$out/client" || { cat "$out/client"; exit 1; }
pair "$anyverbs run -- rping -s -a 127.0.0.1 -C 10" "$anyverbs run -- rping -c -v -a 127.0.0.1 -C 10"
[ "$(grep -c 'ping data' "$out/client")" = 10 ] || { cat "$out/client"; exit 1; }
rm -r "$out"
