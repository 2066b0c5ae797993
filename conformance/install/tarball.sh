#!/bin/sh
# The archive, unpacked and installed by a user in a home directory.
set -eu

mkdir -m 755 /home/someone
chown 12345:12345 /home/someone
cat > /tmp/install.sh << 'END'
set -eu
cd "$HOME"
tar xzf /packages/anyverbs-*-linux-gnu.tar.gz
cd anyverbs-*-linux-gnu
# It works where it was unpacked.
[ "$(bin/anyverbs lib-dir)" = "$PWD/lib" ]
./install.sh --prefix "$HOME/opt" > /dev/null
# Once more, over itself, as for a new version.
./install.sh --prefix "$HOME/opt" > /dev/null
cd "$HOME"
rm -r anyverbs-*-linux-gnu
[ "$(opt/bin/anyverbs lib-dir)" = "$HOME/opt/lib/anyverbs" ]
[ "$(ls opt/lib)" = anyverbs ]
[ -s opt/share/man/man1/anyverbs-run.1 ]
[ -s opt/share/bash-completion/completions/anyverbs ]
sh /cases/use.sh "$HOME/opt/bin/anyverbs"
END
HOME=/home/someone setpriv --reuid 12345 --regid 12345 --clear-groups sh /tmp/install.sh
