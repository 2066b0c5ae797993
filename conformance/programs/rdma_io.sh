#!/usr/bin/env bash
# Streams of the crate rdma-io, over its transports: SENDs, WRITEs into a ring with credits, WRITEs into a ring with READs.
#
#   rdma_io.sh ANYVERBS one-host|two-hosts [TRANSPORT...]
#
# A TRANSPORT is `send-recv`, `credit-ring` or `read-ring`; by default each. The released crate has neither tests nor
# examples, so rdma_io_stream.rs is built for it. Root, Cargo, libibverbs-dev and librdmacm-dev are needed, and the network
# for the packages, of which the first is rdma-io@0.0.2. CARGO_TARGET_DIR keeps what was built for the next run.
set -euo pipefail

# shellcheck disable=SC2154 # hosts.sh sets `work`
fetch() {
	export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$work/target}
	cargo init --quiet --vcs none --name rdma_io_stream "$work/crate"
	cp "$(dirname "$0")/rdma_io_stream.rs" "$work/crate/src/main.rs"
	(
		cd "$work/crate"
		cargo add --quiet rdma-io@=0.0.2
		cargo add --quiet tokio@1 --features rt,macros,net,time
		cargo build --quiet
	)
}

# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
case ${1-} in
one-host) far=1 ;;
two-hosts) far=2 ;;
*) fail "one-host or two-hosts?" ;;
esac
shift
[ $# -gt 0 ] || set -- send-recv credit-ring read-ring
cd "$work"
program=$CARGO_TARGET_DIR/debug/rdma_io_stream

for transport; do
	client=0 server=0
	under $far timeout 120 stdbuf -oL "$program" server 192.0.2.$far:7471 "$transport" >server.out 2>&1 &
	pid=$!
	within 30 grep -q listens server.out || fail "the server does not listen"
	under 1 timeout 120 "$program" client 192.0.2.$far:7471 "$transport" >client.out 2>&1 || client=$?
	wait $pid || server=$?
	tail -n 5 client.out server.out
	[ $client = 0 ] && [ $server = 0 ] || fail "$transport: the client ended with $client, the server with $server"
done
