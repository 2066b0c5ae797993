#!/usr/bin/env bash
# The tests of PBLAS, and of ScaLAPACK in double precision, by four ranks of Debian's MPICH over UCX, on one host.
#
#   scalapack.sh ANYVERBS [UCX_TLS [PROGRAM...]]
#
# UCX_TLS is `rc,self` by default. A PROGRAM is the name of one of the tests, as in `xdlu` or `PBLAS/dpb1tst`. The tests
# check their own results, and say how many were wrong. LIMIT is the time that one may take, 900 seconds by default. Root
# and these packages are needed:
#
#   apt-get install --no-install-recommends scalapack-mpi-test mpich
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
tests=/usr/lib/x86_64-linux-gnu/scalapack/mpich-tests
need scalapack-mpi-test "$tests"
need mpich /usr/bin/mpiexec.mpich
transports=${1-rc,self}
[ $# = 0 ] || shift
cd "$work"
cp /usr/share/scalapack/*.dat /usr/share/scalapack/PBLAS/*.dat .
if [ $# = 0 ]; then
	for path in "$tests"/PBLAS/*tst "$tests"/xd*; do set -- "$@" "${path#"$tests"/}"; done
fi
# Without the size, long messages into derived datatypes fail (docs/differences.md). Ranks of one host would take shared
# memory of MPICH's own.
export UCX_TLS=$transports UCX_RC_SEG_SIZE=8193 MPIR_CVAR_NOLOCAL=1

# A test says so in one of four ways; the third line is a row of PBLAS: name, all, passed, failed, skipped.
is_wrong() {
	grep --extended-regexp --quiet \
		-e '[1-9][0-9]* tests completed and failed' \
		-e 'FAILED *(\*+)?$' \
		-e '^ *\| +P[A-Z0-9]+ +[0-9]+ +[0-9]+ +[1-9][0-9]* +[0-9]+' "$1"
}

failed=()
for program; do
	name=${program##*/} status=0
	under 1 timeout "${LIMIT-900}" mpiexec.mpich -n 4 "$tests/$program" >"$name.out" 2>&1 || status=$?
	right=$(grep --count --extended-regexp 'PASSED' "$name.out" || true)
	if [ $status = 0 ] && [ "$right" -gt 0 ] && ! is_wrong "$name.out"; then
		echo "$name: passes, with $right lines that say so"
	else
		echo "$name: FAILS, with status $status and $right lines of passed tests"
		tail -n 20 "$name.out" >&2
		failed+=("$name")
	fi
done
[ ${#failed[@]} = 0 ] || fail "${#failed[@]} of $# failed: ${failed[*]}"
echo "all $# pass"
