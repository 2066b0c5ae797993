#!/usr/bin/env bash
# The tests of mpi4py itself, by three ranks of Debian's Open MPI over UCX, on one host.
#
#   mpi4py_suite.sh ANYVERBS [UCX_TLS [OPTION-OF-RUNTESTS...]]
#
# The default is UCX_TLS=rc,self. The tests are those of the version that Debian has, from PyPI. They run on Debian's
# build. Root, the network for the source, and these packages are needed:
#
#   apt-get install --no-install-recommends openmpi-bin python3-mpi4py python3-pip python3-venv
set -euo pipefail

# pip makes the package's metadata in an environment of its own, and compiles nothing.
# shellcheck disable=SC2154 # hosts.sh sets `work`
fetch() {
	local version
	version=$(/usr/bin/python3 -c 'import mpi4py; print(mpi4py.__version__)')
	/usr/bin/python3 -m venv "$work/venv"
	"$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
		--dest "$work" "mpi4py==$version"
	mkdir "$work/source"
	tar --extract --file "$work/mpi4py-$version.tar.gz" --directory "$work/source" --strip-components 1
}

# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
need openmpi-bin /usr/bin/mpirun.openmpi
need python3-mpi4py /usr/lib/python3/dist-packages/mpi4py
transports=${1-rc,self}
[ $# = 0 ] || shift
cd "$work"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
# A process that has findings of the checker, and no failed test, ends with 66. That must not end the job. Findings are judged apart.
[ -z "${ANYVERBS_CHECK-}" ] || export OMPI_MCA_orte_abort_on_non_zero_status=0
# docs/differences.md says what `osc/ucx` of Open MPI cannot do. Where processors are few, ranks that start others take long.
status=0
UCX_TLS=$transports under 1 timeout 1500 mpirun.openmpi --mca pml ucx --mca osc ^ucx --bind-to none -n 3 \
	--mca pmix_base_exchange_timeout 300 --mca pmix_server_max_wait 300 --output-filename "$work/ranks:nojobid" \
	/usr/bin/python3 source/test/runtests.py --no-builddir "$@" >mpirun.out 2>&1 || status=$?
[ -z "${ANYVERBS_CHECK-}" ] || [ $status != 66 ] || status=0
for rank in 0 1 2; do
	errors=$work/ranks/rank.$rank/stderr
	grep --extended-regexp '^(Ran|OK|FAILED|ERROR:|FAIL:)' "$errors" | sed "s/^/rank $rank: /"
	grep --quiet '^OK' "$errors" || status=1
done
[ $status = 0 ] || tail -n 100 mpirun.out >&2
exit $status
