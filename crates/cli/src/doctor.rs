//! `anyverbs doctor`.
use crate::args::Doctor;
use std::process::ExitCode;
pub(crate) fn print(_args: &Doctor) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
