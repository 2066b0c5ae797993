# shellcheck shell=bash
# Two hosts with a cable between them. The scripts of this folder source this file first.
#
# It starts the script again in namespaces of its own: network, mounts, processes, host name. Nothing that the script does
# there reaches the machine's network, and every process that it starts ends with it. A script that needs the network first
# defines a function `fetch` before it sources this file; it runs outside, with the script's arguments.
#
#   anyverbs   the command, which is the script's first argument
#   work       a folder, which is empty at the start and removed at the end. KEEP=DIR names one that stays
#   on HOST COMMAND...      runs a command on host 1, which is 192.0.2.1, or on host 2, which is 192.0.2.2
#   under HOST COMMAND...   the same below `anyverbs run`
#   need PACKAGE FILE...    ends the script if a file is missing, and names the package of Debian that has it
#   fail TEXT...            ends the script with status 1
#   within SECONDS COMMAND...   repeats a command until it succeeds, or fails after that time

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

need() {
	local package=$1 file
	shift
	for file; do
		[ -e "$file" ] || fail "$file is missing: apt-get install --no-install-recommends $package"
	done
}

within() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		[ $SECONDS -lt $end ] || return 1
		sleep 0.1
	done
}

on() {
	local host=$1
	shift
	if [ "$host" = 1 ]; then "$@"; else nsenter --target "$host_2" --net --mount --uts --wdns="$PWD" "$@"; fi
}

under() {
	local host=$1
	shift
	on "$host" "$anyverbs" run -- "$@"
}

if [ -z "${HOSTS_INSIDE-}" ]; then
	[ $# -ge 1 ] || fail "its first argument is the path of the command anyverbs; the head of the file has the rest"
	[ "$(id -u)" = 0 ] || fail "root is needed, for namespaces"
	[ -x "$1" ] || fail "$1 is no command"
	anyverbs=$(realpath "$1")
	shift
	if [ -n "${KEEP-}" ]; then
		mkdir -p "$KEEP"
		work=$(realpath "$KEEP")
		[ -z "$(ls -A "$work")" ] || fail "$KEEP is not empty"
	else
		work=$(mktemp -d)
		trap 'rm -rf "$work"' EXIT
	fi
	if declare -F fetch >/dev/null; then fetch "$@"; fi
	status=0
	HOSTS_INSIDE=1 anyverbs=$anyverbs work=$work unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc \
		bash "$0" "$@" || status=$?
	exit $status
fi

# An address is usable at once: nobody else is on the cable.
set_up_host() {
	mount -t sysfs sysfs /sys
	hostname "host$1"
	echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
	ip link set lo up
}

printf '127.0.0.1 localhost\n::1 localhost\n192.0.2.1 host1\n192.0.2.2 host2\n' >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts
set_up_host 1
export -f set_up_host
# shellcheck disable=SC2016 # the inner shell expands it
unshare --net --mount --uts bash -euc 'set_up_host 2; touch "$work/host_2"; exec sleep infinity' &
host_2=$!
within 10 test -e "$work/host_2" || fail "the second host did not start"
rm "$work/host_2"
ip link add eth0 type veth peer name eth0 netns "$host_2"
for host in 1 2; do
	on $host ip address add 192.0.2.$host/24 dev eth0
	on $host ip link set eth0 up
done
