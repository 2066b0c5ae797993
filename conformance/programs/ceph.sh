#!/usr/bin/env bash
# A cluster of Ceph whose messages go by RDMA: a monitor, one OSD in memory, a client.
#
#   ceph.sh ANYVERBS one-host|two-hosts
#
# With two hosts the OSD is alone on the second one. Objects of many sizes are stored, fetched and compared. Then `rados
# bench` writes for ten seconds, and reads and compares what it wrote. Root and these packages are needed:
#
#   apt-get install --no-install-recommends ceph-mon ceph-osd ceph-common
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "$0")/hosts.sh"
need ceph-mon /usr/bin/ceph-mon /usr/bin/monmaptool
need ceph-osd /usr/bin/ceph-osd
need ceph-common /usr/bin/rados /usr/bin/ceph
case ${1-} in
one-host) far=1 ;;
two-hosts) far=2 ;;
*) fail "one-host or two-hosts?" ;;
esac
SIZES="0 1 4095 4096 4097 65536 131073 1000000 4194304 16777216"

fsid=$(cat /proc/sys/kernel/random/uuid)
export CEPH_CONF=$work/ceph.conf
cat >"$CEPH_CONF" <<END
[global]
fsid = $fsid
mon_host = 192.0.2.1
ms_type = async+rdma
ms_async_rdma_device_name = anyverbs0
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = $work
admin_socket = $work/\$name.asok
log_file = $work/\$name.log
crash_dir = $work
keyring = $work/keyring
mon_data = $work/mon
osd_data = $work/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0

[client]
admin_socket =
log_file = $work/client.log
END
cd "$work"
mkdir mon osd

show_logs() {
	local log
	for log in "$work"/*.log "$work"/*.out; do
		echo "--- ${log##*/}" >&2
		tail -n 40 "$log" >&2
	done
}
trap '[ $? = 0 ] || show_logs' EXIT

# A command of Ceph that has not ended after two minutes hangs.
client() { under 1 timeout 120 "$@" 2>>client.out; }

ceph-authtool --create-keyring keyring --gen-key -n mon. --cap mon 'allow *' >/dev/null
monmaptool --create --fsid "$fsid" --addv a '[v2:192.0.2.1:3300,v1:192.0.2.1:6789]' monmap >/dev/null
ceph-mon --mkfs --id a --monmap monmap --keyring keyring
under 1 ceph-mon --foreground --id a --public-addr 192.0.2.1 >mon.out 2>&1 &
within 60 client ceph --connect-timeout 5 mon stat || fail "the monitor does not answer"

uuid=$(cat /proc/sys/kernel/random/uuid)
client ceph osd new "$uuid" 0 >/dev/null
under $far ceph-osd --mkfs --id 0 --osd-uuid "$uuid" >mkfs.out 2>&1
under $far ceph-osd --foreground --id 0 --public-addr 192.0.2.$far --cluster-addr 192.0.2.$far >osd.out 2>&1 &
is_up() { client ceph osd stat | grep -q '1 up'; }
within 60 is_up || fail "the OSD is not up"
client ceph osd pool create pool 8 >/dev/null

for size in $SIZES; do
	head -c "$size" /dev/urandom >stored
	client rados --pool pool put "object$size" stored
	client rados --pool pool get "object$size" fetched
	cmp stored fetched || fail "the object of $size bytes differs"
done
echo "objects of $SIZES bytes are right"
client rados --pool pool bench 10 write --no-cleanup --max-objects 500 | tail -n 20
# Reads compare each object with what `write` put there.
client rados --pool pool bench 10 seq | tail -n 12

# Ceph's own count: its messages went by RDMA.
on $far ceph daemon osd.0 perf dump >perf.json
python3 - perf.json <<'END'
import json, sys

with open(sys.argv[1], encoding="ascii") as file:
    counters = json.load(file)
workers = [values for name, values in counters.items() if name.startswith("AsyncMessenger::RDMAWorker")]
for name in "rx_bytes", "tx_bytes":
    total = sum(values[name] for values in workers)
    print(f"OSD, {name} of RDMA: {total}")
    if total < 10 << 20:
        sys.exit(f"{name} counts less than was stored")
END
