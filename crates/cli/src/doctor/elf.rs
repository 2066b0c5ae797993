//! Checks whether a program can be run on the device at all: its libraries must come from the loader.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::loading::{Loader, Wish};
use super::{Finding, Severity};

/// The reason why a program cannot be run on the device, and the remedy.
pub(crate) fn hindrance(path: &Path) -> Option<(String, &'static str)> {
    let shown = path.display();
    match path.metadata() {
        Ok(meta) if meta.mode() & (libc::S_ISUID | libc::S_ISGID) != 0 && !meta.is_dir() => {
            return Some((
                format!(
                    "{shown} is set-user-ID or set-group-ID: the loader ignores LD_PRELOAD and LD_LIBRARY_PATH"
                ),
                "run a copy of it without these bits",
            ));
        }
        Err(error) => return Some((format!("{shown}: {error}"), "check its permissions")),
        Ok(_) => {}
    }
    match linking(path) {
        Ok(Linking::Static) => Some((
            format!("{shown} is statically linked: it carries its own libibverbs, if any"),
            "build it with shared libraries",
        )),
        Ok(_) => None,
        Err(error) => Some((format!("{shown} cannot be read: {error}"), "check its permissions")),
    }
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
        if let Some((what, remedy)) = hindrance(&path) {
            return vec![Finding::new(Severity::Stop, what, remedy)];
        }
        let shown = path.display();
        findings.push(match linking(&path) {
            Ok(Linking::Script) => Finding::good(format!("{shown} is a script")),
            Ok(Linking::Unknown) => Finding::new(
                Severity::Note,
                format!("{shown} is no 64-bit ELF program of this machine's byte order"),
                "",
            ),
            _ => Finding::good(format!("{shown} is dynamically linked")),
        });
    }
    findings.extend(loader.wishes(&path).iter().map(|wish| copy(wish, loader)));
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
        return Finding::good(what);
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
    env::split_paths(&anyverbs_environment::variable("PATH")?)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
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

/// An ELF-64 file of this machine's byte order.
struct Elf<'f>(&'f [u8]);

/// A program header.
struct Segment {
    kind: u32,
    offset: usize,
    address: u64,
    len: usize,
}

impl<'f> Elf<'f> {
    fn new(file: &'f [u8]) -> Option<Self> {
        const CLASS_64: u8 = 2;
        (file.starts_with(b"\x7fELF") && *file.get(4)? == CLASS_64).then_some(Elf(file))
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn long(&self, at: usize) -> Option<u64> {
        self.bytes(at).map(u64::from_ne_bytes)
    }

    /// `e_phoff` is at 32, `e_phentsize` at 54, `e_phnum` at 56. In a header are the type at 0, the offset at 8, the address at 16,
    /// the length in the file at 32.
    fn segments(&self) -> Option<Vec<Segment>> {
        let half = |at| self.bytes(at).map(u16::from_ne_bytes).map(usize::from);
        let table = usize::try_from(self.long(32)?).ok()?;
        let (size, count) = (half(54)?, half(56)?);
        (0..count)
            .map(|index| {
                let at = table.checked_add(index * size)?;
                Some(Segment {
                    kind: self.bytes(at).map(u32::from_ne_bytes)?,
                    offset: usize::try_from(self.long(at.checked_add(8)?)?).ok()?,
                    address: self.long(at.checked_add(16)?)?,
                    len: usize::try_from(self.long(at.checked_add(32)?)?).ok()?,
                })
            })
            .collect()
    }
}

/// An object's entries about the libraries that it needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) needed: Vec<String>,
    pub(super) rpath: Option<String>,
    pub(super) runpath: Option<String>,
}

impl Object {
    /// `None` for a file that is not ELF-64. An object without a dynamic section needs no library.
    pub(super) fn parse(file: &[u8]) -> Option<Self> {
        const PT_LOAD: u32 = 1;
        const PT_DYNAMIC: u32 = 2;
        const DT_NEEDED: u64 = 1;
        const DT_STRTAB: u64 = 5;
        const DT_RPATH: u64 = 15;
        const DT_RUNPATH: u64 = 29;
        let elf = Elf::new(file)?;
        let segments = elf.segments()?;
        let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
            return Some(Self::default());
        };
        let entries: Vec<(u64, u64)> = (0..dynamic.len / 16)
            .map_while(|i| {
                let at = dynamic.offset.checked_add(i * 16)?;
                Some((elf.long(at)?, elf.long(at.checked_add(8)?)?))
            })
            .take_while(|(tag, _)| *tag != 0)
            .collect();
        let strings = entries.iter().find(|(tag, _)| *tag == DT_STRTAB)?.1;
        let holds = |s: &&Segment| {
            s.kind == PT_LOAD
                && (s.address..s.address.saturating_add(s.len as u64)).contains(&strings)
        };
        let segment = segments.iter().find(holds)?;
        let strings =
            segment.offset.checked_add(usize::try_from(strings - segment.address).ok()?)?;
        let texts = |wanted: u64| {
            let of_tag = entries.iter().filter(move |(tag, _)| *tag == wanted);
            of_tag.filter_map(|(_, at)| {
                let text = file.get(strings.checked_add(usize::try_from(*at).ok()?)?..)?;
                let text = text.split(|byte| *byte == 0).next()?;
                Some(String::from_utf8_lossy(text).into_owned())
            })
        };
        Some(Self {
            needed: texts(DT_NEEDED).collect(),
            rpath: texts(DT_RPATH).next(),
            runpath: texts(DT_RUNPATH).next(),
        })
    }
}

fn elf(head: &[u8]) -> Option<Linking> {
    const PT_INTERP: u32 = 3;
    let is_dynamic = Elf::new(head)?.segments()?.iter().any(|segment| segment.kind == PT_INTERP);
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
        head[..5].copy_from_slice(b"\x7fELF\x02");
        assert_eq!(elf(&head), Some(Linking::Static));
        // Headers that point outside of the file.
        head[32..40].fill(0xff);
        head[54..58].fill(0xff);
        assert_eq!(elf(&head), None);
        let missing = program(Path::new("/nonexistent/program"), &Loader::default());
        assert_eq!(missing[0].severity, Severity::Stop);
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
