//! The archive that can be unpacked and used anywhere, or installed under a prefix.

use anyhow::Context;

use super::archive::Tree;
use super::build::{Built, check_size, read};
use super::licences;
use crate::book;
use crate::workspace::root;

/// The texts of the repository that are inside. `CHANGELOG.md` is long, and README links to it.
const TEXTS: [&str; 3] = ["README.md", "LICENSE-APACHE", "LICENSE-MIT"];

/// One of them. The files that it links to are not inside, so the links lead to the repository.
fn text(name: &str) -> anyhow::Result<Vec<u8>> {
    let bytes = read(&root().join(name))?;
    if !name.ends_with(".md") {
        return Ok(bytes);
    }
    let text = String::from_utf8(bytes).with_context(|| format!("{name} is no text"))?;
    Ok(book::with_absolute_links(&text, &TEXTS, book::REPOSITORY).into_bytes())
}

pub(super) fn make(built: &Built, sbom: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut tree = Tree::default();
    // Without the libraries inside, which lie beside it.
    tree.executable("bin/anyverbs", &built.anyverbs[..]);
    tree.graft("lib/", &built.lib());
    tree.graft("share/", &built.share);
    tree.file(format!("share/doc/anyverbs/{}", licences::NAME), &built.licences[..]);
    tree.file("sbom.cdx.json", sbom);
    tree.executable("install.sh", read(&root().join("packaging/install.sh"))?);
    for name in TEXTS {
        tree.file(name, text(name)?);
    }
    check_size("the tarball", &tree)?;
    tree.tar_gz(&format!("{}/", built.stem()), built.epoch)
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output};

    use super::*;

    /// An archive with little inside, unpacked.
    struct Unpacked(PathBuf);

    impl Unpacked {
        fn new(test: &str) -> Self {
            let base =
                env::temp_dir().join(format!("anyverbs-install-{test}-{}", std::process::id()));
            for file in [
                "bin/anyverbs",
                "lib/libibverbs.so.1",
                "share/doc/anyverbs/THIRD-PARTY-LICENSES.txt",
                "share/man/man1/anyverbs.1",
            ] {
                let file = base.join("from").join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, "something").unwrap();
            }
            fs::copy(root().join("packaging/install.sh"), base.join("from/install.sh")).unwrap();
            Self(base)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn install(&self, arguments: &[&str], prefix: &Path) -> Output {
            let mut command = Command::new("sh");
            command.arg(self.path("from/install.sh")).args(arguments);
            command.arg("--prefix").arg(prefix).output().unwrap()
        }

        fn installed(&self, arguments: &[&str], prefix: &str) {
            let output = self.install(arguments, &self.path(prefix));
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }

        /// All that lies in a directory, by its name from there.
        fn below(&self, name: &str) -> Vec<String> {
            let top = self.path(name);
            let mut found = Vec::new();
            let mut open = vec![top.clone()];
            while let Some(dir) = open.pop() {
                for entry in fs::read_dir(&dir).into_iter().flatten() {
                    let path = entry.unwrap().path();
                    found.push(path.strip_prefix(&top).unwrap().display().to_string());
                    open.push(path);
                }
            }
            found.sort();
            found
        }
    }

    impl Drop for Unpacked {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn no_text_links_to_a_file_that_is_not_inside() {
        let text = String::from_utf8(text("README.md").unwrap()).unwrap();
        for target in ["](docs/", "](examples", "](CHANGELOG.md", "](SECURITY.md", "](conformance/"]
        {
            assert!(!text.contains(target), "{target}");
        }
    }

    #[test]
    fn the_directories_of_an_installation_go_with_it() {
        let unpacked = Unpacked::new("goes");
        unpacked.installed(&[], "deep/prefix");
        // Over itself, as for a new version: the directories are known still.
        unpacked.installed(&[], "deep/prefix");
        assert!(unpacked.path("deep/prefix/share/man/man1/anyverbs.1").is_file());
        unpacked.installed(&["--uninstall"], "deep/prefix");
        assert!(!unpacked.path("deep").exists(), "{:?}", unpacked.below("deep"));
    }

    #[test]
    fn directories_of_others_stay() {
        let unpacked = Unpacked::new("stays");
        for dir in ["bin", "share/man"] {
            fs::create_dir_all(unpacked.path("prefix").join(dir)).unwrap();
        }
        unpacked.installed(&[], "prefix");
        fs::write(unpacked.path("prefix/lib/other"), "theirs").unwrap();
        unpacked.installed(&["--uninstall"], "prefix");
        assert_eq!(unpacked.below("prefix"), ["bin", "lib", "lib/other", "share", "share/man"]);
    }

    #[test]
    fn an_installation_that_fails_leaves_no_directory() {
        let unpacked = Unpacked::new("fails");
        fs::remove_file(unpacked.path("from/bin/anyverbs")).unwrap();
        let output = unpacked.install(&[], &unpacked.path("prefix"));
        assert!(!output.status.success());
        assert!(!unpacked.path("prefix").exists(), "{:?}", unpacked.below("prefix"));
    }
}
