//! Libraries without contents, whose names lead a whole system's dynamic loader to the device's library.
//!
//! The loader's cache knows a library by the name that stands inside it, and not by that of a link. So each further name needs a
//! file. It depends on the library with the contents. It has all of that one's symbol versions, which the loader looks for in the
//! file that a program names.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader};

use super::archive::Tree;
use super::build::{check_paths, read, write};
use crate::dist::LINKS;
use crate::workspace::succeed;

/// Links them with `linker`, for the names that programs are linked with.
pub(super) fn make(linker: &Path, library: &Path, tools: &Path) -> anyhow::Result<Tree> {
    let (source, script) = (tools.join("nothing.c"), tools.join("alias.map"));
    write(&source, b"")?;
    let versions = defined_versions(&read(library)?).context("cannot read its versions")?;
    let text: String = versions.iter().map(|name| format!("{name} {{ }};\n")).collect();
    write(&script, text.as_bytes())?;
    let mut version_script = OsString::from("-Wl,--version-script=");
    version_script.push(&script);
    let mut aliases = Tree::default();
    for name in LINKS.into_iter().filter(|name| name.ends_with(".so.1")) {
        let file = tools.join(name);
        let mut link = Command::new(linker);
        link.args(["-shared", "-nostdlib", "-s", &format!("-Wl,-soname,{name}")]);
        link.arg(&version_script).arg(&source);
        succeed(link.arg("-Wl,--no-as-needed").arg(library).arg("-o").arg(&file))?;
        let bytes = read(&file)?;
        check_paths(name, &bytes)?;
        aliases.file(name, bytes);
    }
    Ok(aliases)
}

/// The symbol versions that a library defines, without the base, which is its name.
fn defined_versions(bytes: &[u8]) -> anyhow::Result<Vec<String>> {
    let file: ElfFile64<'_> = ElfFile64::parse(bytes)?;
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, bytes)?;
    let Some((mut definitions, strings)) = sections.gnu_verdef(endian, bytes)? else {
        bail!("it defines none");
    };
    let strings = sections.strings(endian, bytes, strings)?;
    let mut versions = Vec::new();
    while let Some((definition, mut names)) = definitions.next()? {
        if definition.vd_flags.get(endian) & elf::VER_FLG_BASE != 0 {
            continue;
        }
        let name = names.next()?.context("a version has no name")?;
        versions.push(String::from_utf8_lossy(name.name(endian, strings)?).into_owned());
    }
    Ok(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_of_the_c_library_are_seen() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let libc = mapped.find(|path| path.ends_with("/libc.so.6")).unwrap();
        let versions = defined_versions(&std::fs::read(libc).unwrap()).unwrap();
        assert!(versions.iter().any(|version| version.starts_with("GLIBC_2.")), "{versions:?}");
        assert!(!versions.iter().any(|version| version == "libc.so.6"));
    }
}
