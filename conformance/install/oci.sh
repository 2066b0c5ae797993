#!/bin/sh
# The image: its digests are true, and `COPY --from` of it works in an image with a C library, which this root is.
set -eu

cat > /tmp/copy_from.py << 'END'
import gzip
import hashlib
import io
import json
import sys
import tarfile

image = tarfile.open(sys.argv[1])
read = lambda path: image.extractfile(path).read()


def blob(descriptor):
    algorithm, digest = descriptor["digest"].split(":")
    content = read(f"blobs/{algorithm}/{digest}")
    assert hashlib.new(algorithm, content).hexdigest() == digest
    assert len(content) == descriptor["size"]
    return content


assert json.loads(read("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
(found,) = json.loads(read("index.json"))["manifests"]
manifest = json.loads(blob(found))
config = json.loads(blob(manifest["config"]))
assert config["os"] == "linux" and config["architecture"] == found["platform"]["architecture"]
assert len(manifest["layers"]) == len(config["rootfs"]["diff_ids"])
for layer, difference in zip(manifest["layers"], config["rootfs"]["diff_ids"]):
    content = gzip.decompress(blob(layer))
    assert "sha256:" + hashlib.sha256(content).hexdigest() == difference
    tarfile.open(fileobj=io.BytesIO(content)).extractall("/")
END
python3 /tmp/copy_from.py /packages/anyverbs-*-linux-gnu.oci.tar
grep -q "^libc [0-9]" /usr/local/share/doc/anyverbs/THIRD-PARTY-LICENSES.txt
sh /cases/use.sh /usr/local/bin/anyverbs
