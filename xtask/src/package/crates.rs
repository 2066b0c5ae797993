//! Packs every crate as for the registry, and builds each from its package, without uploading.

use super::remove;
use crate::conformance::Tally;
use crate::workspace::{cargo, succeed, target};

pub(super) fn run_counted() -> anyhow::Result<Tally> {
    let place = target().join("package-tests/crates");
    let mut publish = cargo();
    publish.args(["publish", "--quiet", "--dry-run", "--workspace", "--locked", "--allow-dirty"]);
    let result = succeed(publish.arg("--target-dir").arg(&place));
    remove(&place)?;
    match result {
        Ok(()) => {
            println!("ok   crates");
            Ok(Tally { passed: 1, ..Tally::default() })
        }
        Err(error) => {
            println!("FAIL crates: {error:#}");
            Ok(Tally { failed: 1, ..Tally::default() })
        }
    }
}
