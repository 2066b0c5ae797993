#!/bin/sh
# Docker's engine: it loads the image, copies from it in a build, and gives containers the device by its description
# (CDI).
set -eu

mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
if ! grep -q pids /sys/fs/cgroup/cgroup.controllers; then
    # This machine has its controllers in hierarchies of their own.
    umount /sys/fs/cgroup
    mount -t tmpfs tmpfs /sys/fs/cgroup
    for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
        mkdir /sys/fs/cgroup/$controller
        mount -t cgroup -o $controller cgroup /sys/fs/cgroup/$controller
    done
fi
mkdir -p /var/lib/docker /etc/docker
mount -t tmpfs tmpfs /var/lib/docker
mount -t tmpfs tmpfs /run
# Without a network of its own, and with no more than this machine allows.
cat > /etc/docker/daemon.json << 'END'
{
    "features": { "cdi": true },
    "iptables": false, "ip6tables": false, "bridge": "none",
    "default-ulimits": { "nofile": { "Name": "nofile", "Hard": 1024, "Soft": 1024 } }
}
END
dockerd > /tmp/log 2>&1 &
tries=0
until docker version > /tmp/out 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 240 ] || { cat /tmp/log; exit 1; }
    sleep 0.5
done
container() {
    docker run --rm --network=none "$@"
}

docker load --quiet < "$(echo /packages/anyverbs-*-linux-gnu.oci.tar)"
docker image inspect --format '{{.Created}}' anyverbs:0.1.0 > /tmp/out
case $(cat /tmp/out) in
    202[5-9]* | 20[3-9]*) ;;
    *) echo "the image was made in $(cat /tmp/out)"; exit 1 ;;
esac
tar -C / -c --exclude=./usr/share ./usr ./etc ./bin ./sbin ./lib ./lib64 ./root ./tmp |
    docker import - programs:latest
mkdir /tmp/build
printf 'FROM programs\nCOPY --from=anyverbs:0.1.0 / /\n' > /tmp/build/Dockerfile
DOCKER_BUILDKIT=0 docker build --quiet --network=none --tag with-anyverbs /tmp/build
container --volume /cases:/cases with-anyverbs sh /cases/use.sh anyverbs
container --volume /cases:/cases --read-only --tmpfs /tmp:exec --cap-drop=all --user 12345 \
    with-anyverbs sh /cases/use.sh anyverbs

cd /tmp
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
anyverbs-*-linux-gnu/install.sh --prefix /opt/anyverbs > /dev/null
/opt/anyverbs/bin/anyverbs cdi --output /etc/cdi/anyverbs.json
if container programs ibv_devinfo > /tmp/out 2>&1; then
    echo "a container without the device has one"
    exit 1
fi
container --device anyverbs/rdma=anyverbs0 --volume /cases:/cases --read-only --tmpfs /tmp \
    --cap-drop=all --user 12345 programs sh /cases/use.sh anyverbs
