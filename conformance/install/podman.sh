#!/bin/sh
# A real container engine: it loads the image, copies from it in a build, and gives containers the device by its
# description (CDI).
set -eu

mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /var/lib/containers
mount -t tmpfs tmpfs /var/lib/containers
mount -t tmpfs tmpfs /run
# Without systemd, and with no more than this machine allows.
cat > /etc/containers/containers.conf << 'END'
[engine]
events_logger = "file"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
END
container() {
    podman run --rm --cgroups=disabled --network=none "$@"
}

podman load --quiet < "$(echo /packages/anyverbs-*-linux-gnu.oci.tar)"
tar -C / -c --exclude=./usr/share --exclude=./usr/lib/python3 ./usr ./etc ./bin ./sbin ./lib ./lib64 ./root ./tmp |
    podman import --quiet - programs:latest
mkdir /tmp/build
printf 'FROM programs\nCOPY --from=anyverbs:0.1.0 / /\nRUN anyverbs run -- ibv_devinfo\n' > /tmp/build/Containerfile
podman build --isolation=chroot --network=host --tag with-anyverbs /tmp/build
container --volume /cases:/cases with-anyverbs sh /cases/use.sh anyverbs
container --volume /cases:/cases --read-only --cap-drop=all --user 12345 \
    with-anyverbs sh /cases/use.sh anyverbs

cd /tmp
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
anyverbs-*-linux-gnu/install.sh --prefix /opt/anyverbs > /dev/null
/opt/anyverbs/bin/anyverbs cdi --output /etc/cdi/anyverbs.json
if container programs ibv_devinfo > /tmp/out 2>&1; then
    echo "a container without the device has one"
    exit 1
fi
device="--device anyverbs/rdma=anyverbs0"
container $device programs ibv_devinfo > /tmp/out
grep -q PORT_ACTIVE /tmp/out || { cat /tmp/out; exit 1; }
container $device --volume /cases:/cases --read-only --tmpfs /tmp --cap-drop=all --user 12345 \
    programs sh /cases/use.sh anyverbs
# Two containers of one pod.
podman run --detach --rm --name server --cgroups=disabled --network=none $device programs \
    ibv_rc_pingpong -g 0 > /dev/null
tries=0
until podman run --rm --cgroups=disabled --network=container:server $device programs \
    ibv_rc_pingpong -g 0 127.0.0.1 > /tmp/out 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 20 ] || { cat /tmp/out; exit 1; }
done
grep -q '1000 iters' /tmp/out
