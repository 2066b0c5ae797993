//! Files in memory, and the archives that packages are: the same files give the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use anyhow::Context;
use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, Crc};

/// A file or a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    File { mode: u32, bytes: Vec<u8> },
    Link(String),
}

/// Files by their path, which neither begins nor ends with a slash.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tree(BTreeMap<String, Entry>);

impl Tree {
    pub(super) fn file(&mut self, path: impl Into<String>, bytes: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Entry::File { mode: 0o644, bytes: bytes.into() });
    }

    pub(super) fn executable(&mut self, path: impl Into<String>, bytes: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Entry::File { mode: 0o755, bytes: bytes.into() });
    }

    pub(super) fn link(&mut self, path: impl Into<String>, to: impl Into<String>) {
        self.0.insert(path.into(), Entry::Link(to.into()));
    }

    /// Takes over another's files below `prefix`, which is empty or ends with a slash.
    pub(super) fn graft(&mut self, prefix: &str, other: &Tree) {
        for (path, entry) in &other.0 {
            self.0.insert(format!("{prefix}{path}"), entry.clone());
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.0.iter()
    }

    /// The number of bytes in the files.
    pub(super) fn size(&self) -> usize {
        self.0
            .values()
            .map(|entry| if let Entry::File { bytes, .. } = entry { bytes.len() } else { 0 })
            .sum()
    }

    /// [`Self::tar`], compressed.
    pub(super) fn tar_gz(&self, prefix: &str, epoch: u64) -> anyhow::Result<Vec<u8>> {
        gzip(&self.tar(prefix, epoch)?)
    }

    /// A tar archive that belongs to root; every file is as old as `epoch`.
    pub(super) fn tar(&self, prefix: &str, epoch: u64) -> anyhow::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        let header = |kind, mode, size| {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_size(size);
            header.set_mtime(epoch);
            header.set_uid(0);
            header.set_gid(0);
            header.set_username("root").and_then(|()| header.set_groupname("root"))?;
            anyhow::Ok(header)
        };
        let paths = self.0.keys().map(|path| format!("{prefix}{path}")).collect::<Vec<_>>();
        for dir in folders(&paths) {
            let mut header = header(tar::EntryType::Directory, 0o755, 0)?;
            archive.append_data(&mut header, format!("{dir}/"), std::io::empty())?;
        }
        for (path, entry) in paths.iter().zip(self.0.values()) {
            match entry {
                Entry::File { mode, bytes } => {
                    let mut header = header(tar::EntryType::Regular, *mode, bytes.len() as u64)?;
                    archive.append_data(&mut header, path, &bytes[..])
                }
                Entry::Link(to) => {
                    let mut header = header(tar::EntryType::Symlink, 0o777, 0)?;
                    archive.append_link(&mut header, path, to)
                }
            }
            .with_context(|| format!("cannot archive {path}"))?;
        }
        Ok(archive.into_inner()?)
    }

    /// A zip archive. It has no links: there is no way to store one that every reader knows.
    pub(super) fn zip(&self) -> anyhow::Result<Vec<u8>> {
        let (mut archive, mut directory) = (Vec::new(), Vec::new());
        let mut count: u16 = 0;
        for (path, entry) in &self.0 {
            let Entry::File { mode, bytes } = entry else {
                anyhow::bail!("{path} is a link, which a zip archive cannot hold");
            };
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(bytes)?;
            let packed = encoder.finish()?;
            let mut crc = Crc::new();
            crc.update(bytes);
            // The common part of both headers: version 2.0, names in UTF-8, deflate, midnight of the format's first
            // day.
            let mut common = Vec::new();
            for field in [20_u16, 0x800, 8, 0, 0x21] {
                common.extend(field.to_le_bytes());
            }
            for field in [crc.sum(), u32::try_from(packed.len())?, u32::try_from(bytes.len())?] {
                common.extend(field.to_le_bytes());
            }
            common.extend(u16::try_from(path.len())?.to_le_bytes());
            common.extend(0_u16.to_le_bytes());
            let offset = u32::try_from(archive.len())?;
            archive.extend(b"PK\x03\x04");
            archive.extend(&common);
            archive.extend(path.as_bytes());
            archive.extend(packed);
            directory.extend(b"PK\x01\x02");
            // Made on Unix: the upper half of the attributes is the mode of a regular file.
            directory.extend((3_u16 << 8 | 20).to_le_bytes());
            directory.extend(&common);
            directory.extend([0; 6]);
            directory.extend(((0o100_000 | mode) << 16).to_le_bytes());
            directory.extend(offset.to_le_bytes());
            directory.extend(path.as_bytes());
            count += 1;
        }
        let start = u32::try_from(archive.len())?;
        let len = u32::try_from(directory.len())?;
        archive.extend(directory);
        archive.extend(b"PK\x05\x06\0\0\0\0");
        archive.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
        archive.extend(len.to_le_bytes());
        archive.extend(start.to_le_bytes());
        archive.extend([0; 2]);
        Ok(archive)
    }
}

/// Bytes compressed by gzip.
pub(super) fn gzip(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// The folders of files, each after the one that it is in.
fn folders(paths: &[String]) -> BTreeSet<&str> {
    let above =
        |path: &'_ str| -> Vec<usize> { path.match_indices('/').map(|(at, _)| at).collect() };
    paths.iter().flat_map(|path| above(path).into_iter().map(|at| &path[..at])).collect()
}

/// An ar archive, as Debian's packages are.
pub(super) fn ar(members: &[(&str, &[u8])], epoch: u64) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (name, bytes) in members {
        let size = bytes.len();
        archive.extend(
            format!("{name:<16}{epoch:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, "100644").bytes(),
        );
        archive.extend(*bytes);
        if size % 2 == 1 {
            archive.push(b'\n');
        }
    }
    archive
}

/// The SHA-256 of bytes.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).into()
}

/// Bytes in hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn tree() -> Tree {
        let mut tree = Tree::default();
        tree.executable("bin/run", "#!/bin/sh\n");
        tree.file("a/b/c", "text");
        tree.file("a-long-name/".to_owned() + &"x".repeat(150), "long");
        tree
    }

    #[test]
    fn a_tar_archive_has_folders_before_files() {
        let mut tree = tree();
        tree.link("a/link", "b/c");
        let bytes = tree.tar_gz("top/", 7).unwrap();
        assert_eq!(bytes, tree.tar_gz("top/", 7).unwrap());
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let (mode, time) = (entry.header().mode().unwrap(), entry.header().mtime().unwrap());
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            seen.push((entry.path().unwrap().display().to_string(), mode, time, text));
        }
        let position = |path: &str| seen.iter().position(|entry| entry.0 == path).unwrap();
        assert!(
            position("top/a/") < position("top/a/b/")
                && position("top/a/b/") < position("top/a/b/c")
        );
        assert_eq!(seen[position("top/bin/run")].1, 0o755);
        assert!(seen.iter().all(|entry| entry.2 == 7));
        assert!(seen.iter().any(|entry| entry.0.len() > 150 && entry.3 == "long"));
    }

    #[test]
    fn python_reads_the_zip_archive() {
        let dir = std::env::temp_dir().join(format!("anyverbs-zip-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("test.zip");
        std::fs::write(&path, tree().zip().unwrap()).unwrap();
        let script = "import sys, zipfile\n\
            z = zipfile.ZipFile(sys.argv[1])\n\
            assert z.testzip() is None\n\
            print(*(f'{i.filename[:9]} {i.external_attr >> 16:o} {len(z.read(i))}' for i in z.infolist()), sep='\\n')";
        let out =
            std::process::Command::new("python3").args(["-c", script]).arg(&path).output().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&out.stdout),
            "a-long-na 100644 4\na/b/c 100644 4\nbin/run 100755 10\n",
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
    }

    #[test]
    fn a_zip_archive_refuses_links() {
        let mut tree = Tree::default();
        tree.link("a", "b");
        assert!(tree.zip().is_err());
    }

    #[test]
    fn members_of_an_ar_archive_begin_at_even_places() {
        let archive = ar(&[("debian-binary", b"2.0"), ("b", b"xy")], 1);
        assert_eq!(&archive[..24], b"!<arch>\ndebian-binary   ");
        assert_eq!(archive.len(), 8 + 60 + 4 + 60 + 2);
        assert_eq!(&archive[72..74], b"b ");
    }
}
