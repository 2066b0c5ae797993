//! The copies of libibverbs and librdmacm that the loader would give to each object of a program, and the reasons
//! (ld.so(8)).

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::elf::Object;

/// The search paths for objects, except those in the objects themselves.
#[derive(Debug, Default)]
pub(super) struct Loader {
    /// The value of `LD_LIBRARY_PATH`: the entry of `anyverbs run`, and the old value.
    pub(super) library_path: Vec<PathBuf>,
    /// The loader's cache: names and paths.
    cache: Vec<(String, PathBuf)>,
}

/// An object that wants libibverbs or librdmacm, and gets it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// The object that wants it.
    pub(super) object: PathBuf,
    /// The name by which it wants the library.
    pub(super) library: String,
    /// The copy, and why that one; `None` if there is none.
    pub(super) found: Option<(PathBuf, &'static str)>,
}

const CACHE: &str = "/etc/ld.so.cache";
/// The last folders in which the loader looks.
const DIRECTORIES: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Whether a library is one of ours by its name, also one that a package renamed (`libibverbs-1de1263b.so.1.14.48.0`).
fn is_ours(name: &str) -> bool {
    ["libibverbs", "librdmacm"].iter().any(|ours| {
        name.strip_prefix(ours).is_some_and(|rest| rest.starts_with(['-', '.']))
            && name.contains(".so")
    })
}

impl Loader {
    pub(super) fn new(library_path: Vec<PathBuf>) -> Self {
        let cache = fs::read(CACHE).ok().and_then(|bytes| cache(&bytes)).unwrap_or_default();
        Loader { library_path, cache }
    }

    /// The wishes of a program's objects, or of those below a directory.
    pub(super) fn wishes(&self, program: &Path) -> Vec<Wish> {
        let mut wishes = Vec::new();
        let mut roots = Vec::new();
        if program.is_dir() {
            objects_below(program, &mut roots);
        } else {
            roots.push(program.to_owned());
        }
        let mut seen = HashSet::new();
        for root in roots {
            self.follow(&root, &[], &mut seen, &mut wishes);
        }
        wishes
    }

    /// `rpaths`: those of the objects that led here, the nearest first.
    fn follow(
        &self,
        path: &Path,
        rpaths: &[PathBuf],
        seen: &mut HashSet<PathBuf>,
        wishes: &mut Vec<Wish>,
    ) {
        let Ok(real) = path.canonicalize() else { return };
        if !seen.insert(real.clone()) {
            return;
        }
        let Some(object) = fs::read(path).ok().and_then(|bytes| Object::parse(&bytes)) else {
            return;
        };
        let origin = real.parent().unwrap_or(Path::new("/"));
        let expand = |list: &Option<String>| -> Vec<PathBuf> {
            let list = list.as_deref().unwrap_or_default().split(':').filter(|dir| !dir.is_empty());
            let origin = origin.to_string_lossy();
            list.map(|dir| dir.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin).into())
                .collect()
        };
        let runpath = expand(&object.runpath);
        // With a RUNPATH an object has no RPATH, neither its own nor that of others.
        let mut own_rpaths = expand(&object.rpath);
        own_rpaths.extend(rpaths.iter().cloned());
        let rpaths = if object.runpath.is_some() { Vec::new() } else { own_rpaths.clone() };
        for library in object.needed {
            let found = self.find(&library, &rpaths, &runpath);
            if let Some((path, _)) = &found {
                self.follow(path, &own_rpaths, seen, wishes);
            }
            if is_ours(&library) {
                wishes.push(Wish { object: path.to_owned(), library, found });
            }
        }
    }

    fn find(
        &self,
        library: &str,
        rpaths: &[PathBuf],
        runpath: &[PathBuf],
    ) -> Option<(PathBuf, &'static str)> {
        if library.contains('/') {
            let path = PathBuf::from(library);
            return path.exists().then_some((path, "its name is a path"));
        }
        let lists: [(&[PathBuf], &str); 3] = [
            (rpaths, "by RPATH"),
            (&self.library_path, "by LD_LIBRARY_PATH"),
            (runpath, "by RUNPATH"),
        ];
        for (directories, why) in lists {
            let mut paths = directories.iter().map(|directory| directory.join(library));
            if let Some(path) = paths.find(|path| path.exists()) {
                return Some((path, why));
            }
        }
        if let Some((_, path)) =
            self.cache.iter().find(|(name, path)| name == library && path.exists())
        {
            return Some((path.clone(), "by ld.so.cache"));
        }
        let mut paths = DIRECTORIES.iter().map(|directory| Path::new(directory).join(library));
        paths.find(|path| path.exists()).map(|path| (path, "in a standard directory"))
    }
}

/// The shared objects below a directory.
fn objects_below(directory: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(directory).into_iter().flatten().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            objects_below(&entry.path(), found);
        } else if kind.is_file() && entry.file_name().to_string_lossy().contains(".so") {
            found.push(entry.path());
        }
    }
}

/// The names and paths of a `glibc-ld.so.cache1.1`: a header of 48 bytes with the number of entries at 20, then entries
/// of 24 bytes with the offsets of name and path at 4 and 8. `None` for other files.
fn cache(bytes: &[u8]) -> Option<Vec<(String, PathBuf)>> {
    let bytes = bytes.strip_prefix(b"glibc-ld.so.cache1.1").map(|_| bytes)?;
    let word = |at: usize| {
        let word = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
        usize::try_from(u32::from_ne_bytes(word)).ok()
    };
    let text = |at: usize| {
        let text = bytes.get(at..)?.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let entry = |index: usize| {
        let at = index.checked_mul(24)?.checked_add(48)?;
        Some((text(word(at + 4)?)?, PathBuf::from(text(word(at + 8)?)?)))
    };
    Some((0..word(20)?).map_while(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renamed_copies_are_known() {
        for name in ["libibverbs.so.1", "librdmacm.so", "libibverbs-1de1263b.so.1.14.48.0"] {
            assert!(is_ours(name), "{name}");
        }
        for name in ["libibverbs", "libibverbsx.so.1", "libmlx5.so.1", "libc.so.6"] {
            assert!(!is_ours(name), "{name}");
        }
    }

    #[test]
    fn the_loaders_cache_is_read() {
        let loader = Loader::new(Vec::new());
        let (path, why) = loader.find("libc.so.6", &[], &[]).unwrap();
        assert!(path.is_file() && why.contains("ld.so.cache"), "{path:?} {why}");
        assert_eq!(cache(b"nonsense"), None);
        let mut short = b"glibc-ld.so.cache1.1".to_vec();
        short.extend(u32::MAX.to_ne_bytes());
        assert_eq!(cache(&short), Some(Vec::new()), "entries that are not there");
    }

    #[test]
    fn the_lists_are_searched_in_the_loaders_order() {
        let base = std::env::temp_dir().join(format!("anyverbs-loading-{}", std::process::id()));
        let [a, b, c] = ["rpath", "library", "runpath"].map(|name| base.join(name));
        for directory in [&a, &b, &c] {
            fs::create_dir_all(directory).unwrap();
            fs::write(directory.join("libx.so"), "").unwrap();
        }
        let loader = Loader { library_path: vec![b.clone()], cache: Vec::new() };
        let why = |rpaths: &[PathBuf], runpath: &[PathBuf]| {
            loader.find("libx.so", rpaths, runpath).map(|(_, why)| why)
        };
        assert_eq!(why(std::slice::from_ref(&a), &[]), Some("by RPATH"));
        assert_eq!(why(&[], std::slice::from_ref(&c)), Some("by LD_LIBRARY_PATH"));
        fs::remove_file(b.join("libx.so")).unwrap();
        assert_eq!(why(&[], std::slice::from_ref(&c)), Some("by RUNPATH"));
        assert_eq!(why(&[], &[]), None);
        fs::remove_dir_all(base).unwrap();
    }
}
