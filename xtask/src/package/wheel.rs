//! The Python wheel: the command with the libraries inside, and a small module.

use super::archive::{Entry, Tree, sha256};
use super::build::{Built, check_size, read};
use super::licences;
use crate::workspace::root;

const MODULE: [&str; 3] = ["__init__.py", "__main__.py", "pytest_plugin.py"];
/// The same as in the build: glibc 2.28.
const PLATFORM: &str = "manylinux_2_28";

fn tag(built: &Built) -> String {
    format!("py3-none-{PLATFORM}_{}", built.machine.arch)
}

pub(super) fn name(built: &Built) -> String {
    format!("anyverbs-{}-{}.whl", built.version, tag(built))
}

pub(super) fn make(built: &Built, one_file: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut tree = Tree::default();
    for name in MODULE {
        tree.file(format!("anyverbs/{name}"), read(&root().join("packaging/python").join(name))?);
    }
    // A wheel cannot hold links, and seven copies of one library would be seven devices: the command lays them out.
    tree.executable("anyverbs/bin/anyverbs", one_file);
    let info = format!("anyverbs-{}.dist-info", built.version);
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        tree.file(format!("{info}/{name}"), read(&root().join(name))?);
    }
    tree.file(format!("{info}/{}", licences::NAME), &built.licences[..]);
    tree.file(
        format!("{info}/METADATA"),
        format!(
            "Metadata-Version: 2.1\n\
             Name: anyverbs\n\
             Version: {}\n\
             Summary: A complete RDMA device in user space for programs of libibverbs and librdmacm\n\
             License: MIT OR Apache-2.0\n\
             Project-URL: Source, {}\n\
             Classifier: Framework :: Pytest\n\
             Classifier: Operating System :: POSIX :: Linux\n\
             Requires-Python: >=3.8\n\
             Description-Content-Type: text/markdown\n\
             \n\
             Run programs of libibverbs and librdmacm without RDMA hardware, kernel modules or root:\n\
             \n\
             \x20   anyverbs run -- ibv_devinfo -v\n\
             \x20   anyverbs run -- pytest\n",
            built.version,
            env!("CARGO_PKG_REPOSITORY"),
        ),
    );
    tree.file(
        format!("{info}/WHEEL"),
        format!(
            "Wheel-Version: 1.0\nGenerator: anyverbs-xtask\nRoot-Is-Purelib: false\nTag: {}\n",
            tag(built)
        ),
    );
    tree.file(
        format!("{info}/entry_points.txt"),
        "[console_scripts]\nanyverbs = anyverbs:main\n\n[pytest11]\nanyverbs = anyverbs.pytest_plugin\n",
    );
    check_size("the wheel", &tree)?;
    let record = record(&tree, &format!("{info}/RECORD"));
    tree.file(format!("{info}/RECORD"), record);
    tree.zip()
}

/// The list of files with their digests, except its own.
fn record(tree: &Tree, itself: &str) -> String {
    let mut lines = String::new();
    for (path, entry) in tree.iter() {
        if let Entry::File { bytes, .. } = entry {
            lines += &format!("{path},sha256={},{}\n", base64(&sha256(bytes)), bytes.len());
        }
    }
    lines + itself + ",,\n"
}

/// Base64 for URLs, without padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let bits = part.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - part.len()));
        for digit in 0..=part.len() {
            text.push(char::from(DIGITS[(bits >> (18 - 6 * digit)) as usize & 63]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (bytes, text) in
            [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "-_8");
    }

    #[test]
    fn the_record_names_every_file() {
        let mut tree = Tree::default();
        tree.file("a.py", "");
        assert_eq!(
            record(&tree, "RECORD"),
            "a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nRECORD,,\n"
        );
    }
}
