//! `cargo xtask abi-check`: checks that the built shared objects export exactly the symbols in rdma-core's tables.
//!
//! It reads an object's dynamic symbol table and the tables in `crates/capi/abi` on its own. The build script made the
//! one from the other, so a mistake there shows here. The preload object for sockets exports rdma-core's calls and
//! more; its table is `crates/rspreload/abi`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use object::{Object as _, ObjectSymbol as _, elf, read::elf::ElfFile64};

use crate::dist::Dist;

const TABLES: &[&str] = &["libibverbs", "librdmacm", "libmlx5", "libmlx4", "libefa"];
const PRIVATE: &str = "IBVERBS_PRIVATE_";
const SONAME: &[u8] = b"libibverbs.so.1";

/// (symbol, version) to whether it is the symbol's default version.
type Symbols = BTreeMap<(String, String), bool>;

/// Checks the shared objects of a layout.
pub(crate) fn run_all(root: &Path, dist: &Dist) -> anyhow::Result<()> {
    run(root, &dist.libibverbs())?;
    run(root, &dist.rspreload())
}

/// Compares the preload object for sockets with `root/crates/rspreload/abi`.
fn run_rspreload(root: &Path, object: &Path) -> anyhow::Result<()> {
    let table = read(&root.join("crates/rspreload/abi/librspreload.symbols"))?;
    let expected = preloaded(&table)?;
    let built = built(object)?;
    let mut differences = compare(&expected, &built.symbols);
    // A preload object is named by its path; rdma-core's has no name of its own either.
    if !built.soname.is_empty() {
        differences.push(format!("soname is {:?}", String::from_utf8_lossy(&built.soname)));
    }
    report(object, &differences)?;
    println!("{}: {} symbols, as the table says", object.display(), expected.len());
    Ok(())
}

/// The symbols of a preload object, which have no versions.
fn preloaded(table: &str) -> anyhow::Result<Symbols> {
    lines(table)
        .map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [name, "yes" | "no"] => Ok(((name.to_owned(), String::new()), true)),
            _ => bail!("not a symbol and whether rdma-core has it: {line}"),
        })
        .collect()
}

/// Prints the differences and fails if there are any.
fn report(object: &Path, differences: &[String]) -> anyhow::Result<()> {
    for line in differences {
        eprintln!("{line}");
    }
    if !differences.is_empty() {
        bail!("{}: {} differences from the ABI tables", object.display(), differences.len());
    }
    Ok(())
}

/// Compares the shared object with `root/crates/capi/abi`, or the preload object for sockets with its table; prints each
/// difference and fails if there is any.
pub(crate) fn run(root: &Path, object: &Path) -> anyhow::Result<()> {
    if object.file_name().is_some_and(|name| name == "librspreload.so") {
        return run_rspreload(root, object);
    }
    let expected = expected(&root.join("crates/capi/abi"))?;
    let built = built(object)?;
    let mut differences = compare(&expected, &built.symbols);
    for library in installed() {
        let found = self::built(&library)?.symbols;
        differences.extend(newer(&expected, &found).map(|n| format!("{}: {n}", library.display())));
    }
    if built.soname != SONAME {
        differences.push(format!("soname is {:?}", String::from_utf8_lossy(&built.soname)));
    }
    if !built.nodelete {
        differences.push("the object can be unloaded: -z nodelete is missing".into());
    }
    report(object, &differences)?;
    let versions: BTreeSet<&str> = expected.keys().map(|(_, v)| v.as_str()).collect();
    println!(
        "{}: {} symbols in {} versions, as the tables say",
        object.display(),
        expected.len(),
        versions.len()
    );
    Ok(())
}

/// The machine's own libraries of rdma-core, whichever are there.
fn installed() -> Vec<PathBuf> {
    let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let paths = [multiarch.as_str(), "/usr/lib64"]
        .into_iter()
        .flat_map(|dir| TABLES.iter().map(move |name| Path::new(dir).join(format!("{name}.so.1"))));
    paths.filter(|path| path.exists()).collect()
}

/// Exports of an rdma-core that the tables do not have, since it is newer than they are. Private nodes are of its own
/// providers.
fn newer<'a>(expected: &'a Symbols, found: &'a Symbols) -> impl Iterator<Item = String> + 'a {
    let missing =
        found.keys().filter(|key| !key.1.starts_with(PRIVATE) && !expected.contains_key(key));
    missing.map(|(name, version)| {
        format!("{name}: {version} is newer than the tables; add it to crates/capi/abi")
    })
}

fn compare(expected: &Symbols, built: &Symbols) -> Vec<String> {
    let mut lines = Vec::new();
    for ((name, version), default) in expected {
        match built.get(&(name.clone(), version.clone())) {
            Some(d) if d == default => {}
            Some(_) => {
                let want = if *default { "the default" } else { "not the default" };
                lines.push(format!("{name}: {version} should be {want} version"));
            }
            None => {
                let found: Vec<_> =
                    built.keys().filter(|(n, _)| n == name).map(|(_, v)| v.as_str()).collect();
                let found = if found.is_empty() { "nothing".into() } else { found.join(", ") };
                lines.push(format!("{name}: {version} is missing (exported: {found})"));
            }
        }
    }
    for key @ (name, version) in built.keys() {
        if !expected.contains_key(key) {
            let version = if version.is_empty() { "without a version" } else { version };
            lines.push(format!("{name}: {version} is exported but in no table"));
        }
    }
    lines
}

/// The exports that the tables demand. The private nodes of releases without a table get the names of all tables. A
/// name's default is its newest private node: see `private-releases.txt`.
fn expected(abi: &Path) -> anyhow::Result<Symbols> {
    let mut symbols = Symbols::new();
    let mut private: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for table in TABLES {
        let path = abi.join(format!("{table}.symbols"));
        for line in lines(&read(&path)?) {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let [name, version, kind, ..] = columns[..] else {
                bail!("{}: {line}", path.display())
            };
            if let Some(release) = version.strip_prefix(PRIVATE) {
                private.entry(release.parse()?).or_default().insert(name.to_owned());
            } else if symbols
                .insert((name.to_owned(), version.to_owned()), kind == "default")
                .is_some()
            {
                bail!("{}: {name} {version} stands there twice", path.display());
            }
        }
    }
    let all: BTreeSet<String> =
        private.values().flatten().filter(|n| !registers_driver(n)).cloned().collect();
    let mut newer = BTreeSet::new();
    let releases = read(&abi.join("private-releases.txt"))?;
    let mut releases = lines(&releases).map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    releases.sort_unstable();
    for release in releases.into_iter().rev() {
        let names = private.get(&release).cloned().unwrap_or_else(|| {
            let own = format!("verbs_register_driver_{release}");
            all.iter().cloned().chain([own]).collect()
        });
        for name in names {
            let default = newer.insert(name.clone());
            symbols.insert((name, format!("{PRIVATE}{release}")), default);
        }
    }
    Ok(symbols)
}

fn registers_driver(name: &str) -> bool {
    name.starts_with("verbs_register_driver_")
}

struct Built {
    symbols: Symbols,
    soname: Vec<u8>,
    nodelete: bool,
}

/// The defined dynamic symbols of the object with their versions, and the entries of its dynamic section.
fn built(path: &Path) -> anyhow::Result<Built> {
    let data = fs::read(path).with_context(|| format!("{}: build it first", path.display()))?;
    let file: ElfFile64<'_> =
        ElfFile64::parse(&*data).with_context(|| path.display().to_string())?;
    let endian = file.endian();
    let sections = file.elf_section_table();
    let versions = sections.versions(endian, &*data)?;
    let mut symbols = Symbols::new();
    for symbol in file.dynamic_symbols().filter(|s| s.is_definition() && s.is_global()) {
        // The linker may export each version's name as an absolute symbol; it is not part of the interface.
        if symbol.elf_symbol().st_shndx.get(endian) == elf::SHN_ABS {
            continue;
        }
        let (mut version, mut hidden) = (String::new(), false);
        if let Some(table) = &versions {
            let index = table.version_index(endian, symbol.index());
            hidden = index.is_hidden();
            if let Some(v) = table.version(index)? {
                version = String::from_utf8_lossy(v.name()).into_owned();
            }
        }
        symbols.insert((symbol.name()?.to_owned(), version), !hidden);
    }
    let (mut soname, mut nodelete) = (Vec::new(), false);
    if let Some((entries, strings)) = sections.dynamic(endian, &*data)? {
        let strings = sections.strings(endian, &*data, strings)?;
        for entry in entries {
            match entry.d_tag.get(endian) as u32 {
                elf::DT_SONAME => {
                    let offset = u32::try_from(entry.d_val.get(endian))?;
                    soname = strings
                        .get(offset)
                        .map_err(|()| anyhow::anyhow!("the soname is no string"))?
                        .to_vec();
                }
                elf::DT_FLAGS_1 => {
                    nodelete = entry.d_val.get(endian) & u64::from(elf::DF_1_NODELETE) != 0
                }
                _ => {}
            }
        }
    }
    Ok(Built { symbols, soname, nodelete })
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(rows: &[(&str, &str, bool)]) -> Symbols {
        rows.iter().map(|(n, v, d)| ((n.to_string(), v.to_string()), *d)).collect()
    }

    #[test]
    fn every_kind_of_difference_is_reported() {
        let table = symbols(&[
            ("a", "V_1", true),
            ("b", "V_1", true),
            ("c", "V_1", false),
            ("d", "V_1", true),
        ]);
        let object =
            symbols(&[("a", "V_1", true), ("b", "V_2", true), ("c", "V_1", true), ("e", "", true)]);
        assert_eq!(
            compare(&table, &object),
            [
                "b: V_1 is missing (exported: V_2)",
                "c: V_1 should be not the default version",
                "d: V_1 is missing (exported: nothing)",
                "b: V_2 is exported but in no table",
                "e: without a version is exported but in no table",
            ]
        );
        assert!(compare(&table, &table).is_empty());
    }

    #[test]
    fn exports_of_a_newer_release_are_reported() {
        let table = symbols(&[("a", "V_1", true)]);
        let release =
            symbols(&[("a", "V_1", true), ("a", "V_2", true), ("p", "IBVERBS_PRIVATE_70", true)]);
        let found: Vec<_> = newer(&table, &release).collect();
        assert_eq!(found, ["a: V_2 is newer than the tables; add it to crates/capi/abi"]);
        assert_eq!(newer(&table, &table).count(), 0);
    }

    #[test]
    fn the_preload_objects_table_is_read() {
        let table = preloaded("# symbol\naccept yes\naccept4 no\n").unwrap();
        assert_eq!(table, symbols(&[("accept", "", true), ("accept4", "", true)]));
        assert!(preloaded("accept\n").is_err());
        let object = symbols(&[("accept", "", true), ("poll", "", true)]);
        assert_eq!(compare(&table, &object).len(), 2);
    }

    #[test]
    fn a_private_name_is_default_in_its_newest_node_only() {
        let abi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/capi/abi");
        let table = expected(&abi).unwrap();
        let kind = |version: &str| table[&("ibv_query_gid_type".to_owned(), version.to_owned())];
        assert!(
            !kind("IBVERBS_PRIVATE_34")
                && !kind("IBVERBS_PRIVATE_59")
                && kind("IBVERBS_PRIVATE_65")
        );
        // Programs of Ubuntu 20.04 need it.
        assert!(!kind("IBVERBS_PRIVATE_25"));
        assert!(table[&("verbs_register_driver_25".to_owned(), "IBVERBS_PRIVATE_25".to_owned())]);
        assert!(table[&("verbs_register_driver_59".to_owned(), "IBVERBS_PRIVATE_59".to_owned())]);
    }
}
