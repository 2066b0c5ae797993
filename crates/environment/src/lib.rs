//! Environment variables, which a program with more rights than its user does not obey.
//!
//! A set-user-ID program, or one with file capabilities, gets its environment from a user without the rights that the
//! program has. A variable that names a file would let that user read or write it. So every variable is read here, as
//! `secure_getenv(3)` does. The crates that programs load forbid `std::env::var` (`disallowed_methods` in clippy.toml).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::ffi::OsString;

/// Whether the kernel started this program with more rights than its user has (`AT_SECURE`).
#[must_use]
pub fn is_privileged() -> bool {
    // SAFETY: takes no pointers, and answers 0 for values that the kernel did not give.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// A variable of the environment; `None` in a privileged program.
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    if is_privileged() {
        return None;
    }
    #[expect(clippy::disallowed_methods, reason = "the one place that may")]
    std::env::var_os(name)
}

/// The names of all variables that are UTF-8; none in a privileged program.
#[must_use]
pub fn names() -> Vec<String> {
    if is_privileged() {
        return Vec::new();
    }
    #[expect(clippy::disallowed_methods, reason = "the one place that may")]
    std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect()
}

/// As [`variable`]; `None` as well for one that is no UTF-8.
#[must_use]
pub fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_program_reads_its_environment() {
        assert!(!is_privileged());
        assert!(variable("PATH").is_some());
        assert_eq!(variable("A_VARIABLE_THAT_NOBODY_SETS"), None);
        assert!(names().iter().any(|name| name == "PATH"));
    }
}
