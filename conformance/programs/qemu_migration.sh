#!/usr/bin/env bash
# Live migration of a guest of QEMU by RDMA, with rdma-pin-all and without.
#
#   qemu_migration.sh ANYVERBS one-host|two-hosts
#
# The guest is the boot sector qemu_migration.S, below QEMU's own translation (TCG), and changes its memory meanwhile.
# qemu_migration.py compares the memories of both ends. Root, gcc and this package are needed:
#
#   apt-get install --no-install-recommends qemu-system-x86
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
need qemu-system-x86 /usr/bin/qemu-system-x86_64
case ${1-} in
one-host) far=1 ;;
two-hosts) far=2 ;;
*) fail "one-host or two-hosts?" ;;
esac
here=$(realpath "$(dirname "$0")")
cd "$work"
gcc -m32 -nostdlib -static -Wl,--build-id=none,-Ttext=0x7c00,--oformat=binary -no-pie -o boot "$here/qemu_migration.S"
[ "$(stat --format %s boot)" = 512 ] || fail "the boot sector has not 512 bytes"
qemu-system-x86_64 --version | head -n 1

start() {
	local host=$1 name=$2
	shift 2
	under "$host" qemu-system-x86_64 -machine pc,accel=tcg -m 128 -nodefaults -display none \
		-drive file=boot,format=raw,snapshot=on -qmp "unix:$name.sock,server=on,wait=off" "$@" >"$name.out" 2>&1 &
}
for pin in pin-all no-pin; do
	start 1 "source-$pin"
	source=$!
	start $far "target-$pin" -S -incoming defer
	target=$!
	if ! python3 "$here/qemu_migration.py" "source-$pin.sock" "target-$pin.sock" 192.0.2.$far "$pin" "$work"; then
		tail -n 40 "source-$pin.out" "target-$pin.out" >&2
		fail "$pin did not pass"
	fi
	kill $source $target
	wait $source $target || true
done
