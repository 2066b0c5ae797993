//! The files that the kernel starts with a program. This also tells whether the loader obeys its variables then (`AT_SECURE`,
//! getauxval(3)).

use std::ffi::{CString, OsStr, c_void};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::elf::find;

/// The kernel follows so many interpreters of interpreters.
const MOST: usize = 5;

/// Whether this user may execute a file.
pub(super) fn is_executable(path: &Path) -> bool {
    // SAFETY: a path with its end.
    let may = |path: CString| unsafe { libc::access(path.as_ptr(), libc::X_OK) == 0 };
    path.is_file() && CString::new(path.as_os_str().as_bytes()).is_ok_and(may)
}

/// A program, and the interpreters that run it if it is a script. The last one is what the loader gets.
pub(super) fn chain(program: &Path) -> Vec<PathBuf> {
    let mut chain = vec![program.to_owned()];
    while chain.len() <= MOST
        && let Some(next) = interpreters(&chain[chain.len() - 1])
    {
        chain.extend(next);
    }
    chain
}

/// The program in the first line of a script, and the one that `env` starts, if it is that.
fn interpreters(script: &Path) -> Option<Vec<PathBuf>> {
    // The kernel reads no more of the line.
    let mut head = Vec::new();
    File::open(script).ok()?.take(256).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words =
        line.split(|byte| b" \t\r".contains(byte)).filter(|w| !w.is_empty()).map(OsStr::from_bytes);
    let interpreter = PathBuf::from(words.next()?);
    let is_env = interpreter.file_name() == Some(OsStr::new("env"));
    let mut found = vec![interpreter];
    if is_env {
        let mut words = words.map(OsStr::as_bytes);
        // Options, and variables for the program.
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
        found.extend(name.and_then(|name| find(Path::new(OsStr::from_bytes(name)))));
    }
    Some(found)
}

/// The one that starts a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    uid: u32,
    gid: u32,
    /// It gets no rights by a program (`PR_SET_NO_NEW_PRIVS`).
    stays: bool,
}

impl Caller {
    /// This process.
    pub(super) fn current() -> Self {
        // SAFETY: none of them takes a pointer.
        unsafe {
            let stays = libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1;
            Self { uid: libc::getuid(), gid: libc::getgid(), stays }
        }
    }

    /// Why the loader ignores the variables of this caller for a program, which is no script; `None` if it obeys them.
    pub(super) fn is_refused(&self, program: &Path) -> Option<&'static str> {
        let meta = program.metadata().ok().filter(|meta| meta.is_file())?;
        let path = CString::new(program.as_os_str().as_bytes()).ok()?;
        // SAFETY: a path with its end, and a live structure, for which all-zero is valid.
        let ignores_bits = unsafe {
            let mut system: libc::statvfs = std::mem::zeroed();
            libc::statvfs(path.as_ptr(), &raw mut system) == 0
                && system.f_flag & libc::ST_NOSUID != 0
        };
        if ignores_bits {
            return None;
        }
        let has = |bits| meta.mode() & bits == bits;
        if !self.stays && has(libc::S_ISUID) && meta.uid() != self.uid {
            return Some("set-user-ID");
        }
        // Without the right to execute, the bit has another meaning.
        if !self.stays && has(libc::S_ISGID | libc::S_IXGRP) && meta.gid() != self.gid {
            return Some("set-group-ID");
        }
        (self.uid != 0 && has_capabilities(&path)).then_some("a file with capabilities")
    }
}

/// Whether a program gets capabilities by its file (capabilities(7)).
fn has_capabilities(path: &CString) -> bool {
    let mut value = [0u8; 24];
    // SAFETY: a path and a name with their ends, and a live buffer of this length.
    let len = unsafe {
        libc::getxattr(
            path.as_ptr(),
            c"security.capability".as_ptr(),
            value.as_mut_ptr().cast::<c_void>(),
            value.len(),
        )
    };
    // Little-endian words: flags, of which the lowest says "effective"; permitted, inheritable; again for the high half.
    let is_set = |range: std::ops::Range<usize>| value[range].iter().any(|byte| *byte != 0);
    len >= 12 && (value[0] & 1 != 0 || is_set(4..8) || is_set(12..16))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    const OTHER: u32 = 65534;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Self {
            let name = format!("anyverbs-start-{test}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            Self(path)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, text).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn interpreters_are_followed() {
        let scratch = Scratch::new("scripts");
        let sh = find(Path::new("sh")).unwrap();
        let a = scratch.write("a", "#! /bin/sh -e\n");
        assert_eq!(chain(&a), [a.clone(), "/bin/sh".into()]);
        let b = scratch.write("b", &format!("#!{} x\n", a.display()));
        assert_eq!(chain(&b), [b.clone(), a, "/bin/sh".into()]);
        let c = scratch.write("c", "#!/usr/bin/env -S X=1 sh -e");
        assert_eq!(chain(&c), [c.clone(), "/usr/bin/env".into(), sh]);
        let own = scratch.0.join("own");
        let own = scratch.write("own", &format!("#!{}\n", own.display()));
        assert!(chain(&own).len() <= MOST + 1, "a script that runs itself");
        let empty = scratch.write("empty", "#!\n");
        assert_eq!(chain(&empty), [empty]);
    }

    /// A copy of env(1), which prints its variables. The loader takes its own ones away if it does not obey them.
    #[test]
    fn the_loader_refuses_as_foretold() {
        if !anyverbs_testing::root_or_skip() {
            return;
        }
        let scratch = Scratch::new("refused");
        let program = scratch.0.join("env");
        let caller = Caller { uid: OTHER, gid: OTHER, stays: false };
        let mut seen = Vec::new();
        // Effective and permitted: CAP_NET_BIND_SERVICE. The second one gives nothing.
        let caps = |flags: u32, permitted: u32| {
            let words = [0x0200_0000 | flags, permitted, 0, 0, 0];
            words.map(u32::to_le_bytes).concat()
        };
        for (owner, group, mode, capabilities) in [
            (0, 0, 0o755, None),
            (0, 0, 0o4755, None),
            (OTHER, 0, 0o4755, None),
            (0, 0, 0o2755, None),
            (0, 0, 0o2745, None),
            (0, OTHER, 0o2755, None),
            (0, 0, 0o755, Some(caps(1, 1 << 10))),
            (0, 0, 0o755, Some(caps(0, 0))),
            (OTHER, 0, 0o711, None),
        ] {
            let _ = fs::remove_file(&program);
            fs::copy("/usr/bin/env", &program).unwrap();
            chown(&program, Some(owner), Some(group)).unwrap();
            fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
            if let Some(value) = &capabilities {
                let path = CString::new(program.as_os_str().as_bytes()).unwrap();
                // SAFETY: a path and a name with their ends, and a live buffer of this length.
                let rc = unsafe {
                    libc::setxattr(
                        path.as_ptr(),
                        c"security.capability".as_ptr(),
                        value.as_ptr().cast(),
                        value.len(),
                        0,
                    )
                };
                assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
            }
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", "/nowhere").uid(OTHER).gid(OTHER);
            let printed = command.output().unwrap();
            assert!(printed.status.success(), "{owner} {group} {mode:o} {printed:?}");
            let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
            let obeys = printed.lines().any(|line| line.starts_with("LD_LIBRARY_PATH="));
            let foretold = caller.is_refused(&program);
            assert_eq!(foretold.is_none(), obeys, "{owner} {group} {mode:o} {capabilities:?}");
            seen.extend(foretold);
        }
        assert_eq!(seen, ["set-user-ID", "set-group-ID", "a file with capabilities"]);
    }
}
