//! One file to carry: the command with the libraries inside.

use super::archive::{Tree, hex, sha256};
use super::build::{check_laid_out, check_size};
use super::licences;

/// The end of such a file, after the archive's length. `crates/cli/src/embedded.rs` reads it.
const MAGIC: &[u8; 16] = b"anyverbs-objects";

/// Appends the objects, and the licences of the code of others, to the command.
pub(super) fn one_file(
    anyverbs: &[u8],
    objects: &Tree,
    third_party: &[u8],
) -> anyhow::Result<Vec<u8>> {
    check_laid_out(objects)?;
    let mut tree = objects.clone();
    tree.file(licences::NAME, third_party);
    // Their age would change the name of the directory that they are laid out in.
    let archive = tree.tar_gz("", 0)?;
    let mut file = anyverbs.to_vec();
    file.extend(&archive);
    file.extend(hex(&sha256(&archive)[..16]).into_bytes());
    file.extend((archive.len() as u64).to_le_bytes());
    file.extend(MAGIC);
    let mut alone = Tree::default();
    alone.executable("anyverbs", &file[..]);
    check_size("the one file", &alone)?;
    Ok(file)
}
