//! Whether a program can be run on the device at all: the loader has to have a say.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Finding, Severity};

/// Looks at one program.
pub(super) fn program(name: &Path) -> Finding {
    let Some(path) = find(name) else {
        return Finding::new(
            Severity::Stop,
            format!("{} was not found", name.display()),
            "give its path, or add its directory to PATH",
        );
    };
    let shown = path.display();
    match path.metadata() {
        Ok(meta) if meta.mode() & (libc::S_ISUID | libc::S_ISGID) != 0 => {
            return Finding::new(
                Severity::Stop,
                format!(
                    "{shown} is set-user-ID or set-group-ID: the loader ignores LD_PRELOAD and LD_LIBRARY_PATH"
                ),
                "run a copy of it without these bits",
            );
        }
        Err(error) => {
            return Finding::new(
                Severity::Stop,
                format!("{shown}: {error}"),
                "check its permissions",
            );
        }
        Ok(_) => {}
    }
    match linking(&path) {
        Ok(Linking::Dynamic) => Finding::good(format!("{shown} is dynamically linked")),
        Ok(Linking::Script) => Finding::good(format!("{shown} is a script")),
        Ok(Linking::Static) => Finding::new(
            Severity::Stop,
            format!("{shown} is statically linked: it carries its own libibverbs, if any"),
            "build it with shared libraries",
        ),
        Ok(Linking::Unknown) => Finding::new(
            Severity::Note,
            format!("{shown} is no 64-bit ELF program of this machine's byte order"),
            "",
        ),
        Err(error) => Finding::new(
            Severity::Stop,
            format!("{shown} cannot be read: {error}"),
            "check its permissions",
        ),
    }
}

/// As the shell finds a program.
fn find(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 || name.is_absolute() {
        return name.exists().then(|| name.to_owned());
    }
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

#[derive(Debug, PartialEq, Eq)]
enum Linking {
    Dynamic,
    Static,
    Script,
    Unknown,
}

fn linking(path: &Path) -> io::Result<Linking> {
    // The program headers lie at the beginning of what any linker writes.
    let mut head = Vec::new();
    File::open(path)?.take(64 << 10).read_to_end(&mut head)?;
    Ok(if head.starts_with(b"#!") {
        Linking::Script
    } else {
        elf(&head).unwrap_or(Linking::Unknown)
    })
}

/// ELF-64: `e_phoff` at 32, `e_phentsize` at 54, `e_phnum` at 56; a header's type is its first word.
fn elf(head: &[u8]) -> Option<Linking> {
    const CLASS_64: u8 = 2;
    const PT_INTERP: u32 = 3;
    if !head.starts_with(b"\x7fELF") || *head.get(4)? != CLASS_64 {
        return None;
    }
    let half =
        |at: usize| Some(usize::from(u16::from_ne_bytes(head.get(at..at + 2)?.try_into().ok()?)));
    let table = usize::try_from(u64::from_ne_bytes(head.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (half(54)?, half(56)?);
    for index in 0..count {
        let at = table.checked_add(index * size)?;
        let kind = u32::from_ne_bytes(head.get(at..at.checked_add(4)?)?.try_into().ok()?);
        if kind == PT_INTERP {
            return Some(Linking::Dynamic);
        }
    }
    Some(Linking::Static)
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
        assert_eq!(program(Path::new("/nonexistent/program")).severity, Severity::Stop);
    }
}
