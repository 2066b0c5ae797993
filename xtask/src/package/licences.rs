//! The licences of the crates that are linked into the shipped files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

use super::build::read;
use super::sbom::Package;
use crate::workspace::root;

/// The name of the list in packages.
pub(super) const NAME: &str = "THIRD-PARTY-LICENSES.txt";
const LINE: &str =
    "--------------------------------------------------------------------------------";
/// The first words of the MIT licence behind the names of the authors.
const MIT: &str = "Permission is hereby granted, free of charge, to any person obtaining a copy";

/// The list: each text once, behind the crates that it belongs to.
pub(super) fn list(packages: &[Package]) -> anyhow::Result<Vec<u8>> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let library = String::from_utf8(read(&root().join("packaging/rust-library.txt"))?)?;
    texts.entry(plain(&library)).or_default().push("the standard library of Rust".to_owned());
    for package in packages.iter().filter(|package| package.is_of_others()) {
        let name = format!("{} {}", package.name, package.version);
        let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
        for text in texts_of(folder).with_context(|| format!("in the package {name}"))? {
            let names = texts.entry(text).or_default();
            if names.last() != Some(&name) {
                names.push(name.clone());
            }
        }
    }
    let mut groups: Vec<_> = texts.into_iter().collect();
    for (_, names) in &mut groups {
        names.sort();
    }
    groups.sort_by(|(_, a), (_, b)| a.cmp(b));
    let mut list = String::from(
        "The programs and libraries of anyverbs hold code of others. Here are its licences, each\n\
         behind the names that it belongs to. Code that may be used under one of several licences\n\
         is used under that of MIT where it is one of them.\n",
    );
    for (text, names) in groups {
        list += &format!("\n{LINE}\n{}\n{LINE}\n\n{text}", names.join("\n"));
    }
    Ok(list.into_bytes())
}

/// The licence texts in a package's folder. Where the MIT licence is among them, it and notices are enough.
fn texts_of(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let upper = name.to_uppercase();
        let begins = |words: &[&str]| words.iter().any(|word| upper.starts_with(word));
        let is_notice = begins(&["COPYRIGHT", "NOTICE"]);
        if is_notice || begins(&["LICENSE", "LICENCE", "COPYING", "UNLICENSE"]) {
            let text = plain(&String::from_utf8(read(&folder.join(&name))?)?);
            found.push((name, is_notice, text));
        }
    }
    found.sort();
    let is_mit = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").contains(MIT);
    if found.iter().all(|(_, is_notice, _)| *is_notice) {
        bail!("there is no text of a licence");
    }
    if found.iter().any(|(_, _, text)| is_mit(text)) {
        found.retain(|(_, is_notice, text)| *is_notice || is_mit(text));
    }
    Ok(found.into_iter().map(|(_, _, text)| text).collect())
}

/// A text with ends of lines as here, and without space at its ends.
fn plain(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::{build::MACHINES, sbom};
    use super::*;

    #[test]
    fn every_linked_package_of_others_is_listed() {
        for machine in MACHINES {
            let linked = sbom::linked(machine).unwrap();
            let list = String::from_utf8(list(&linked).unwrap()).unwrap();
            let lines: Vec<_> = list.lines().collect();
            let others: Vec<_> = linked.iter().filter(|package| package.is_of_others()).collect();
            assert!(others.len() > 50, "{}", others.len());
            for package in others {
                let name = format!("{} {}", package.name, package.version);
                assert!(lines.contains(&&*name), "{name}");
            }
            assert!(lines.contains(&"the standard library of Rust"));
            assert!(
                !list.contains("\nanyverbs-"),
                "our own are under the licences beside the list"
            );
            // Names and texts by turns.
            let parts: Vec<_> = list.split(LINE).skip(1).collect();
            let named = |words| parts.iter().position(|part| part.contains(words)).unwrap();
            let text = parts[named("\nflate2 ") + 1];
            assert!(text.contains("Alex Crichton") && text.contains("Permission is"), "{text}");
        }
    }

    #[test]
    fn a_package_without_a_licence_is_refused() {
        let folder = std::env::temp_dir().join(format!("anyverbs-licences-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("COPYRIGHT"), "names\r\n\n").unwrap();
        assert!(texts_of(&folder).is_err());
        fs::write(folder.join("LICENSE-APACHE"), "Apache").unwrap();
        assert_eq!(texts_of(&folder).unwrap(), ["names\n", "Apache\n"]);
        let mit = MIT.replace("granted, free", "granted,\r\n  free");
        fs::write(folder.join("license.md"), &mit).unwrap();
        assert_eq!(texts_of(&folder).unwrap(), ["names\n".to_owned(), plain(&mit)]);
        fs::remove_dir_all(folder).unwrap();
    }
}
