#!/usr/bin/env bash
# Latency and bandwidth of two ranks of Debian's Open MPI over UCX, from 1 byte to 4 MiB, with the data compared.
#
#   mpi_sizes.sh ANYVERBS one-host|two-hosts [UCX_TLS...]
#
# Runs mpi_sizes.c once for each set of UCX's transports; the default is UCX_TLS=rc,self. With two hosts
# each has a rank, and UCX finds no interface for `tcp` in the second. Root, a C compiler and these packages are needed:
#
#   apt-get install --no-install-recommends openmpi-bin libopenmpi-dev gcc
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
need openmpi-bin /usr/bin/mpirun.openmpi
need libopenmpi-dev /usr/bin/mpicc.openmpi
case ${1-} in
one-host) where=(--host host1:2) ;;
two-hosts) where=(--host host1,host2) ;;
*) fail "one-host or two-hosts?" ;;
esac
topology=$1
shift
[ $# -gt 0 ] || set -- rc,self

mpicc.openmpi -O2 -Wall -o "$work/mpi_sizes" "$(dirname "$0")/mpi_sizes.c"
# Stands for ssh: `agent HOST COMMAND...`.
cat >"$work/agent" <<END
#!/bin/sh
shift
exec nsenter --target $host_2 --net --mount --uts "$anyverbs" run -- sh -c "\$*"
END
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for transports; do
	echo "== $topology, UCX_TLS=$transports"
	# Without a name UCX took the loopback interface of the second host for TCP, and did not connect.
	case $transports in tcp*) devices=eth0 ;; *) devices=anyverbs0:1 ;; esac
	UCX_TLS=$transports UCX_NET_DEVICES=$devices under 1 timeout 600 mpirun.openmpi \
		--mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any \
		--mca plm_rsh_agent "$work/agent" -x UCX_TLS -x UCX_NET_DEVICES --bind-to none "${where[@]}" "$work/mpi_sizes" |
		tee "$work/out"
	grep -q '^every compared byte is right$' "$work/out" || fail "the program did not come to its end"
done
