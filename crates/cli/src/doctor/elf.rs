//! Checks whether a program can be run on the device at all: its libraries must come from the loader.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::NativeEndian;
use object::elf::{
    DT_NEEDED, DT_NULL, DT_RPATH, DT_RUNPATH, DT_STRTAB, FileHeader64, PT_DYNAMIC, PT_INTERP,
    PT_LOAD, ProgramHeader64,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

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
    pub(super) rpath: Option<String>,
    pub(super) runpath: Option<String>,
}

impl Object {
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
