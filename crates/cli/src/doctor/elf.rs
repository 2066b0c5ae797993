//! Checks whether a program can be run on the device at all: its libraries must come from the loader.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use object::NativeEndian;
use object::elf::{
    DT_NEEDED, DT_NULL, DT_RPATH, DT_RUNPATH, DT_SONAME, DT_STRTAB, FileHeader64, PT_DYNAMIC,
    PT_INTERP, PT_LOAD, ProgramHeader64,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use super::loading::{Loader, Wish};
use super::start::{self, Caller, chain};
use super::{Finding, Severity};

/// The reason why a program cannot be run on the device, and the remedy. Of a script the interpreters count.
pub(crate) fn hindrance(path: &Path) -> Option<(String, &'static str)> {
    // Nothing runs then, and the attempt says so.
    if !start::is_executable(path) {
        return None;
    }
    let caller = Caller::current();
    chain(path).iter().find_map(|program| {
        let mut shown = program.display().to_string();
        if program != path {
            shown = format!("{}, which {shown} runs,", path.display());
        }
        let linking = match linking(program) {
            // It may be executed all the same.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Linking::Unknown,
            Err(error) => {
                let what = format!("{shown} cannot be read: {error}");
                return Some((what, "check the path and its permissions"));
            }
            Ok(Linking::Script) => return None,
            Ok(linking) => linking,
        };
        if let Some(why) = caller.is_refused(program) {
            return Some((
                format!("{shown} is {why}: the loader ignores LD_PRELOAD and LD_LIBRARY_PATH"),
                "run a copy of it without these rights",
            ));
        }
        (linking == Linking::Static).then(|| {
            (
                format!("{shown} is statically linked: it carries its own libibverbs, if any"),
                "build it with shared libraries",
            )
        })
    })
}

/// Looks at one program, or at the objects below a directory.
pub(super) fn program(name: &Path, loader: &Loader) -> Vec<Finding> {
    let Some(path) = find(name) else {
        return vec![Finding::new(
            Severity::Stop,
            format!("{} was not found", name.display()),
            "give its path, or add its directory to PATH",
        )];
    };
    let mut findings = Vec::new();
    if !path.is_dir() {
        if !start::is_executable(&path) {
            let remedy = match linking(&path) {
                Ok(Linking::Unknown) => "name a program".to_owned(),
                _ => format!("chmod +x {}, or check the path", path.display()),
            };
            let what = format!("{} is not executable", path.display());
            return vec![Finding::new(Severity::Stop, what, remedy)];
        }
        if let Some((what, remedy)) = hindrance(&path) {
            return vec![Finding::new(Severity::Stop, what, remedy)];
        }
        let shown = path.display();
        findings.push(match linking(&path) {
            Ok(Linking::Script) => {
                let by: Vec<_> =
                    chain(&path)[1..].iter().map(|by| by.display().to_string()).collect();
                Finding::good(format!("{shown} is a script, run by {}", by.join(" and ")))
            }
            Ok(Linking::Unknown) => Finding::new(
                Severity::Note,
                format!("{shown} is no 64-bit ELF program of this machine's byte order"),
                "",
            ),
            Err(_) => Finding::new(
                Severity::Note,
                format!("{shown} may be executed and not read: nothing is known of its libraries"),
                "",
            ),
            Ok(Linking::Dynamic | Linking::Static) => {
                Finding::good(format!("{shown} is dynamically linked"))
            }
        });
    }
    findings.extend(
        loader.wishes(chain(&path).last().unwrap_or(&path)).iter().map(|wish| copy(wish, loader)),
    );
    findings
}

/// The copy of a library that an object gets.
fn copy(wish: &Wish, loader: &Loader) -> Finding {
    let (object, library) = (wish.object.display(), &wish.library);
    let Some((path, why)) = &wish.found else {
        return Finding::new(
            Severity::Note,
            format!("{object} asks for {library}, which is not found"),
            "if that is not by intention, install it",
        );
    };
    let what = format!("{object} asks for {library} and gets {} ({why})", path.display());
    let ours =
        loader.library_path.first().and_then(|dir| dir.join("libibverbs.so.1").canonicalize().ok());
    if ours.is_some() && path.canonicalize().ok() == ours {
        // The other name of the file may have been loaded first.
        let is_other = path.file_name().is_some_and(|name| name != library.as_str());
        let why = if is_other { ": that is right, since one file is both libraries" } else { "" };
        return Finding::good(what + why);
    }
    Finding::new(
        Severity::Note,
        what,
        "a copy of its own; `anyverbs run` preloads this library, which is found first, unless --no-preload is given",
    )
}

/// As the shell finds a program.
pub(crate) fn find(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 || name.is_absolute() {
        return name.exists().then(|| name.to_owned());
    }
    let paths = anyverbs_environment::variable("PATH")?;
    let mut files =
        env::split_paths(&paths).map(|dir| dir.join(name)).filter(|path| path.is_file());
    let first = files.next()?;
    if start::is_executable(&first) {
        return Some(first);
    }
    Some(files.find(|path| start::is_executable(path)).unwrap_or(first))
}

#[derive(Debug, PartialEq, Eq)]
enum Linking {
    Dynamic,
    Static,
    Script,
    Unknown,
}

fn linking(path: &Path) -> io::Result<Linking> {
    // The program headers lie at the beginning of the file with any linker.
    let mut head = Vec::new();
    File::open(path)?.take(64 << 10).read_to_end(&mut head)?;
    Ok(if head.starts_with(b"#!") {
        Linking::Script
    } else {
        elf(&head).unwrap_or(Linking::Unknown)
    })
}

/// The header of an ELF-64 file of this machine's byte order.
type Header = FileHeader64<NativeEndian>;

/// The program headers. `None` for any other file.
fn segments(file: &[u8]) -> Option<&[ProgramHeader64<NativeEndian>]> {
    Header::parse(file).ok()?.program_headers(NativeEndian, file).ok()
}

/// An object's entries about the libraries that it needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) needed: Vec<String>,
    pub(super) soname: Option<String>,
    pub(super) rpath: Option<String>,
    pub(super) runpath: Option<String>,
}

impl Object {
    /// Reads a file, if it is an object for this machine. The loader passes over others, such as 32-bit ones.
    pub(super) fn read(path: &Path) -> Option<Self> {
        // `e_machine`
        const MACHINE: std::ops::Range<usize> = 18..20;
        let own = own_head()?;
        let file = std::fs::read(path).ok()?;
        let is_ours = file.get(MACHINE)? == own.get(MACHINE)?;
        is_ours.then(|| Self::parse(&file))?
    }

    /// `None` for a file that is not ELF-64. An object without a dynamic section needs no library.
    pub(super) fn parse(file: &[u8]) -> Option<Self> {
        let segments = segments(file)?;
        let Some(dynamic) = segments.iter().find(|s| s.p_type(NativeEndian) == PT_DYNAMIC) else {
            return Some(Self::default());
        };
        let entries = dynamic.dynamic(NativeEndian, file).ok()??;
        let values = |wanted| {
            let values = entries.iter().map(|e| (e.d_tag(NativeEndian), e.d_val(NativeEndian)));
            let values = values.take_while(|(tag, _)| *tag != DT_NULL);
            values.filter_map(move |(tag, value)| (tag == wanted).then_some(value))
        };
        let strings = values(DT_STRTAB).next()?;
        let texts = |wanted| {
            values(wanted).filter_map(|at| {
                let at = strings.checked_add(at)?;
                let text = segments.iter().find_map(|segment| text(segment, file, at))?;
                Some(String::from_utf8_lossy(text).into_owned())
            })
        };
        Some(Self {
            needed: texts(DT_NEEDED).collect(),
            soname: texts(DT_SONAME).next(),
            rpath: texts(DT_RPATH).next(),
            runpath: texts(DT_RUNPATH).next(),
        })
    }
}

/// The bytes up to the next zero, if this segment loads the address.
fn text<'f>(segment: &ProgramHeader64<NativeEndian>, file: &'f [u8], at: u64) -> Option<&'f [u8]> {
    if segment.p_type(NativeEndian) != PT_LOAD {
        return None;
    }
    let (address, len) = (segment.p_vaddr(NativeEndian), segment.p_filesz(NativeEndian));
    let rest = len.checked_sub(at.checked_sub(address)?)?;
    let bytes = segment.data_range(NativeEndian, file, at, rest).ok()??;
    bytes.split(|byte| *byte == 0).next()
}

/// The header of this program.
fn own_head() -> Option<&'static [u8; 64]> {
    static HEAD: OnceLock<Option<[u8; 64]>> = OnceLock::new();
    let read = || {
        let mut head = [0; 64];
        File::open("/proc/self/exe").ok()?.read_exact(&mut head).ok()?;
        Some(head)
    };
    HEAD.get_or_init(read).as_ref()
}

fn elf(head: &[u8]) -> Option<Linking> {
    let is_dynamic = segments(head)?.iter().any(|s| s.p_type(NativeEndian) == PT_INTERP);
    Some(if is_dynamic { Linking::Dynamic } else { Linking::Static })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_programs() {
        assert_eq!(linking(Path::new("/proc/self/exe")).unwrap(), Linking::Dynamic);
        assert_eq!(elf(b"\x7fELF\x02"), None);
        assert_eq!(elf(b""), None);
        let mut head = vec![0u8; 64];
        let order = if cfg!(target_endian = "little") { 1 } else { 2 };
        head[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, order, 1]);
        assert_eq!(elf(&head), Some(Linking::Static));
        // Headers that point outside of the file.
        head[32..40].fill(0xff);
        head[54..58].fill(0xff);
        assert_eq!(elf(&head), None);
        let missing = program(Path::new("/nonexistent/program"), &Loader::default());
        assert_eq!(missing[0].severity, Severity::Stop);
    }

    #[test]
    fn one_file_that_is_both_libraries_is_said_to_be_right() {
        let base = env::temp_dir().join(format!("anyverbs-both-{}", std::process::id()));
        std::fs::create_dir(&base).unwrap();
        let [verbs, cm, other] =
            ["libibverbs.so.1", "librdmacm.so.1", "libother.so"].map(|name| base.join(name));
        std::fs::write(&verbs, "").unwrap();
        std::fs::write(&other, "").unwrap();
        std::os::unix::fs::symlink("libibverbs.so.1", &cm).unwrap();
        let mut loader = Loader::default();
        loader.library_path.push(base.clone());
        let finding = |library: &str, path: &Path| {
            let found = Some((path.to_owned(), "preloaded"));
            let wish = Wish { object: "/bin/rping".into(), library: library.into(), found };
            copy(&wish, &loader)
        };
        let said = [
            finding("librdmacm.so.1", &verbs),
            finding("libibverbs.so.1", &verbs),
            finding("librdmacm.so.1", &cm),
            finding("librdmacm.so.1", &other),
        ];
        std::fs::remove_dir_all(&base).unwrap();
        assert!(said[..3].iter().all(|finding| finding.severity == Severity::Good), "{said:?}");
        let explained = said.each_ref().map(|finding| {
            finding.what.ends_with("(preloaded): that is right, since one file is both libraries")
        });
        assert_eq!(explained, [true, false, false, false], "{said:?}");
        assert_eq!(said[3].severity, Severity::Note);
    }

    #[test]
    fn an_object_says_what_it_needs() {
        let this = std::fs::read("/proc/self/exe").unwrap();
        let object = Object::parse(&this).unwrap();
        assert!(object.needed.iter().any(|name| name == "libc.so.6"), "{object:?}");
        assert_eq!(Object::parse(b"#!/bin/sh"), None);
        // A file that ends anywhere is read without a panic.
        for len in (0..4096).chain([this.len() / 2]) {
            let _ = Object::parse(&this[..len]);
        }
    }
}
