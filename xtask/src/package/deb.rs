//! Debian packages: the command with its libraries in a directory of their own, and one that gives them to every program.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::archive::{Entry, Tree, ar};
use super::build::{Built, check_size, read};
use crate::workspace::root;

const LIB: &str = "usr/lib/anyverbs";
/// The directory that the system's loader searches.
const FOR_EVERY: &str = "usr/lib/anyverbs-libibverbs";

/// File names and packages.
pub(super) fn make(built: &Built) -> anyhow::Result<[(String, Vec<u8>); 2]> {
    Ok([command(built)?, for_every_program(built)?])
}

fn command(built: &Built) -> anyhow::Result<(String, Vec<u8>)> {
    let mut tree = Tree::default();
    tree.executable("usr/bin/anyverbs", &built.anyverbs[..]);
    for (path, entry) in built.lib().iter() {
        match entry {
            // Debian's libraries are not executable.
            Entry::File { bytes, .. } => tree.file(format!("{LIB}/{path}"), &bytes[..]),
            Entry::Link(to) => tree.link(format!("{LIB}/{path}"), to),
        }
    }
    for (path, entry) in built.share.iter() {
        let Entry::File { bytes, .. } = entry else { continue };
        if path.starts_with("man/") {
            let mut page = GzEncoder::new(Vec::new(), Compression::best());
            page.write_all(bytes)?;
            tree.file(format!("usr/share/{path}.gz"), page.finish()?);
        } else {
            let path = path.replace("zsh/site-functions", "zsh/vendor-completions");
            tree.file(format!("usr/share/{path}"), &bytes[..]);
        }
    }
    let fields = "Depends: libc6 (>= 2.28), libgcc-s1 | libgcc1\n\
        Suggests: anyverbs-libibverbs, ibverbs-utils, rdmacm-utils\n\
        Description: RDMA device in user space for programs of libibverbs\n \
        Runs programs of libibverbs and librdmacm without RDMA hardware, kernel\n \
        modules or root. Processes reach each other on one host through shared\n \
        memory, and other hosts by RoCE v2.\n";
    finish(built, "anyverbs", tree, fields, &built.licences)
}

/// Has the loader find the libraries without `anyverbs run`. It leaves the files of the system's own as they are.
fn for_every_program(built: &Built) -> anyhow::Result<(String, Vec<u8>)> {
    let mut tree = Tree::default();
    // The first of the loader's directories that has a library wins, and they are read in the order of their names.
    tree.file("etc/ld.so.conf.d/00-anyverbs.conf", format!("/{FOR_EVERY}\n"));
    tree.link(format!("{FOR_EVERY}/libibverbs.so.1"), "../anyverbs/libibverbs.so.1");
    for name in ["libibverbs.so", "librdmacm.so"] {
        tree.link(format!("{FOR_EVERY}/{name}"), format!("{name}.1"));
    }
    tree.graft(&format!("{FOR_EVERY}/"), &built.aliases);
    let fields = format!(
        "Depends: anyverbs (= {})\n\
         Description: RDMA device in user space for every program of this system\n \
         Has the dynamic loader find the libibverbs and librdmacm of anyverbs before\n \
         those of rdma-core, for every program and without a launcher. Where that is\n \
         not wanted, install the package anyverbs alone. What looks for devices in\n \
         /sys itself still needs the launcher.\n",
        built.version
    );
    finish(built, "anyverbs-libibverbs", tree, &fields, b"")
}

fn finish(
    built: &Built,
    name: &str,
    mut tree: Tree,
    fields: &str,
    of_others: &[u8],
) -> anyhow::Result<(String, Vec<u8>)> {
    let mut copyright = format!("Source: {}\n\n", env!("CARGO_PKG_REPOSITORY")).into_bytes();
    copyright.extend(b"Under either of the following licences.\n\n");
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copyright.extend(read(&root().join(licence))?);
    }
    if !of_others.is_empty() {
        copyright.extend(b"\n");
        copyright.extend(of_others);
    }
    tree.file(format!("usr/share/doc/{name}/copyright"), copyright);
    check_size(name, &tree)?;
    let mut control = Tree::default();
    let (version, architecture) = (built.version, built.machine.debian);
    control.file(
        "control",
        format!(
            "Package: {name}\n\
             Version: {version}\n\
             Architecture: {architecture}\n\
             Maintainer: anyverbs maintainers <anyverbs@users.noreply.github.com>\n\
             Installed-Size: {}\n\
             Section: net\n\
             Priority: optional\n\
             Homepage: {}\n\
             {fields}",
            tree.size().div_ceil(1024),
            env!("CARGO_PKG_REPOSITORY"),
        ),
    );
    // The file in /etc is no `conffile`: dpkg would keep one after the package is removed, and the loader would obey it.
    if tree.iter().any(|(path, _)| path.starts_with("etc/ld.so.conf.d/")) {
        // The system's cache of libraries is made anew after installing and removing.
        control.file("triggers", "activate-noawait ldconfig\n");
    }
    let members = [
        ("debian-binary", &b"2.0\n"[..]),
        ("control.tar.gz", &control.tar_gz("", built.epoch)?),
        ("data.tar.gz", &tree.tar_gz("", built.epoch)?),
    ];
    Ok((format!("{name}_{version}_{architecture}.deb"), ar(&members, built.epoch)))
}
