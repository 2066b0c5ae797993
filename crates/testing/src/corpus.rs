//! The corpora of the fuzz targets: named inputs, and a pack of those that the fuzzer kept.
//!
//! `fuzz/corpus/TARGET/` holds one file for each named input, and `fuzz/corpus/TARGET.pack` the others, if there are any. A pack is a
//! sequence of inputs. Each is its length (four bytes, the lowest first), and then its bytes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of a target's named inputs.
#[must_use]
pub fn named(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// The file of a target's other inputs, which need not be there.
#[must_use]
pub fn packed(target: &str) -> PathBuf {
    named(target).with_extension("pack")
}

/// Every input of a target, in a fixed order, with the file's name or the number in the pack.
///
/// # Errors
/// A file cannot be read, or the pack is damaged.
pub fn inputs(target: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut inputs = Vec::new();
    match fs::read_dir(named(target)) {
        Ok(folder) => {
            for entry in folder {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                inputs.push((name, fs::read(entry.path())?));
            }
        }
        // A target may have kept inputs alone.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    inputs.sort();
    inputs.extend(
        kept(target)?.into_iter().enumerate().map(|(n, input)| (format!("packed {n}"), input)),
    );
    Ok(inputs)
}

/// The inputs of a target's pack; none if it has no pack.
///
/// # Errors
/// The pack cannot be read, or is damaged.
pub fn kept(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let path = packed(target);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    unpack(&bytes).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()))
    })
}

/// Runs the body of a fuzz target over its corpus.
///
/// # Panics
/// If the corpus is empty or damaged, or the body panics. The last name that is printed is that of the input.
pub fn replay(target: &str, run: impl Fn(&[u8])) {
    let inputs = inputs(target).expect("the corpus can be read");
    assert!(!inputs.is_empty(), "the corpus of {target} is empty");
    for (name, input) in inputs {
        println!("{target}: {name}");
        run(&input);
    }
}

/// A pack of inputs: each once, the shortest first, so that the same inputs give the same bytes.
#[must_use]
pub fn pack(mut inputs: Vec<Vec<u8>>) -> Vec<u8> {
    inputs.sort_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
    inputs.dedup();
    let mut bytes = Vec::new();
    for input in inputs {
        let length = u32::try_from(input.len()).expect("an input is no gigabytes");
        bytes.extend(length.to_le_bytes());
        bytes.extend(input);
    }
    bytes
}

/// The inputs of a pack; `None` if its end does not fit.
#[must_use]
pub fn unpack(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut inputs = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk()?;
        let (input, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        inputs.push(input.to_vec());
        bytes = rest;
    }
    Some(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pack_holds_each_input_once() {
        let inputs = [&b"long"[..], b"", b"b", b"a", b"long"].map(<[u8]>::to_vec);
        let bytes = pack(inputs.to_vec());
        let unpacked = unpack(&bytes).unwrap();
        assert_eq!(unpacked, [&b""[..], b"a", b"b", b"long"].map(<[u8]>::to_vec));
        assert_eq!(pack(unpacked), bytes);
        assert_eq!(unpack(b""), Some(Vec::new()));
    }

    #[test]
    fn a_damaged_pack_is_refused() {
        let bytes = pack(vec![b"one".to_vec(), b"three".to_vec()]);
        for end in (1..bytes.len()).filter(|end| *end != 4 + 3) {
            assert_eq!(unpack(&bytes[..end]), None, "{end}");
        }
    }

    #[test]
    fn packs_of_the_repository_are_in_order() {
        let packs = fs::read_dir(named("")).unwrap().map(|entry| entry.unwrap().path());
        let packs: Vec<_> =
            packs.filter(|path| path.extension().is_some_and(|kind| kind == "pack")).collect();
        assert!(!packs.is_empty());
        for path in packs {
            let bytes = fs::read(&path).unwrap();
            assert_eq!(pack(unpack(&bytes).unwrap()), bytes, "{}", path.display());
        }
    }

    #[test]
    fn named_and_packed_inputs_are_read() {
        let inputs = inputs("packet").unwrap();
        let named = fs::read_dir(named("packet")).unwrap().count();
        assert_eq!(inputs.len(), named + kept("packet").unwrap().len());
        assert!(inputs.iter().any(|(name, _)| name == "cnp-pad0"));
        assert!(super::inputs("no such target").unwrap().is_empty());
    }
}
