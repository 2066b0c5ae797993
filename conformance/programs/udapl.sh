#!/usr/bin/env bash
# The tests of uDAPL: dtest, dtestx, dtestsrq.
#
#   udapl.sh ANYVERBS one-host|two-hosts [cma|scm]
#
# The provider `cma`, which is the default, connects by librdmacm; `scm` by a TCP socket of its own. The tests check their
# data, and every program says that it passed. Root and this package are needed:
#
#   apt-get install --no-install-recommends dapl2-utils
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
need dapl2-utils /usr/bin/dtest /usr/bin/dtestx /usr/bin/dtestsrq
case ${1-} in
one-host) far=1 ;;
two-hosts) far=2 ;;
*) fail "one-host or two-hosts?" ;;
esac
provider=${2-cma}
cd "$work"
cat >dat.conf <<'END'
cma u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 "eth0 0" ""
scm u2.0 nonthreadsafe default libdaploscm.so.2 dapl.2.0 "anyverbs0 1" ""
END
export DAT_OVERRIDE=$work/dat.conf

# What a server prints when it listens, and what both sides print when they pass.
declare -A listens=([dtest]='waiting' [dtestx]='waiting to snd addr' [dtestsrq]='server ready')
declare -A passes=([dtest]='DAPL Test Complete. PASSED' [dtestx]='test PASSED' [dtestsrq]='SRQ Test Complete')

run() {
	local program=$1 server=0 client=0 pid side
	local -a role=()
	shift
	[ "$program" != dtestx ] || role=(-c)
	under $far timeout 300 stdbuf -oL "$program" -P "$provider" -s "$@" >server.out 2>&1 &
	pid=$!
	if within 30 grep -q "${listens[$program]}" server.out; then
		under 1 timeout 300 "$program" -P "$provider" "$@" "${role[@]}" -h 192.0.2.$far >client.out 2>&1 || client=$?
	else
		client="not started"
		: >client.out
	fi
	wait $pid || server=$?
	for side in server client; do
		if [ "${!side}" != 0 ] || ! grep -q "${passes[$program]}" $side.out; then
			cat server.out client.out >&2
			fail "$program $*: the $side did not pass (its status: ${!side})"
		fi
	done
	echo "$program $*: passes"
}

run dtest -b 65536
run dtest -p -b 65536
run dtest -D -W -b 65536
run dtestx
run dtestx -b 4096
run dtestsrq
run dtestsrq -c 4 -B 10 -t 20
