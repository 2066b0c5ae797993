#!/bin/sh
# One file, as some user without capabilities, on a read-only root without /dev/shm. Only /tmp can be written to.
set -eu

umount -l /dev/shm 2> /dev/null || true
rm -rf /dev/shm
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 tmpfs /tmp
as_user="setpriv --reuid 12345 --regid 12345 --clear-groups --bounding-set=-all --no-new-privs"
anyverbs=$(echo /packages/anyverbs-*-linux-gnu)
HOME=/nonexistent $as_user sh /cases/use.sh "$anyverbs"
"$anyverbs" licenses | grep -q "^libc [0-9]"
dir=$(HOME=/nonexistent $as_user "$anyverbs" lib-dir)
case $dir in
    /tmp/anyverbs-12345/*) ;;
    *) echo "the libraries lie in $dir"; exit 1 ;;
esac

# A directory without room for a file is passed over, and nothing is left there.
mkdir /tmp/full
mount -t tmpfs -o size=4k,mode=700,uid=12345 tmpfs /tmp/full
XDG_RUNTIME_DIR=/tmp/full $as_user env -u HOME "$anyverbs" run -- ibv_devinfo > /tmp/out || { cat /tmp/out; exit 1; }
grep -q PORT_ACTIVE /tmp/out
[ -z "$(find /tmp/full ! -type d)" ]
[ "$(ls /tmp/full)" = anyverbs ]
umount /tmp/full

# A directory that another user made before is not trusted.
rm -rf /tmp/anyverbs-12345
mkdir -m 777 /tmp/anyverbs-12345
if HOME=/nonexistent $as_user "$anyverbs" lib-dir > /tmp/out 2>&1; then
    echo "a directory of another user was trusted"
    exit 1
fi
grep -q 'of yours alone' /tmp/out || { cat /tmp/out; exit 1; }

# Where nothing can hold them, one line says so.
mount -o remount,bind,ro /tmp
if message=$(HOME=/nonexistent $as_user "$anyverbs" run -- true 2>&1); then
    echo "it ran without libraries"
    exit 1
fi
case $message in
    *"no directory can hold the libraries"*"set TMPDIR"*) ;;
    *) echo "$message"; exit 1 ;;
esac
