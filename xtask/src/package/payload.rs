//! One file to carry: the command with the libraries inside.

use super::archive::{Tree, hex, sha256};

/// The end of such a file, after the archive's length. `crates/cli/src/embedded.rs` reads it.
const MAGIC: &[u8; 16] = b"anyverbs-objects";

/// Appends the objects to the command.
pub(super) fn one_file(anyverbs: &[u8], objects: &Tree) -> anyhow::Result<Vec<u8>> {
    // Their age would change the name of the directory that they are laid out in.
    let archive = objects.tar_gz("", 0)?;
    let mut file = anyverbs.to_vec();
    file.extend(&archive);
    file.extend(hex(&sha256(&archive)[..16]).into_bytes());
    file.extend((archive.len() as u64).to_le_bytes());
    file.extend(MAGIC);
    Ok(file)
}
