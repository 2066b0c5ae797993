#!/bin/sh
# The archive, unpacked, installed and removed by a user in a home directory, with the mistakes that users make.
set -eu

mkdir -m 755 /home/someone /home/full
chown 12345:12345 /home/someone
mount -t tmpfs -o size=4m,uid=12345 tmpfs /home/full
cat > /tmp/install.sh << 'END'
set -eu
# Runs a command that must fail, and say why.
refused() {
    said=$1
    shift
    if "$@" > refused 2>&1; then
        echo "it was taken: $*"
        exit 1
    fi
    grep -q "$said" refused || { cat refused; exit 1; }
    rm refused
}
cd "$HOME"
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
cd anyverbs-*-linux-gnu
# It works where it was unpacked.
[ "$(bin/anyverbs lib-dir)" = "$PWD/lib" ]
refused "name one with --prefix" env -u HOME ./install.sh
refused "name one with --prefix" ./install.sh --prefix ""
refused "usage" ./install.sh --prefix
refused "a space" ./install.sh --prefix "$HOME/my programs"
[ ! -e "$HOME/my programs" ]
refused "Permission denied" ./install.sh --prefix /usr/local
refused "not installed" ./install.sh --uninstall --prefix "$HOME/opt"
# An installation that finds no room leaves nothing unfinished.
refused "No space left" ./install.sh --prefix /home/full
[ "$(find /home/full)" = /home/full ]
./install.sh --prefix "$HOME/opt" > /dev/null
# Once more, over itself, as for a new version.
./install.sh --prefix "$HOME/opt" > /dev/null
cd "$HOME"
mv anyverbs-*-linux-gnu unpacked
[ "$(opt/bin/anyverbs lib-dir)" = "$HOME/opt/lib/anyverbs" ]
[ "$(ls opt/lib)" = anyverbs ]
[ "$(ls opt/bin)" = anyverbs ]
[ -s opt/share/man/man1/anyverbs-run.1 ]
[ -s opt/share/bash-completion/completions/anyverbs ]
grep -q "^libc [0-9]" opt/share/doc/anyverbs/THIRD-PARTY-LICENSES.txt
opt/bin/anyverbs licenses | cmp - opt/share/doc/anyverbs/THIRD-PARTY-LICENSES.txt
sh /cases/use.sh "$HOME/opt/bin/anyverbs"
echo kept > opt/share/kept
unpacked/install.sh --uninstall --prefix opt > /dev/null
# What somebody else has put there stays, with its directories. So do directories that were there before.
[ "$(find opt | sort | tr '\n' ' ')" = "opt opt/share opt/share/kept " ]
mkdir -p mine/bin
unpacked/install.sh --prefix mine > /dev/null
unpacked/install.sh --prefix mine > /dev/null
unpacked/install.sh --uninstall --prefix mine > /dev/null
[ "$(find mine | sort | tr '\n' ' ')" = "mine mine/bin " ]
END
HOME=/home/someone setpriv --reuid 12345 --regid 12345 --clear-groups sh /tmp/install.sh

# Root installs for all users, whatever its own files are like.
cd /tmp
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
(umask 077 && anyverbs-*-linux-gnu/install.sh --prefix /opt/anyverbs > /dev/null)
setpriv --reuid 12345 --regid 12345 --clear-groups /opt/anyverbs/bin/anyverbs lib-dir > /dev/null
