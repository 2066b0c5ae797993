//! The shipped files, built so that they run on other machines: for an old glibc, stripped, and the same bytes each
//! time.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader};

use super::aliases;
use super::archive::Tree;
use super::debian_rust;
use super::{licences, sbom};
use crate::dist::{LINKS, SHELLS};
use crate::packages;
use crate::workspace::{cargo, root, shown, succeed, target};

/// The oldest glibc that packages run on: that of manylinux_2_28.
const GLIBC: (u32, u32) = (2, 28);
/// Zig's C compiler links for any glibc. Its version is fixed so that two builds give the same bytes.
const ZIGLANG: &str = "ziglang==0.17.1";
/// The crates that the shipped files are built from.
pub(super) const SHIPPED: [&str; 4] =
    ["anyverbs-capi", "anyverbs-view", "anyverbs-rspreload", "anyverbs-cli"];
/// The greatest total size of the files that a package installs.
const MOST: usize = 10_000_000;
/// The greatest total size of the libraries that the one file, the wheel and the image lay out at first use, beside that.
const MOST_LAID_OUT: usize = 6_000_000;

/// A kind of machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Machine {
    pub(super) triple: &'static str,
    pub(super) arch: &'static str,
    /// Debian's name.
    pub(super) debian: &'static str,
}

pub(super) const MACHINES: [Machine; 2] = [
    Machine { triple: "x86_64-unknown-linux-gnu", arch: "x86_64", debian: "amd64" },
    Machine { triple: "aarch64-unknown-linux-gnu", arch: "aarch64", debian: "arm64" },
];

/// The contents of packages.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) machine: Machine,
    pub(super) version: &'static str,
    /// When the source was committed, in seconds since 1970.
    pub(super) epoch: u64,
    pub(super) anyverbs: Vec<u8>,
    /// The shared objects, without the links to them.
    pub(super) objects: Tree,
    /// Further names of the device's library, for the loader of a whole system.
    pub(super) aliases: Tree,
    /// The debugging information of all of it.
    pub(super) debug: Tree,
    /// Manual pages and completions.
    pub(super) share: Tree,
    /// The licences of the code of others.
    pub(super) licences: Vec<u8>,
}

impl Built {
    /// The shared objects and the links to them.
    pub(super) fn lib(&self) -> Tree {
        let mut lib = self.objects.clone();
        for name in LINKS {
            lib.link(name, "libibverbs.so.1");
        }
        lib
    }

    /// See [`stem`].
    pub(super) fn stem(&self) -> String {
        stem(self.version, self.machine)
    }
}

/// The beginning of the names of files, and the folder inside the tarball.
pub(super) fn stem(version: &str, machine: Machine) -> String {
    format!("anyverbs-{version}-{}-linux-gnu", machine.arch)
}

/// Builds for `machine`.
pub(super) fn build(machine: Machine) -> anyhow::Result<Built> {
    packages::ensure(&[packages::CC, packages::PYTHON3, packages::PYTHON3_VENV])?;
    let tools = target().join("package-tools");
    fs::create_dir_all(&tools).with_context(|| format!("cannot make {}", tools.display()))?;
    let rust = rust_for(machine, &tools)?;
    let linker = linker(machine, &tools, &rust.libgcc)?;

    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--target", machine.triple]);
    build.args(SHIPPED.iter().flat_map(|package| ["-p", package]));
    let variable = machine.triple.to_uppercase().replace('-', "_");
    build.env(format!("CARGO_TARGET_{variable}_LINKER"), &linker);
    build.env("RUSTFLAGS", remapped()?).env_remove("CARGO_ENCODED_RUSTFLAGS");
    if let Some(compiler) = &rust.compiler {
        // Objects of two compilers do not mix.
        build.env("RUSTC", compiler).env("CARGO_TARGET_DIR", target().join("package-debian-rust"));
    }
    succeed(&mut build)?;
    let folder =
        rust.compiler.as_ref().map_or_else(target, |_| target().join("package-debian-rust"));
    let folder = folder.join(machine.triple).join("release");

    let objcopy = objcopy()?;
    let mut debug = Tree::default();
    let mut stripped = |file: &str, name: &str| {
        let (bytes, information) = strip(&objcopy, &folder.join(file), name, &tools)?;
        check_paths(name, &bytes)?;
        check_paths(name, &information)?;
        check_glibc(name, &bytes)?;
        debug.file(format!("{name}.debug"), information);
        anyhow::Ok(bytes)
    };
    let anyverbs = stripped("anyverbs", "anyverbs")?;
    let mut objects = Tree::default();
    for (file, name) in [
        ("libanyverbs_capi.so", "libibverbs.so.1"),
        ("libanyverbs_view.so", "libanyverbs_view.so"),
        ("librspreload.so", "librspreload.so"),
    ] {
        objects.executable(name, stripped(file, name)?);
    }
    let aliases = aliases::make(&linker, &folder.join("libanyverbs_capi.so"), &tools)?;
    let share = share(machine, &folder)?;
    let version = env!("CARGO_PKG_VERSION");
    let licences = licences::list(&sbom::linked(machine)?)?;
    let epoch = epoch()?;
    Ok(Built { machine, version, epoch, anyverbs, objects, aliases, debug, share, licences })
}

/// The compiler for this machine's code.
pub(super) struct Rust {
    /// None for cargo's own.
    pub(super) compiler: Option<PathBuf>,
    /// GCC's runtime. The C library's cancellation of threads also uses its unwinder.
    pub(super) libgcc: PathBuf,
}

fn rust_for(machine: Machine, tools: &Path) -> anyhow::Result<Rust> {
    let libdir = output(Command::new("rustc").args([
        "--print",
        "target-libdir",
        "--target",
        machine.triple,
    ]))?;
    if machine.arch != env::consts::ARCH {
        let mut rust = debian_rust::fetch(machine, tools)?;
        if Path::new(&libdir).is_dir() {
            rust.compiler = None;
        }
        return Ok(rust);
    }
    let libgcc = output(Command::new("cc").arg("-print-file-name=libgcc_s.so.1"))?;
    Ok(Rust { compiler: None, libgcc: libgcc.into() })
}

/// The Python that has Zig and installs from the registry.
pub(super) fn venv_python() -> PathBuf {
    target().join("package-tools/venv/bin/python")
}

/// Writes the script that links.
fn linker(machine: Machine, tools: &Path, libgcc: &Path) -> anyhow::Result<PathBuf> {
    let venv = tools.join("venv");
    let zig = venv_python();
    let marker = venv.join(ZIGLANG);
    if !marker.exists() {
        succeed(Command::new(packages::PYTHON3.1).args(["-m", "venv", "--clear"]).arg(&venv))?;
        succeed(Command::new(&zig).args(["-m", "pip", "install", "--quiet", ZIGLANG]))?;
        write(&marker, b"")?;
    }
    let cache = tools.join(format!("zig-cache-{}", machine.arch));
    let script = tools.join(format!("link-{}", machine.arch));
    let (major, minor) = GLIBC;
    // Zig would put an unwinder of its own in place of GCC's, and takes neither Rust's linker nor an option for the word size.
    let text = format!(
        "#!/bin/sh\n\
         for argument do\n\
         shift\n\
         case $argument in\n\
         -lgcc_s) set -- \"$@\" '{libgcc}' ;;\n\
         -m64 | -fuse-ld=* | -B*) ;;\n\
         *) set -- \"$@\" \"$argument\" ;;\n\
         esac\n\
         done\n\
         export ZIG_GLOBAL_CACHE_DIR='{cache}' ZIG_LOCAL_CACHE_DIR='{cache}'\n\
         exec '{zig}' -m ziglang cc -target {arch}-linux-gnu.{major}.{minor} \
         -Wl,--allow-shlib-undefined \"$@\"\n",
        libgcc = libgcc.display(),
        cache = cache.display(),
        zig = zig.display(),
        arch = machine.arch,
    );
    write(&script, text.as_bytes())?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    fill_zig_cache(&script, &cache, tools)?;
    Ok(script)
}

/// Has Zig build its parts of the C library, and removes their debugging information, which holds paths of this machine.
fn fill_zig_cache(linker: &Path, cache: &Path, tools: &Path) -> anyhow::Result<()> {
    let done = cache.join("anyverbs-filled");
    if done.exists() {
        return Ok(());
    }
    if cache.exists() {
        fs::remove_dir_all(cache)?;
    }
    let source = tools.join("empty.c");
    write(&source, b"int main(void) { return 0; }\n")?;
    for kind in ["-shared", "-pie"] {
        let mut link = Command::new(linker);
        link.args([kind, "-nodefaultlibs"]).arg(&source);
        link.args(["-lc", "-lpthread", "-ldl", "-lm", "-lrt", "-lutil", "-o"]);
        succeed(link.arg(tools.join("empty")))?;
    }
    let objcopy = objcopy()?;
    for folder in fs::read_dir(cache.join("o"))? {
        for file in fs::read_dir(folder?.path())? {
            let file = file?.path();
            if file.extension().is_some_and(|kind| kind == "o" || kind == "a") {
                succeed(Command::new(&objcopy).arg("--strip-debug").arg(&file))?;
            }
        }
    }
    write(&done, b"")
}

/// Directories of this machine, and their stand-ins in debugging information.
fn local_directories() -> anyhow::Result<[(PathBuf, &'static str); 3]> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".cargo")));
    let home = home.context("there is no home directory, and CARGO_HOME is not set")?;
    Ok([(home, "/cargo"), (root(), "/anyverbs"), (target(), "/target")])
}

/// Compiler options that keep paths of this machine out of the built files.
fn remapped() -> anyhow::Result<OsString> {
    let mut options = OsString::new();
    // The last that fits is taken.
    for (from, to) in local_directories()? {
        options.push(" --remap-path-prefix=");
        options.push(from);
        options.push("=");
        options.push(to);
    }
    Ok(options)
}

/// Fails if a path of this machine is in an object: another machine would build other bytes.
pub(super) fn check_paths(name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    for (dir, _) in local_directories()? {
        let dir = dir.join("");
        let dir = dir.as_os_str().as_encoded_bytes();
        if bytes.windows(dir.len()).any(|window| window == dir) {
            bail!("{name} holds the path {}", String::from_utf8_lossy(dir));
        }
    }
    Ok(())
}

/// LLVM's objcopy of the toolchain, which knows every machine, or else the system's.
fn objcopy() -> anyhow::Result<PathBuf> {
    let libdir = output(Command::new("rustc").args(["--print", "target-libdir"]))?;
    let own = Path::new(&libdir).with_file_name("bin").join("rust-objcopy");
    Ok(if own.exists() { own } else { "objcopy".into() })
}

/// An object without its debugging information, and that.
fn strip(
    objcopy: &Path,
    file: &Path,
    name: &str,
    tools: &Path,
) -> anyhow::Result<(Vec<u8>, Vec<u8>)> {
    // The stripped file names the other one, which a debugger looks for beside it.
    let information = tools.join(format!("{name}.debug"));
    let stripped = tools.join(name);
    succeed(Command::new(objcopy).arg("--only-keep-debug").args([file, &information]))?;
    succeed(Command::new(objcopy).arg("--strip-all").args([file, &stripped]))?;
    let mut link = OsString::from("--add-gnu-debuglink=");
    link.push(&information);
    succeed(Command::new(objcopy).arg(link).arg(&stripped))?;
    Ok((read(&stripped)?, read(&information)?))
}

/// Fails if a package installs more than users should have to hold.
pub(super) fn check_size(name: &str, files: &Tree) -> anyhow::Result<()> {
    at_most(MOST, &format!("the files of {name}"), files.size())
}

/// Fails if the libraries inside the one file are more than users should have to hold beside it.
pub(super) fn check_laid_out(objects: &Tree) -> anyhow::Result<()> {
    at_most(MOST_LAID_OUT, "the libraries that the one file lays out", objects.size())
}

/// Prints the size, and fails if it is beyond the bound.
fn at_most(bound: usize, what: &str, size: usize) -> anyhow::Result<()> {
    println!("{size:>9} {what}");
    if size > bound {
        bail!("{what} have {size} bytes together, more than {bound}");
    }
    Ok(())
}

/// Fails if an object needs a newer glibc.
fn check_glibc(name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    let newer: Vec<String> = needed_versions(bytes)
        .with_context(|| format!("cannot read what {name} needs"))?
        .into_iter()
        .filter(|version| version.strip_prefix("GLIBC_").is_some_and(is_newer))
        .collect();
    if !newer.is_empty() {
        bail!("{name} needs {}, newer than GLIBC_{}.{}", newer.join(", "), GLIBC.0, GLIBC.1);
    }
    Ok(())
}

/// Tells whether a version such as `2.2.5` is above the oldest glibc. One that is no number (`PRIVATE`) is.
fn is_newer(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) > GLIBC,
        _ => true,
    }
}

/// The symbol versions that an object needs of others.
fn needed_versions(bytes: &[u8]) -> anyhow::Result<Vec<String>> {
    let file: ElfFile64<'_> = ElfFile64::parse(bytes)?;
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, bytes)?;
    let Some((mut needs, strings)) = sections.gnu_verneed(endian, bytes)? else {
        bail!("it has no symbol versions");
    };
    let strings = sections.strings(endian, bytes, strings)?;
    let mut versions = Vec::new();
    while let Some((_, mut of_one)) = needs.next()? {
        while let Some(version) = of_one.next()? {
            let name: &elf::Vernaux<_> = version;
            versions.push(String::from_utf8_lossy(name.name(endian, strings)?).into_owned());
        }
    }
    Ok(versions)
}

/// Manual pages and completions, written by the built command where this machine can run it.
fn share(machine: Machine, folder: &Path) -> anyhow::Result<Tree> {
    let ask = |arguments: &[&str]| {
        let mut command = if machine.arch == env::consts::ARCH {
            Command::new(folder.join("anyverbs"))
        } else {
            let mut command = cargo();
            command.args(["run", "--quiet", "-p", "anyverbs-cli", "--"]);
            command
        };
        let out = command.args(arguments).output().context("cannot run the built anyverbs")?;
        if !out.status.success() {
            bail!("{} failed: {}", shown(&command), String::from_utf8_lossy(&out.stderr));
        }
        Ok(out.stdout)
    };
    let mut share = Tree::default();
    let pages = target().join("package-tools/man");
    if pages.exists() {
        fs::remove_dir_all(&pages)?;
    }
    ask(&[
        "man",
        "--directory",
        pages.to_str().context("the target directory's name is no text")?,
    ])?;
    for page in fs::read_dir(&pages)? {
        let page = page?;
        let name =
            page.file_name().into_string().ok().context("a manual page's name is no text")?;
        share.file(format!("man/man1/{name}"), read(&page.path())?);
    }
    let folders =
        ["bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d"];
    for ((shell, file), folder) in SHELLS.into_iter().zip(folders) {
        share.file(format!("{folder}/{file}"), ask(&["completions", shell])?);
    }
    Ok(share)
}

/// The time that files in archives have: `SOURCE_DATE_EPOCH`, or that of the last commit.
fn epoch() -> anyhow::Result<u64> {
    let text = match env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%ct"]))
                .context(
                    "SOURCE_DATE_EPOCH is not set, and the time of the last commit is not known",
                )?
        }
    };
    text.parse().with_context(|| format!("{text:?} is no number of seconds"))
}

/// The output of a command, without the end of the line.
pub(super) fn output(command: &mut Command) -> anyhow::Result<String> {
    let out = command.output().with_context(|| format!("cannot run {}", shown(command)))?;
    if !out.status.success() {
        bail!("{} failed: {}", shown(command), String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?.trim_end().to_owned())
}

pub(super) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

pub(super) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for old in ["2.2.5", "2.4", "2.28", "2.17"] {
            assert!(!is_newer(old), "{old}");
        }
        for new in ["2.29", "2.34", "3.0", "PRIVATE", "2.280"] {
            assert!(is_newer(new), "{new}");
        }
    }

    #[test]
    fn what_a_package_installs_is_limited() {
        let mut files = Tree::default();
        files.executable("bin/anyverbs", vec![0; MOST / 2]);
        files.executable("lib/libibverbs.so.1", vec![0; MOST / 2]);
        files.link("lib/librdmacm.so.1", "libibverbs.so.1");
        check_size("it", &files).unwrap();
        files.file("share/man/man1/anyverbs.1", "x");
        assert!(check_size("it", &files).unwrap_err().to_string().contains("of it have"));
        let mut objects = Tree::default();
        objects.executable("libibverbs.so.1", vec![0; MOST_LAID_OUT]);
        check_laid_out(&objects).unwrap();
        objects.executable("librspreload.so", vec![0]);
        let error = check_laid_out(&objects).unwrap_err().to_string();
        assert!(error.contains("lays out have"), "{error}");
    }

    #[test]
    fn a_path_of_this_machine_is_found() {
        let path = root().join("crates/view/src/lib.rs");
        let bytes = [b"some bytes", path.as_os_str().as_encoded_bytes(), b"more"].concat();
        assert!(check_paths("it", &bytes).is_err());
        check_paths("it", b"/anyverbs/crates/view/src/lib.rs").unwrap();
    }

    #[test]
    fn needed_versions_of_this_program_are_seen() {
        let versions = needed_versions(&read(&env::current_exe().unwrap()).unwrap()).unwrap();
        assert!(versions.iter().any(|version| version == "GLIBC_2.2.5"), "{versions:?}");
    }
}
