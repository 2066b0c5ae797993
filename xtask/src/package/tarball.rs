//! The archive that can be unpacked and used anywhere, or installed under a prefix.

use super::archive::Tree;
use super::build::{Built, read};
use crate::workspace::root;

pub(super) fn make(built: &Built, one_file: &[u8], sbom: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut tree = Tree::default();
    // A user who copies only this file has everything.
    tree.executable("bin/anyverbs", one_file);
    tree.graft("lib/", &built.lib());
    tree.graft("share/", &built.share);
    tree.file("sbom.cdx.json", sbom);
    tree.executable("install.sh", read(&root().join("packaging/install.sh"))?);
    for name in ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        tree.file(name, read(&root().join(name))?);
    }
    tree.tar_gz(&format!("{}/", built.stem()), built.epoch)
}
