//! The shared objects inside the executable, for a command that is one file to carry.
//!
//! `cargo xtask package` appends to the executable a compressed archive of the objects and of the licences of the code of others.
//! A trailer follows: 32 hexadecimal digits of the archive's SHA-256, its length in eight bytes (little endian), and [`MAGIC`]. At
//! first use the objects are laid out in a directory of the user's own that bears those digits. An executable of `cargo build` has none.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use flate2::read::GzDecoder;

use crate::libraries::{self, NAMES, OBJECTS};

/// The last bytes of an executable with the objects inside.
const MAGIC: &[u8; 16] = b"anyverbs-objects";
/// The name of the licences in the archive.
pub(crate) const LICENCES: &str = "THIRD-PARTY-LICENSES.txt";
const DIGITS: usize = 32;
const TRAILER: usize = DIGITS + size_of::<u64>() + MAGIC.len();
/// The kernel's number for owners that have no number in this user namespace.
const UNMAPPED: u32 = 65534;

/// The directory with the objects of `executable`, laid out if it is not there yet. None if there are none inside.
pub(crate) fn find(executable: &Path) -> anyhow::Result<Option<PathBuf>> {
    let file =
        File::open(executable).with_context(|| format!("cannot read {}", executable.display()))?;
    let Some(mut objects) = Objects::of(file)
        .with_context(|| format!("cannot read the libraries in {}", executable.display()))?
    else {
        return Ok(None);
    };
    // SAFETY: cannot fail and touches no memory.
    let user = unsafe { libc::geteuid() };
    let mut refused = Vec::new();
    for place in places(anyverbs_environment::variable, &env::temp_dir(), user) {
        match objects.lay_out(&place, user) {
            Ok(dir) => return Ok(Some(dir)),
            Err(error) => refused.push(format!("{}: {error:#}", place.base.display())),
        }
    }
    bail!(
        "no directory can hold the libraries ({}); set TMPDIR to a directory that you can write to, or ANYVERBS_LIB_DIR \
         to one that has them",
        refused.join("; ")
    )
}

/// The licences of the code of others in this executable. None if it was not packaged.
pub(crate) fn licences() -> anyhow::Result<Option<Vec<u8>>> {
    let executable = env::current_exe().context("cannot find my own executable")?;
    let file =
        File::open(&executable).with_context(|| format!("cannot read {}", executable.display()))?;
    Objects::of(file)?.map_or(Ok(None), |mut objects| objects.licences())
}

/// A directory that may have a folder for the objects.
#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    base: PathBuf,
    folder: String,
    /// Whether other users have folders in the base, too.
    shared: bool,
}

/// The places to lay the objects out, best first.
fn places(
    variable: impl Fn(&str) -> Option<OsString>,
    temporary: &Path,
    user: u32,
) -> Vec<Candidate> {
    let own = [
        variable("XDG_CACHE_HOME").map(PathBuf::from),
        variable("HOME").map(|home| Path::new(&home).join(".cache")),
        variable("XDG_RUNTIME_DIR").map(PathBuf::from),
    ];
    let own = own.into_iter().flatten().map(|base| (base, false));
    let shared = [temporary, Path::new("/var/tmp"), Path::new("/dev/shm")];
    own.chain(shared.map(|base| (base.to_owned(), true)))
        .filter(|(base, _)| base.is_absolute())
        .map(|(base, shared)| {
            let folder = if shared { format!("anyverbs-{user}") } else { "anyverbs".into() };
            Candidate { base, folder, shared }
        })
        .collect()
}

/// The archive at the end of an executable.
#[derive(Debug)]
struct Objects {
    file: File,
    start: u64,
    len: u64,
    digits: String,
}

impl Objects {
    fn of(mut file: File) -> anyhow::Result<Option<Self>> {
        let end = file.metadata()?.len();
        let Some(trailer_start) = end.checked_sub(TRAILER as u64) else { return Ok(None) };
        let mut trailer = [0; TRAILER];
        file.seek(SeekFrom::Start(trailer_start))?;
        file.read_exact(&mut trailer)?;
        let Some(rest) = trailer.strip_suffix(MAGIC) else { return Ok(None) };
        let (digits, len) = rest.split_at(DIGITS);
        let len = u64::from_le_bytes(len.try_into().expect("a length has eight bytes"));
        let start = trailer_start.checked_sub(len).context("they are longer than the file")?;
        let digits = String::from_utf8(digits.into()).context("their hash is no text")?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            bail!("their hash is no hexadecimal number");
        }
        Ok(Some(Objects { file, start, len, digits }))
    }

    fn archive(&mut self) -> io::Result<tar::Archive<impl Read + '_>> {
        self.file.seek(SeekFrom::Start(self.start))?;
        Ok(tar::Archive::new(GzDecoder::new((&mut self.file).take(self.len))))
    }

    fn licences(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        for entry in self.archive()?.entries()? {
            let mut entry = entry?;
            if *entry.path()? == *Path::new(LICENCES) {
                let mut text = Vec::new();
                entry.read_to_end(&mut text)?;
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    /// Finds them laid out in `place`, or lays them out there.
    fn lay_out(&mut self, place: &Candidate, user: u32) -> anyhow::Result<PathBuf> {
        if !place.shared {
            if !place.base.exists() {
                check_owner(&place.base, user)?;
            }
            make_private(&place.base, user)?;
        }
        // The loader gets this name: no link in it may change later.
        let base = place.base.canonicalize()?;
        libraries::check_name(&base)?;
        let meta = fs::symlink_metadata(&base)?;
        let sticky = meta.mode() & libc::S_ISVTX != 0;
        let trusted = [0, user, UNMAPPED].contains(&meta.uid()) && sticky;
        if !is_private(&meta, user) && !trusted {
            bail!("other users could replace what is in it");
        }
        if forbids_execution(&base)? {
            bail!("it is mounted with noexec");
        }
        let folder = base.join(&place.folder);
        make_private(&folder, user)?;
        let dir = folder.join(&self.digits);
        match fs::symlink_metadata(&dir) {
            Ok(meta) if is_private(&meta, user) => {
                if libraries::missing(&dir).is_empty() {
                    return Ok(dir);
                }
            }
            Ok(_) => bail!("{} is not a directory of yours alone", dir.display()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        let fresh = self.unpack_beside(&folder)?;
        match fs::rename(&fresh, &dir) {
            Ok(()) => Ok(dir),
            // Another process was faster and has laid out the same objects, or somebody removed some of them, as the cleaners of
            // /tmp do with files that nobody read for days.
            Err(error) => {
                let completed = complete(&dir, &fresh, user);
                fs::remove_dir_all(&fresh)?;
                completed.context(error)?;
                Ok(dir)
            }
        }
    }

    /// Unpacks into a new directory with a name of its own, which is removed if that fails.
    fn unpack_beside(&mut self, folder: &Path) -> anyhow::Result<PathBuf> {
        for attempt in 0..1000 {
            // Another process with this id may live in another container that shares the folder.
            let fresh = folder.join(format!(".{}-{}-{attempt}", self.digits, std::process::id()));
            match DirBuilder::new().mode(0o700).create(&fresh) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            return match self.unpack(&fresh) {
                Ok(()) => Ok(fresh),
                Err(error) => {
                    fs::remove_dir_all(&fresh)?;
                    Err(error)
                }
            };
        }
        bail!("every name for a new directory is taken")
    }

    fn unpack(&mut self, into: &Path) -> anyhow::Result<()> {
        let mut missing = OBJECTS.to_vec();
        for entry in self.archive()?.entries()? {
            let mut entry = entry?;
            let path = entry.path()?.into_owned();
            if path == Path::new(LICENCES) {
                continue;
            }
            let Some(at) = missing.iter().position(|name| Path::new(name) == path) else {
                bail!("{} does not belong in them", path.display());
            };
            let mut options = OpenOptions::new();
            let mut file = options
                .write(true)
                .create_new(true)
                .mode(0o755)
                .open(into.join(missing.swap_remove(at)))?;
            io::copy(&mut entry, &mut file)?;
            // After a power failure the directory's final name stands for whole files.
            file.sync_all()?;
        }
        if !missing.is_empty() {
            bail!("they are without {}", missing.join(", "));
        }
        for name in &NAMES[1..] {
            symlink(NAMES[0], into.join(name))?;
        }
        Ok(())
    }
}

/// Moves what `dir` lacks from `fresh` to it. Programs may use the rest.
fn complete(dir: &Path, fresh: &Path, user: u32) -> anyhow::Result<()> {
    if !is_private(&fs::symlink_metadata(dir)?, user) {
        bail!("{} is not a directory of yours alone", dir.display());
    }
    for name in libraries::missing(dir) {
        fs::rename(fresh.join(name), dir.join(name))?;
    }
    Ok(())
}

/// Fails if the directory around `base` is another user's. Root with the HOME of a user, as after `sudo -E`, would leave that user
/// a cache directory of root's.
fn check_owner(base: &Path, user: u32) -> anyhow::Result<()> {
    let around = base.parent().context("the root directory is missing")?;
    if fs::metadata(around)?.uid() != user {
        bail!("{} belongs to another user", around.display());
    }
    Ok(())
}

/// Makes a directory that is the user's alone, or accepts one that is there.
fn make_private(dir: &Path, user: u32) -> anyhow::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    // A user's own cache directory may be a link. A link in a directory of all users may be anyone's.
    let meta = fs::symlink_metadata(dir)?;
    if meta.is_symlink() && meta.uid() == user && is_private(&fs::metadata(dir)?, user) {
        return Ok(());
    }
    if !is_private(&meta, user) {
        bail!("{} is not a directory of yours alone", dir.display());
    }
    Ok(())
}

/// Whether it is a directory that only `user`, and root, can change.
fn is_private(meta: &Metadata, user: u32) -> bool {
    meta.is_dir() && meta.uid() == user && meta.mode() & 0o022 == 0
}

/// Tells whether the file system refuses to map its files as code.
fn forbids_execution(dir: &Path) -> io::Result<bool> {
    let name = CString::new(dir.as_os_str().as_bytes())?;
    // SAFETY: a plain structure, for which zeros are a valid value.
    let mut state: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the name ends with a zero byte, and the structure outlives the call.
    if unsafe { libc::statvfs(name.as_ptr(), &raw mut state) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(state.f_flag & libc::ST_NOEXEC != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir =
                env::temp_dir().join(format!("anyverbs-embedded-{}-{name}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&dir).unwrap();
            Scratch(dir.canonicalize().unwrap())
        }

        fn place(&self, shared: bool) -> Candidate {
            Candidate { base: self.0.clone(), folder: "anyverbs".into(), shared }
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn me() -> u32 {
        // SAFETY: cannot fail and touches no memory.
        unsafe { libc::geteuid() }
    }

    /// An executable with these files inside.
    fn executable(scratch: &Scratch, names: &[&str]) -> PathBuf {
        let gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let mut archive = tar::Builder::new(gzip);
        for name in names {
            let mut header = tar::Header::new_ustar();
            header.set_size(name.len() as u64);
            archive.append_data(&mut header, name, name.as_bytes()).unwrap();
        }
        let archive = archive.into_inner().unwrap().finish().unwrap();
        let path = scratch.0.join("executable");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"\x7fELF and so on").unwrap();
        file.write_all(&archive).unwrap();
        file.write_all(KEY.as_bytes()).unwrap();
        file.write_all(&(archive.len() as u64).to_le_bytes()).unwrap();
        file.write_all(MAGIC).unwrap();
        path
    }

    fn objects(scratch: &Scratch, names: &[&str]) -> Objects {
        Objects::of(File::open(executable(scratch, names)).unwrap()).unwrap().unwrap()
    }

    #[test]
    fn the_objects_are_laid_out_once() {
        let scratch = Scratch::new("once");
        let mut objects = objects(&scratch, &OBJECTS);
        let dir = objects.lay_out(&scratch.place(true), me()).unwrap();
        assert_eq!(dir, scratch.0.join("anyverbs").join(KEY));
        for name in OBJECTS {
            assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), name);
        }
        for name in NAMES {
            assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), NAMES[0]);
        }
        let inode = fs::metadata(&dir).unwrap().ino();
        assert_eq!(objects.lay_out(&scratch.place(true), me()).unwrap(), dir);
        assert_eq!(fs::metadata(&dir).unwrap().ino(), inode);
        // No unfinished file stays.
        assert_eq!(fs::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn the_licences_are_read_and_not_laid_out() {
        let scratch = Scratch::new("licences");
        let names = [&OBJECTS[..], &[LICENCES]].concat();
        let mut with = objects(&scratch, &names);
        assert_eq!(with.licences().unwrap().unwrap(), LICENCES.as_bytes());
        let dir = with.lay_out(&scratch.place(true), me()).unwrap();
        assert!(!dir.join(LICENCES).exists());
        assert!(objects(&scratch, &OBJECTS).licences().unwrap().is_none());
    }

    #[test]
    fn what_was_removed_is_laid_out_again() {
        let scratch = Scratch::new("removed");
        let mut objects = objects(&scratch, &OBJECTS);
        let dir = objects.lay_out(&scratch.place(true), me()).unwrap();
        let inode = |name: &str| fs::metadata(dir.join(name)).unwrap().ino();
        let kept = inode(OBJECTS[1]);
        for removed in [OBJECTS[0], OBJECTS[2], NAMES[3]] {
            fs::remove_file(dir.join(removed)).unwrap();
            assert_eq!(objects.lay_out(&scratch.place(true), me()).unwrap(), dir);
            assert!(libraries::missing(&dir).is_empty(), "{removed}");
        }
        assert_eq!(inode(OBJECTS[1]), kept);
        assert_eq!(fs::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn many_at_once_agree_on_one_directory() {
        let scratch = Scratch::new("many");
        let path = executable(&scratch, &OBJECTS);
        let dirs: Vec<PathBuf> = std::thread::scope(|scope| {
            let lay_out = || {
                let mut objects = Objects::of(File::open(&path).unwrap()).unwrap().unwrap();
                objects.lay_out(&scratch.place(true), me()).unwrap()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(lay_out)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(dirs.iter().all(|dir| *dir == dirs[0]));
        assert_eq!(fs::read_dir(dirs[0].parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_that_others_can_change_is_refused() {
        let scratch = Scratch::new("others");
        let mut objects = objects(&scratch, &OBJECTS);
        let refused = |objects: &mut Objects, shared| {
            let error = objects.lay_out(&scratch.place(shared), me()).unwrap_err();
            assert!(
                ["of yours alone", "could replace"]
                    .iter()
                    .any(|why| error.to_string().contains(why)),
                "{error:#}"
            );
        };
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        // The base, without the sticky bit.
        mode(&scratch.0, 0o777);
        refused(&mut objects, true);
        refused(&mut objects, false);
        mode(&scratch.0, 0o1777);
        // The folder was made by another user before.
        let folder = scratch.0.join("anyverbs");
        fs::create_dir(&folder).unwrap();
        mode(&folder, 0o777);
        refused(&mut objects, true);
        fs::remove_dir(&folder).unwrap();
        // A link of another user to a directory of this user's. The link might be turned elsewhere later.
        let elsewhere = scratch.0.join("elsewhere");
        DirBuilder::new().mode(0o700).create(&elsewhere).unwrap();
        symlink(&elsewhere, &folder).unwrap();
        if me() == 0 {
            std::os::unix::fs::lchown(&folder, Some(1), Some(1)).unwrap();
            refused(&mut objects, true);
        }
        fs::remove_file(&folder).unwrap();
        // The objects' own directory.
        let dir = objects.lay_out(&scratch.place(true), me()).unwrap();
        mode(&dir, 0o722);
        refused(&mut objects, true);
    }

    #[test]
    fn no_cache_is_made_in_the_home_of_another_user() {
        let scratch = Scratch::new("home");
        let mut objects = objects(&scratch, &OBJECTS);
        let base = scratch.0.join(".cache");
        let place = Candidate { base: base.clone(), folder: "anyverbs".into(), shared: false };
        let error = objects.lay_out(&place, me() + 1).unwrap_err();
        assert!(error.to_string().contains("belongs to another user"), "{error:#}");
        assert!(!base.exists());
        objects.lay_out(&place, me()).unwrap();
    }

    #[test]
    fn an_incomplete_archive_is_refused_and_leaves_nothing() {
        let scratch = Scratch::new("whole");
        for names in [&OBJECTS[1..], &[OBJECTS[0], OBJECTS[0]], &["foreign"]] {
            assert!(objects(&scratch, names).lay_out(&scratch.place(true), me()).is_err());
            assert_eq!(fs::read_dir(scratch.0.join("anyverbs")).unwrap().count(), 0);
        }
        // Cut short: the length in the trailer reaches beyond the beginning.
        let path = executable(&scratch, &OBJECTS);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[bytes.len() - TRAILER - 10..]).unwrap();
        assert!(Objects::of(File::open(&path).unwrap()).is_err());
    }

    #[test]
    fn an_ordinary_executable_has_none() {
        let executable = env::current_exe().unwrap();
        assert!(Objects::of(File::open(executable).unwrap()).unwrap().is_none());
        assert!(Objects::of(File::open("/dev/null").unwrap()).unwrap().is_none());
    }

    #[test]
    fn places_of_the_users_own_come_first() {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/me".into()),
            "XDG_RUNTIME_DIR" => Some("relative".into()),
            _ => None,
        };
        let places = places(variable, Path::new("/scratch"), 7);
        let bases: Vec<_> = places.iter().map(|place| place.base.to_str().unwrap()).collect();
        assert_eq!(bases, ["/home/me/.cache", "/scratch", "/var/tmp", "/dev/shm"]);
        assert_eq!((&places[0].folder[..], &places[1].folder[..]), ("anyverbs", "anyverbs-7"));
    }
}
