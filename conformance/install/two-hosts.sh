#!/bin/sh
# Two hosts: two network namespaces with a cable between them, and the command as one file.
set -eu

anyverbs=$(echo /packages/anyverbs-*-linux-gnu)
unshare --net sleep infinity &
host=$!
until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
    sleep 0.01
done
there="nsenter --net=/proc/$host/ns/net"
ip link add near type veth peer name far netns $host
ip address add 10.77.0.1/24 dev near
ip link set near up
$there ip address add 10.77.0.2/24 dev far
$there ip link set far up
$there ip link set lo up

. /cases/pair.sh
run="$anyverbs run --"
for program in ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong; do
    pair "$run $program -g 0" "$there $run $program -g 0 10.77.0.1"
    grep -q '1000 iters' "$out/client" || { cat "$out/client"; exit 1; }
done
for program in ib_write_bw ib_read_bw ib_send_bw; do
    pair "$run $program -n 200" "$there $run $program -n 200 10.77.0.1"
    grep -q '^ *65536 *200 ' "$out/client" || { cat "$out/client"; exit 1; }
done
pair "$run ib_atomic_lat -n 100" "$there $run ib_atomic_lat -n 100 10.77.0.1"
pair "$run rping -s -a 10.77.0.1 -C 10" "$there $run rping -c -v -a 10.77.0.1 -C 10"
[ "$(grep -c 'ping data' "$out/client")" = 10 ] || { cat "$out/client"; exit 1; }
kill $host
