//! The archive that can be unpacked and used anywhere, or installed under a prefix.

use super::archive::Tree;
use super::build::{Built, check_size, read};
use super::licences;
use crate::workspace::root;

pub(super) fn make(built: &Built, sbom: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut tree = Tree::default();
    // Without the libraries inside, which lie beside it.
    tree.executable("bin/anyverbs", &built.anyverbs[..]);
    tree.graft("lib/", &built.lib());
    tree.graft("share/", &built.share);
    tree.file(format!("share/doc/anyverbs/{}", licences::NAME), &built.licences[..]);
    tree.file("sbom.cdx.json", sbom);
    tree.executable("install.sh", read(&root().join("packaging/install.sh"))?);
    for name in ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        tree.file(name, read(&root().join(name))?);
    }
    check_size("the tarball", &tree)?;
    tree.tar_gz(&format!("{}/", built.stem()), built.epoch)
}
