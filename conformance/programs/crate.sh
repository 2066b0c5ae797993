#!/bin/sh
# Tests and examples of a released crate on one host with an Ethernet interface.
#
#   crate.sh ANYVERBS NAME@VERSION COMMAND...
#
# Takes the crate from Cargo's registry to a directory below $TMPDIR, and builds its tests and examples there with the
# crate's own Cargo.lock. Then each COMMAND, a line for the shell, runs in that directory, in a network of its own:
# 192.0.2.1 is its address. `cargo` is offline there, and every program that it runs is under `anyverbs run`. Root, a C
# compiler, CMake, libclang, libibverbs-dev and librdmacm-dev are needed, and the network for the packages. FEATURES names
# features of the crate. CARGO_TARGET_DIR keeps what was built for the next run.
# docs/programs.md has the results of these:
#
#   crate.sh target/dist/bin/anyverbs ibverbs@0.9.2 'cargo test --locked --lib' 'cargo run --example loopback'
#   crate.sh target/dist/bin/anyverbs rdma-sys@0.3.0 \
#     'cargo run --example server & sleep 2; cargo run --example client 192.0.2.1 7471; wait'
#   RUSTC_WORKSPACE_WRAPPER=CAP_LINTS FEATURES='cm raw' crate.sh target/dist/bin/anyverbs async-rdma@0.5.0 \
#     'cargo test --locked --features "cm raw" --tests -- --skip with_imm' 'cargo run --example rpc' \
#     'cargo run --example cm_server --features "cm raw" & sleep 2
#      cargo run --example cm_client --features "cm raw" 192.0.2.1 7471; wait'
#   (`cargo run --example server` and `client` fail, as the tests `with_imm` do)
#   (CAP_LINTS is a file with `#!/bin/sh` and `exec "$@" --cap-lints warn`)
#   crate.sh target/dist/bin/anyverbs sideway@0.4.3 'cargo test --locked' 'cargo run --example show_gids' \
#     'cargo run --example ibv_devinfo' \
#     'cargo run --example rc_pingpong -- -d anyverbs0 -g 0 & sleep 2
#      cargo run --example rc_pingpong -- -d anyverbs0 -g 0 127.0.0.1; wait' \
#     'cargo run --example rc_pingpong_split -- -d anyverbs0 -g 0 & sleep 2
#      cargo run --example rc_pingpong_split -- -d anyverbs0 -g 0 127.0.0.1; wait' \
#     'cargo run --example cmtime -- -b 192.0.2.1 & sleep 2
#      cargo run --example cmtime -- -b 192.0.2.1 -s 192.0.2.1; wait'
set -eu
anyverbs=$1 crate=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# It reads the manifest, and for that unpacks the crate. A crate that is a library alone cannot be had otherwise but as a
# dependency, which would be built without its lock file.
cargo info --quiet --registry crates-io "$crate" >/dev/null
cp -R "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"${crate%@*}-${crate#*@}" source
cd source
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$work/target}
export anyverbs work CARGO_TARGET_DIR
cargo test --quiet --locked --features "${FEATURES:-}" --no-run
# A network of its own: nothing reaches the machine's.
unshare -n sh -eu -c '
# All addresses are there from the start: the view of /sys has those of the moment at which a program starts.
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 192.0.2.1/24 dev eth0
ip link set eth1 up
ip link set eth0 up
export CARGO_NET_OFFLINE=true
for command in "$@"; do
	echo "== $command"
	timeout 600 "$anyverbs" run -- sh -eu -c "$command"
done
' sh "$@"
