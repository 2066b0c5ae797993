//! The copies of libibverbs and librdmacm that the loader would give to each object of a program, and the reasons
//! (ld.so(8)).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::elf::Object;

/// The search paths for objects, except those in the objects themselves.
#[derive(Debug, Default)]
pub(super) struct Loader {
    /// The value of `LD_LIBRARY_PATH`: the entry of `anyverbs run`, and the old value.
    pub(super) library_path: Vec<PathBuf>,
    /// The values of `LD_PRELOAD`.
    pub(super) preload: Vec<PathBuf>,
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

/// An object in the loader's list.
#[derive(Debug)]
struct Loaded {
    path: PathBuf,
    /// Without symbolic links: one file is loaded once.
    real: PathBuf,
    /// The names by which it was asked for, and its own (`DT_SONAME`). Whoever asks for one of them gets this object.
    names: Vec<String>,
    needed: Vec<String>,
    /// Where its libraries are looked for first: by its RPATH, and those of the objects that led to it.
    rpaths: Vec<PathBuf>,
    runpath: Option<Vec<PathBuf>>,
}

const PRELOADED: &str = "preloaded";
const LOADED_BEFORE: &str = "the copy that was loaded before";

impl Loader {
    pub(super) fn new(library_path: Vec<PathBuf>, preload: Vec<PathBuf>) -> Self {
        let cache = fs::read(CACHE).ok().and_then(|bytes| cache(&bytes)).unwrap_or_default();
        Loader { library_path, preload, cache }
    }

    /// The wishes of a program's objects, or of those below a directory, each of which a program may load by itself.
    pub(super) fn wishes(&self, program: &Path) -> Vec<Wish> {
        let mut roots = Vec::new();
        if program.is_dir() {
            objects_below(program, &mut roots);
        } else {
            roots.push(program.to_owned());
        }
        let mut wishes = Vec::new();
        for root in roots {
            for wish in self.wishes_from(&root) {
                if !wishes.contains(&wish) {
                    wishes.push(wish);
                }
            }
        }
        wishes
    }

    /// As the loader does it: the object, those that are preloaded, then the libraries that they need in their order, and those
    /// of these.
    fn wishes_from(&self, root: &Path) -> Vec<Wish> {
        let mut loaded = Vec::new();
        let mut wishes = Vec::new();
        for path in std::iter::once(root).chain(self.preload.iter().map(PathBuf::as_path)) {
            loaded.extend(self.open(path, &[]));
        }
        let preloaded = loaded.len();
        let mut next = 0;
        while next < loaded.len() {
            for library in loaded[next].needed.clone() {
                let found = self.load(&library, next, &mut loaded);
                if is_ours(&library) {
                    let found = found.map(|(at, why)| {
                        let first = (1..preloaded).contains(&at);
                        (loaded[at].path.clone(), if first { PRELOADED } else { why })
                    });
                    wishes.push(Wish { object: loaded[next].path.clone(), library, found });
                }
            }
            next += 1;
        }
        wishes
    }

    /// The place of the object that another one gets for a name.
    fn load(
        &self,
        library: &str,
        by: usize,
        loaded: &mut Vec<Loaded>,
    ) -> Option<(usize, &'static str)> {
        let has_name = |object: &Loaded| object.names.iter().any(|name| name == library);
        if let Some(at) = loaded.iter().position(has_name) {
            return Some((at, LOADED_BEFORE));
        }
        let (object, why) = self.find(library, &loaded[by])?;
        if let Some(at) = loaded.iter().position(|other| other.real == object.real) {
            loaded[at].names.push(library.to_owned());
            return Some((at, LOADED_BEFORE));
        }
        loaded.push(object);
        let at = loaded.len() - 1;
        loaded[at].names.push(library.to_owned());
        Some((at, why))
    }

    /// `rpaths`: those of the objects that led here, the nearest first.
    fn open(&self, path: &Path, rpaths: &[PathBuf]) -> Option<Loaded> {
        let real = path.canonicalize().ok()?;
        let object = Object::read(path)?;
        let origin = real.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
        let expand = |list: &str| -> Vec<PathBuf> {
            let tokens =
                [("ORIGIN", &*origin), ("LIB", self.lib()), ("PLATFORM", env::consts::ARCH)];
            let expand = |dir: &str| {
                tokens.iter().fold(dir.to_owned(), |dir, (token, value)| {
                    dir.replace(&format!("${{{token}}}"), value)
                        .replace(&format!("${token}"), value)
                })
            };
            list.split(':').filter(|dir| !dir.is_empty()).map(|dir| expand(dir).into()).collect()
        };
        let runpath = object.runpath.as_deref().map(expand);
        // An object with a RUNPATH has no RPATH.
        let own = object.rpath.as_deref().filter(|_| runpath.is_none()).map(expand);
        let rpaths = own.into_iter().flatten().chain(rpaths.iter().cloned()).collect();
        let names = object.soname.into_iter().collect();
        Some(Loaded { path: path.to_owned(), real, names, needed: object.needed, rpaths, runpath })
    }

    /// The value of `$LIB`: the directory of the C library below `/` or `/usr`.
    fn lib(&self) -> &str {
        let libc = self.cache.iter().find(|(name, _)| name == "libc.so.6");
        let dir = libc.and_then(|(_, path)| path.parent()).and_then(Path::to_str);
        let dir = dir.map(|dir| dir.strip_prefix("/usr").unwrap_or(dir).trim_start_matches('/'));
        dir.unwrap_or("lib64")
    }

    fn find(&self, library: &str, by: &Loaded) -> Option<(Loaded, &'static str)> {
        let open = |path: &Path| self.open(path, &by.rpaths);
        if library.contains('/') {
            return open(Path::new(library)).map(|object| (object, "its name is a path"));
        }
        let none = Vec::new();
        let rpaths = if by.runpath.is_some() { &none } else { &by.rpaths };
        let lists = [
            (rpaths, "by RPATH"),
            (&self.library_path, "by LD_LIBRARY_PATH"),
            (by.runpath.as_ref().unwrap_or(&none), "by RUNPATH"),
        ];
        let in_lists = lists.into_iter().flat_map(|(directories, why)| {
            directories.iter().map(move |directory| (directory.join(library), why))
        });
        let cached = self.cache.iter().filter(|(name, _)| name == library);
        let cached = cached.map(|(_, path)| (path.clone(), "by ld.so.cache"));
        let standard = DIRECTORIES.iter().map(|directory| Path::new(directory).join(library));
        let standard = standard.map(|path| (path, "in a standard directory"));
        let mut all = in_lists.chain(cached).chain(standard);
        all.find_map(|(path, why)| Some((open(&path)?, why)))
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
    use std::process::Command;

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
        let loader = Loader::new(Vec::new(), Vec::new());
        let this = loader.open(Path::new("/proc/self/exe"), &[]).unwrap();
        let (libc, why) = loader.find("libc.so.6", &this).unwrap();
        assert!(libc.path.is_file() && why.contains("ld.so.cache"), "{libc:?} {why}");
        assert!(Path::new("/").join(loader.lib()).join("libc.so.6").exists(), "{}", loader.lib());
        assert_eq!(cache(b"nonsense"), None);
        let mut short = b"glibc-ld.so.cache1.1".to_vec();
        short.extend(u32::MAX.to_ne_bytes());
        assert_eq!(cache(&short), Some(Vec::new()), "entries that are not there");
    }

    /// Programs and libraries that the compiler made, and the loader's own word for what they get.
    struct Built(PathBuf);

    impl Built {
        fn new(test: &str) -> Self {
            let base =
                env::temp_dir().join(format!("anyverbs-loading-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&base);
            fs::create_dir_all(&base).unwrap();
            Self(base.canonicalize().unwrap())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn cc(&self, out: &str, arguments: &str) -> PathBuf {
            let path = self.path(out);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let source = self.path("source.c");
            let main = if arguments.contains("-shared") { "" } else { "int main(void){return 0;}" };
            fs::write(&source, format!("int in_{};{main}", out.replace(['/', '.', '-'], "_")))
                .unwrap();
            let words = arguments.replace("BASE", self.0.to_str().unwrap());
            let mut cc = Command::new("cc");
            cc.arg("-o").arg(&path).arg(&source).arg("-Wl,--no-as-needed").args(words.split(' '));
            assert!(cc.status().unwrap().success(), "{out} {arguments}");
            path
        }

        /// The copies that the program gets by `ldd`'s way, by their names.
        fn truth(&self, program: &Path, loader: &Loader) -> Vec<(String, PathBuf)> {
            let join = |list: &[PathBuf]| env::join_paths(list).unwrap();
            let output = Command::new(program)
                .env("LD_TRACE_LOADED_OBJECTS", "1")
                .env("LD_LIBRARY_PATH", join(&loader.library_path))
                .env("LD_PRELOAD", join(&loader.preload))
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let line = |line: &str| {
                let (name, rest) = line.trim().split_once(" => ")?;
                let path = rest.split(" (").next()?;
                is_ours(name).then(|| (name.to_owned(), path.into()))
            };
            text.lines().filter_map(line).collect()
        }
    }

    impl Drop for Built {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const LIBRARY: &str = "-shared -Wl,-soname,libibverbs.so.1";

    fn wish(object: &Path, path: &Path, why: &'static str) -> Wish {
        let library = "libibverbs.so.1".to_owned();
        Wish { object: object.to_owned(), library, found: Some((path.to_owned(), why)) }
    }

    #[test]
    fn the_lists_are_searched_in_the_loaders_order() {
        let built = Built::new("order");
        let [rpath, library, runpath] = ["rpath", "library", "runpath"]
            .map(|dir| built.cc(&format!("{dir}/libibverbs.so.1"), LIBRARY));
        let library_path = vec![library.parent().unwrap().to_owned()];
        let loader = Loader { library_path, ..Loader::default() };
        let link = "BASE/library/libibverbs.so.1 -Wl,--disable-new-dtags,-rpath,$ORIGIN/rpath";
        let old = built.cc("old", link);
        let link = "BASE/library/libibverbs.so.1 -Wl,--enable-new-dtags,-rpath,${ORIGIN}/runpath";
        let new = built.cc("new", link);
        let check = |program: &Path, path: &Path, why| {
            assert_eq!(loader.wishes(program), [wish(program, path, why)]);
            assert_eq!(built.truth(program, &loader), [("libibverbs.so.1".into(), path.into())]);
        };
        check(&old, &rpath, "by RPATH");
        check(&new, &library, "by LD_LIBRARY_PATH");
        // One for another machine is passed over.
        let mut file = fs::read(&library).unwrap();
        file[4] = 1;
        fs::write(&library, &file).unwrap();
        check(&new, &runpath, "by RUNPATH");
        (file[4], file[18]) = (2, file[18] ^ 0xff);
        fs::write(&library, &file).unwrap();
        check(&new, &runpath, "by RUNPATH");
        fs::remove_file(&runpath).unwrap();
        fs::remove_file(&library).unwrap();
        let library = "libibverbs.so.1".to_owned();
        assert_eq!(loader.wishes(&new), [Wish { object: new, library, found: None }]);
    }

    #[test]
    fn whoever_asks_for_a_loaded_name_gets_the_loaded_copy() {
        let built = Built::new("shared");
        let first = built.cc("first/libibverbs.so.1", LIBRARY);
        let second = built.cc("second/libibverbs.so.1", LIBRARY);
        let user = built.cc(
            "libuser.so",
            "-shared -Wl,-soname,libuser.so BASE/second/libibverbs.so.1 -Wl,-rpath,BASE/second",
        );
        let program = built.cc(
            "program",
            "BASE/libuser.so BASE/first/libibverbs.so.1 -Wl,-rpath,BASE/first:BASE -L BASE/second",
        );
        let mut loader = Loader::default();
        // The program's own libraries come before those of its libraries.
        let expected = [wish(&program, &first, "by RUNPATH"), wish(&user, &first, LOADED_BEFORE)];
        assert_eq!(loader.wishes(&program), expected);
        assert_eq!(built.truth(&program, &loader), [("libibverbs.so.1".into(), first)]);
        // A library by itself, as a program would load it.
        assert_eq!(loader.wishes(&user), [wish(&user, &second, "by RUNPATH")]);
        // One that is preloaded serves all who ask for its name; who asks for another gets that.
        let ours = built.cc("ours/libibverbs.so.1", LIBRARY);
        loader.preload = vec![ours.clone()];
        let expected = [wish(&program, &ours, PRELOADED), wish(&user, &ours, PRELOADED)];
        assert_eq!(loader.wishes(&program), expected);
        assert_eq!(built.truth(&program, &loader), []);
        let renamed = "-shared -Wl,-soname,libibverbs-1de1.so.1";
        let own = built.cc("libibverbs-1de1.so.1", renamed);
        let wheel = built.cc("wheel", "BASE/libibverbs-1de1.so.1 -Wl,-rpath,BASE");
        let found = loader.wishes(&wheel).pop().unwrap().found;
        assert_eq!(found, Some((own, "by RUNPATH")));
    }

    #[test]
    fn the_loaders_tokens_are_known() {
        let built = Built::new("tokens");
        let loader = Loader::new(Vec::new(), Vec::new());
        let copy = built.cc(&format!("{}/libibverbs.so.1", loader.lib()), LIBRARY);
        let program = built.cc("program", &format!("{} -Wl,-rpath,BASE/$LIB", copy.display()));
        assert_eq!(loader.wishes(&program), [wish(&program, &copy, "by RUNPATH")]);
        assert_eq!(built.truth(&program, &loader), [("libibverbs.so.1".into(), copy)]);
    }
}
